"""torch.save as it came and with fastserial, each a call that can be timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

import fastserial

__all__ = ["Format", "check_torch", "fast", "stock", "sync", "write"]

Format = Literal["zip", "legacy"]


@contextlib.contextmanager
def stock(crc: bool = True) -> Iterator[None]:
    """torch without fastserial, whether it was installed before or not."""
    before, crc_before = fastserial.installed(), torch.serialization.get_crc32_options()
    fastserial.uninstall()
    torch.serialization.set_crc32_options(crc)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(crc_before)
        if before:
            fastserial.install()


@contextlib.contextmanager
def fast(**options: Any) -> Iterator[None]:
    """torch with fastserial, and options for it.

    Raises:
        PatchError: the installed torch cannot be patched.
    """
    before = fastserial.installed()
    fastserial.install(strict=True)
    try:
        with fastserial.options(**options):
            yield
    finally:
        if not before:
            fastserial.uninstall()


def check_torch() -> None:
    """Check that torch can be patched, before minutes are spent on other rows.

    Raises:
        PatchError: it cannot.
    """
    with fast():
        pass


def write(state: object, path: Path, container: Format) -> None:
    """`torch.save` to a path."""
    torch.save(state, path, _use_new_zipfile_serialization=container == "zip")


def sync(path: Path) -> None:
    """Put a file and its directory entry on the device, as careful users of stock torch do."""
    for name, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        fd = os.open(name, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
