"""What the bytes of a checkpoint mean: no engine, no torch.serialization.

What a file says of itself (its directory, its header) is read from a descriptor.
"""
