"""Shards and where they lie in the whole tensor; the places of tensors in a file."""
