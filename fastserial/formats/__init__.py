"""What the bytes of a checkpoint mean. Pure arithmetic: no engine, no torch.serialization."""
