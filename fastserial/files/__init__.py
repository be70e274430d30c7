"""Paths and descriptors: targets, atomic replacement, page cache, device identity."""
