"""Shards and the parts of the tensor that they are; where the tensors of a file are."""
