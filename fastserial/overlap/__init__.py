"""Saves in the background of a running program: snapshots and pending saves."""
