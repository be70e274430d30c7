"""Loads of many ranks from one file or folder."""
