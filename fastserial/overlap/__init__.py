"""Saves beside a running program: snapshots, pending saves, the Checkpointer."""
