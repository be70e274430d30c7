"""Blocks between files and devices past the host: GPUDirect Storage, or what is like it."""
