"""What `fastserial tune` found, brought to the saves it is for.

A process reads the file once, at its first save that is not small, and looks each device up once.
Whatever is wrong with the file or an entry, the defaults are used: a save never fails for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserial.config import Config, chosen
from fastserial.interrupts import Descriptors

if TYPE_CHECKING:
    from fastserial.tuning.store import Entry

__all__ = ["applied", "config_for", "entry_for", "forget_cache", "sources_for"]

_log = logging.getLogger("fastserial")
_NAMES = frozenset({"engine", "block_size", "queue_depth", "threads"})
# Their product is the memory a save takes: if one is set, the other is not taken from elsewhere.
_MEMORY = frozenset({"block_size", "queue_depth"})

_file: Mapping[str, Entry] | None = None
_by_device: dict[int, Mapping[str, Any]] = {}


def applied(config: Config, given: Mapping[str, Any], fd: int) -> Config:
    """Return the options for a file on the device of an open one.

    Args:
        config: the options in force.
        given: those of them that somebody set: they stay. Settings for one engine mean nothing
            for another, so an engine that somebody set makes the rest stay, too.
        fd: the file, or a directory.
    """
    found = _found(fd)
    if not found or not config.tuned:
        return config
    options = _usable(found, given)
    return replace(config, **options) if options else config


def config_for(folder: Path) -> Config:
    """Return the options that saves to a folder use (those larger than `small_file`).

    Raises:
        ConfigError: an option or environment variable has an impossible value.
        OSError: the folder cannot be opened.
    """
    given = chosen()
    with Descriptors() as files:
        return applied(Config.resolve(given), given, files.open(folder, os.O_RDONLY))


def sources_for(folder: Path) -> frozenset[str]:
    """Return the names of the options that are tuned for a folder and in force there.

    Raises:
        ConfigError: an option or environment variable has an impossible value.
        OSError: the folder cannot be opened.
    """
    given = chosen()
    if not Config.resolve(given).tuned:
        return frozenset()
    with Descriptors() as files:
        return frozenset(_usable(_found(files.open(folder, os.O_RDONLY)), given))


def entry_for(folder: Path) -> tuple[str, Entry | None]:
    """Return the key of a folder's device, and what `tune` found for it.

    Raises:
        ConfigError: the file is damaged.
        OSError: the folder cannot be opened.
    """
    from fastserial.files.device_id import device_key
    from fastserial.tuning.store import read

    with Descriptors() as files:
        key = device_key(files.open(folder, os.O_RDONLY))
    return key, read().get(key)


def forget_cache() -> None:
    """Let this process reread the file."""
    global _file
    _file = None
    _by_device.clear()


def _usable(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if found and given.get("engine", found["engine"]) != found["engine"]:
        return {}
    barred = {*given, *(_MEMORY if _MEMORY & given.keys() else ())}
    return {name: value for name, value in found.items() if name not in barred}


def _found(fd: int) -> Mapping[str, Any]:
    """Return the options tuned for the device of an open file, none if there are none."""
    device = os.fstat(fd).st_dev
    found = _by_device.get(device)
    if found is None:
        try:
            os.close(os.dup(fd))  # a look takes one descriptor; without, it would find nothing
        except OSError:
            return {}  # for now: the next save looks again
        try:
            found = _look_up(fd)
        except Exception as error:  # whatever it is: the save goes on
            _log.warning("tuned settings are not used: %s", error)
            found = {}
        _by_device[device] = found
    return found


def _look_up(fd: int) -> Mapping[str, Any]:
    from fastserial.tuning.store import read

    global _file
    if _file is None:
        _file = {}  # a damaged file is reported once
        _file = read()
    if not _file:
        return {}
    from fastserial import engines
    from fastserial.files.device_id import device_key

    entry = _file.get(device_key(fd))
    if entry is None or entry.settings is None:
        return {}
    engines.load(entry.settings.engine)
    return entry.settings.options()
