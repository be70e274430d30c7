"""Whether `torch.save` reaches fastserial."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastserial.patching import save_hooks


def ours(save: Callable[..., object], zipped: bool) -> bool:
    """Return whether this save reaches our hooks; they are told to decline: torch writes."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open_zip_writer", "open_file"):
            patch.setattr(save_hooks, name, lambda *arguments: seen.append(arguments))
        target = io.BytesIO()
        save({"a": torch.arange(3)}, target, _use_new_zipfile_serialization=zipped)
        target.seek(0)
        assert torch.load(target)["a"].tolist() == [0, 1, 2]
    return bool(seen)


def both(save: Callable[..., object] = torch.save) -> bool:
    """Return the same of both containers, which must agree."""
    zipped, legacy = ours(save, True), ours(save, False)
    assert zipped == legacy
    return zipped
