"""What the bytes of a checkpoint mean, read from a `Source`: no engine, no torch.serialization."""
