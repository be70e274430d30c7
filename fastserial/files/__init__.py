"""Paths and descriptors: targets, atomic replacement, direct I/O, page cache, device identity."""
