"""Whole benchmarks: which subjects, how often, in which order."""
