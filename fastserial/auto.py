"""`import fastserial.auto` installs fastserial, unless `FASTSERIAL=0` is in the environment."""

from __future__ import annotations

from fastserial.patching.install import install
from fastserial.startup import checked_switch

if checked_switch() is not False:
    install()
