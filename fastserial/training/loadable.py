"""Whether `weights_only`, which refuses classes that torch does not know, loads what is saved."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from fastserial.errors import ConfigError
from fastserial.formats.zip.records import PICKLE

__all__ = ["check_loadable"]

_SHOWN = 5


def check_loadable(pickled: bytes) -> None:
    """Make sure that `weights_only` loads a pickle of torch's.

    Raises:
        ConfigError: it does not; says what it holds.
    """
    look: Callable[[Any], list[str]] = torch.serialization.get_unsafe_globals_in_checkpoint
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"archive/{PICKLE}", pickled)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    if refused := sorted(look(file)):
        raise ConfigError(
            f"a checkpoint of this state cannot be resumed from with weights_only=True: it would "
            f"hold {', '.join(refused[:_SHOWN])}. Keep plain values (`float(x)` for NumPy's) and "
            "tensors in it, or allow what you trust by torch.serialization.add_safe_globals"
        )
