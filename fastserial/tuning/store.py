"""The file that keeps what `fastserial tune` found, one entry per device, as JSON.

It is `fastserial/tuned.json` in `$XDG_CONFIG_HOME`, by default `~/.config`, and is replaced as a
whole: a process that reads it sees the old or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastserial.config import Config
from fastserial.errors import ConfigError
from fastserial.interrupts import Descriptors

__all__ = ["Entry", "Settings", "forget", "location", "read", "remember"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that are tuned; see `fastserial.Config`. `block_size` is bytes."""

    engine: str
    block_size: int
    queue_depth: int
    threads: int

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings of options whose engine is one with a name."""
        return cls(str(config.engine), config.block_size, config.queue_depth, config.threads)

    def options(self) -> dict[str, Any]:
        """Return them as options."""
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.block_size // 1024}KiB"
        if self.block_size % (1 << 20) == 0:
            size = f"{self.block_size >> 20}MiB"
        return (
            f"block_size={size} queue_depth={self.queue_depth} threads={self.threads} "
            f"engine={self.engine}"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """What one run of `tune` found.

    Attributes:
        settings: to be used for the device; None: the defaults are best.
        folder: that was given.
        device: file system and device in words.
        gain: speed with the settings over that with the defaults, median of the final pairs (of
            the best candidate, if the defaults were kept); None if there was no candidate.
        pairs: how many there were.
        nbytes: size of each save.
        when: date and time, ISO 8601.
        fastserial: version that measured.
    """

    settings: Settings | None
    folder: str
    device: str
    gain: float | None
    pairs: int
    nbytes: int
    when: str
    fastserial: str


def location() -> Path:
    """Return where the file is, or would be.

    Raises:
        ConfigError: this user has no home.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification wants it
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise ConfigError("there is no home directory: set XDG_CONFIG_HOME")
        base = os.path.join(home, ".config")
    return Path(base) / "fastserial" / "tuned.json"


def read() -> dict[str, Entry]:
    """Return the entries by device key; none if there is no file.

    Raises:
        ConfigError: the file cannot be read or is not as it should be.
    """
    path = location()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            raise ConfigError(f"{path} is of another version of fastserial: tune again")
        return {str(key): _entry(values) for key, values in content["devices"].items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): remove it, or tune again") from error


def _entry(values: Mapping[str, Any]) -> Entry:
    found = values["settings"]
    settings = None
    if found is not None:
        settings = Settings(**found)
        if not isinstance(settings.engine, str):
            raise ConfigError("engine must be a name")
        Config(**settings.options())  # its limits
    return Entry(**{**values, "settings": settings})


def remember(key: str, entry: Entry) -> Path:
    """Keep the entry of a device, in place of an older one, and return the file.

    A damaged file is replaced.

    Raises:
        OSError: the file cannot be written.
        ConfigError: this user has no home.
    """
    path = location()
    with _locked(path):
        try:
            entries = read()
        except ConfigError:
            entries = {}
        _write(path, {**entries, key: entry})
    return path


def forget(key: str) -> bool:
    """Remove the entry of a device; False if there is none.

    Raises:
        OSError: the file cannot be written.
        ConfigError: it is damaged.
    """
    path = location()
    if not path.exists():
        return False
    with _locked(path):
        entries = read()
        if entries.pop(key, None) is None:
            return False
        _write(path, entries)
    return True


def _write(path: Path, entries: Mapping[str, Entry]) -> None:
    from fastserial.files.durable import replace_text

    content = {"version": _VERSION, "devices": {key: asdict(e) for key, e in entries.items()}}
    replace_text(str(path), json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing the file in the body."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with Descriptors() as files:
        fd = files.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
