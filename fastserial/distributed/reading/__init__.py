"""What is read of a file: boxes of tensors, straight to their places or by windows."""
