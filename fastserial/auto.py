"""`import fastserial.auto` installs fastserial, unless `FASTSERIAL=0` is in the environment."""

from __future__ import annotations

from fastserial.boot import switch
from fastserial.patching import install

__all__: list[str] = []

if switch() is not False:
    install()
