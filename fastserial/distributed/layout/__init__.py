"""Closed forms: which ranks of a mesh hold which part of a tensor."""
