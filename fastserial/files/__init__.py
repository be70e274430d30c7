"""Paths and descriptors: targets, atomic replacement, direct I/O, page cache, what Linux knows."""
