"""What a training script holds: the `Checkpointer`."""
