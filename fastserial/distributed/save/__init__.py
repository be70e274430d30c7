"""Saves of many ranks into one file or folder."""
