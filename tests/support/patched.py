"""For programs that patch torch: `ours()` says whether `torch.save` reaches fastserial."""

from __future__ import annotations

import io
import warnings


def ours(save=None, **kwargs):
    """Does this save reach our hooks? (They are told to decline: torch writes.)"""
    import torch

    import fastserial.patching.save_hooks as hooks

    seen = []
    names = ("open_zip_writer", "open_file")
    real = [getattr(hooks, name) for name in names]
    for name in names:
        setattr(hooks, name, lambda *arguments: seen.append(arguments))
    try:
        target = io.BytesIO()
        (save or torch.save)({"a": torch.arange(3)}, target, **kwargs)
        target.seek(0)
        assert torch.load(target)["a"].tolist() == [0, 1, 2]
    finally:
        for name, function in zip(names, real, strict=True):
            setattr(hooks, name, function)
    return bool(seen)


def both(save=None):
    """The same for both containers, which must agree."""
    zipped, legacy = ours(save), ours(save, _use_new_zipfile_serialization=False)
    assert zipped == legacy, (zipped, legacy)
    return zipped


NAMES = ("_save", "_legacy_save", "_open_zipfile_writer", "_open_file_like")


def functions():
    import torch

    return {name: getattr(torch.serialization, name) for name in NAMES}


def same(one, other):
    return all(one[name] is other[name] for name in NAMES)


def caught(function, **kwargs):
    """Call it; return its result and its fastserial warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function(**kwargs)
    return result, [str(w.message) for w in found if "fastserial" in str(w.message)]
