"""For programs that patch torch: `ours()` says whether `torch.save` reaches fastserial."""

from __future__ import annotations

import io
import os
import sys
import traceback
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


def main(scenes):
    """Run the scene that the command line names, or `each` in a fork of one process with torch.

    Of `each`, a scene has its arguments behind it: `SCENE|ARGUMENT|ARGUMENT`.
    """
    name, *arguments = sys.argv[1:]
    if name != "each":
        scenes[name](*arguments)
        return
    import torch  # noqa: F401

    for words in arguments:
        name, *its = words.split("|")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                scenes[name](*its)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0, name
