"""Saves beside a running program: snapshots and pending saves."""
