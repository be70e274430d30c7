"""Reads boxes of tensors from a file: directly into their targets, or by windows."""
