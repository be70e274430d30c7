"""A forked child that makes a call: as another user, or after what cannot be undone."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def as_user(call: Callable[[], Any], folder: Path, user: int, groups: Sequence[int] = ()) -> Any:
    """Return what a call returns (as JSON does) when another user makes it in this folder.

    They may be allowed to read neither this checkout nor what is above the folder: what the call
    imports was imported before.
    """

    def there() -> Any:
        os.chdir(folder)
        os.setgroups(groups)
        os.setgid(user)
        os.setuid(user)
        return call()

    return in_child(there)


def in_child(call: Callable[[], Any]) -> Any:
    """Return what a call returns (as JSON does) in a child, where it may change the process."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
        child = os.fork()
    if child == 0:
        try:
            told = {"told": call()}
        except BaseException as error:
            told = {"error": repr(error)}
        os.write(writable, json.dumps(told).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert "told" in found, found["error"]
    return found["told"]
