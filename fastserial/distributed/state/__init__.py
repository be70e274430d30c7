"""What the ranks hold: states of modules and optimizers, tables of tensors, what is compared."""
