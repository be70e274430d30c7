"""Saves beside the program: what the tests of this folder share is in `support.beside`."""

from __future__ import annotations

from support.beside import gate, nothing_left  # noqa: F401
