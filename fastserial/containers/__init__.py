"""Layout: which byte of a checkpoint lies where. Pure arithmetic, no I/O."""
