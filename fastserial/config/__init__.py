"""Options: one frozen `Config`, and one rule for the origin of its values.

A value set nearer to the call wins:
`with options(...)`  >  `install(...)`  >  `FASTSERIAL_<NAME>` in the environment  >  default.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, get_args

from fastserial.config.performance import (
    BLOCK_SIZE,
    PAGE,
    QUEUE_DEPTH,
    SMALL_FILE,
    THREADS,
    KiB,
    MiB,
)
from fastserial.errors import ConfigError

if TYPE_CHECKING:
    from fastserial.engines import EngineFactory
    from fastserial.reports import LoadReport, SaveReport

MAX_BLOCK = 1024 * MiB
SUMMARY = "FASTSERIAL_SUMMARY"  # no option: see `fastserial.diagnosis.totals`

Direct = Literal["auto"] | bool
Cache = Literal["auto", "keep", "drop"]
Compare = Literal["sampled", "all"]
Transfer = Literal[
    "auto", "gds", "cpu", "cpu_gpu", "cpu_async_gpu", "cpu_cached_gpu", "gpu_async", "gpu_batch"
]

_SIZES = ("block_size", "small_file")
_COUNTS = ("queue_depth", "threads")
_WORDS: dict[str, tuple[str, ...]] = {
    "cache": get_args(Cache),
    "compare": get_args(Compare),
    "transfer": get_args(Transfer),
}
TRANSFERS = _WORDS["transfer"][1:]  # as gdsio numbers them, from 0 on (`-x`)


@dataclass(frozen=True, slots=True)
class Config:
    """How bytes reach the disk. Sizes are bytes.

        config = fastserial.Config(block_size=1 << 20, queue_depth=4)
        print(fastserial.verify("ckpt.pt", config=config))

    Attributes:
        engine: name of the I/O engine (`threads`, ...), or a function that makes one from the
            number of threads.
        block_size: bytes of one write; a multiple of 4096.
        queue_depth: blocks in flight at once. `block_size * queue_depth` is the peak of extra
            memory a save takes.
        threads: most worker threads of the `threads` engine; with few cores fewer of them write.
        durable: sync file and directory before `torch.save` returns (paths only).
        direct: `"auto"` uses direct I/O where the file system takes it and the file is larger
            than `small_file`; `True` asks for it at any size; `False` goes through the page cache.
        cache: what loads and saves leave in the page cache. `"auto"`: what stock torch would, as
            far as it costs no time (see `fastserial.files.caching`); `"keep"`: the file; `"drop"`:
            nothing, where the file system takes direct I/O.
        preallocate: reserve the file's space before the first byte, so that a full disk is
            noticed early and extents are contiguous.
        small_file: files up to this many bytes are written through the page cache, without an
            engine. torch itself loads files up to twice, and cached ones up to four times this
            size: that takes it no longer.
        progress: show a progress bar for each save.
        on_report: called with the `SaveReport` after each save, in the saving thread.
        verify_on_load: check the CRC-32 of every record that `torch.load` reads (zip files).
        fast_unpickler: pickles of `weights_only` loads that were checked to be plain are decoded by
            Python's own unpickler, in C; False: all of them by torch's, in Python.
        on_load: called with the `LoadReport` after each load, in the loading thread.
        safetensors: `safetensors.torch.save_file` and `save_model` write through fastserial, too,
            where `install()` was called with it.
        compare: what saves of several ranks compare of the copies that these have of one plain
            tensor: `"sampled"`: some KiB of each, `"all"`: all bytes, which each rank has to read
            for that.
        transfer: how tensors on a device get to the disk and back. `"auto"` and
            `"cpu_async_gpu"`: through pinned memory, on streams of its own, so that copies,
            checksums and I/O overlap; `"cpu_gpu"`: each copy is waited for; `"cpu"`: likewise, and
            `torch.load` reads to the host, from where torch copies; `"cpu_cached_gpu"`: as
            `"cpu_async_gpu"`, and all files through the page cache; `"gds"`: past the host, by
            cuFile; where that is impossible, `"auto"` is taken, with a warning. `"gpu_async"` and
            `"gpu_batch"` are taken as `"gds"`.
    """

    engine: str | EngineFactory = "threads"
    block_size: int = BLOCK_SIZE
    queue_depth: int = QUEUE_DEPTH
    threads: int = THREADS
    durable: bool = True
    direct: Direct = "auto"
    cache: Cache = "auto"
    preallocate: bool = True
    small_file: int = SMALL_FILE
    progress: bool = False
    on_report: Callable[[SaveReport], None] | None = None
    verify_on_load: bool = False
    fast_unpickler: bool = True
    on_load: Callable[[LoadReport], None] | None = None
    safetensors: bool = False
    compare: Compare = "sampled"
    transfer: Transfer = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str) and not callable(self.engine):
            raise ConfigError(f"engine must be a name or a function, not {self.engine!r}")
        for name in (*_SIZES, *_COUNTS):
            if not isinstance(getattr(self, name), SupportsIndex):
                raise ConfigError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        for name in _SWITCHES:
            if getattr(self, name) not in (True, False):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                known = ", ".join(words)
                raise ConfigError(f"{name} must be one of {known}, not {getattr(self, name)!r}")
        if not PAGE <= self.block_size <= MAX_BLOCK or self.block_size % PAGE:
            raise ConfigError(
                f"block_size must be a multiple of {PAGE} bytes up to {MAX_BLOCK}, "
                f"not {self.block_size}"
            )
        for name in _COUNTS:
            if not 1 <= getattr(self, name) <= 1024:
                raise ConfigError(f"{name} must be from 1 to 1024, not {getattr(self, name)}")
        if self.small_file < 0:
            raise ConfigError(f"small_file must not be negative, not {self.small_file}")
        if self.direct not in ("auto", True, False):
            raise ConfigError(f'direct must be "auto", True or False, not {self.direct!r}')

    @property
    def never_direct(self) -> bool:
        """Whether every file goes through the page cache."""
        return self.direct is False or self.transfer == "cpu_cached_gpu"

    @staticmethod
    def resolve(values: Mapping[str, Any] | None = None) -> Config:
        """Return the `Config` of options that were `chosen`; by default those in force here.

        Raises:
            ConfigError: an option or environment variable has an impossible value.
        """
        global _resolved
        if values is None:
            values = chosen()
        if not values:
            return _DEFAULT
        known, config = _resolved  # the same options come again and again
        if known != values:
            config = replace(_DEFAULT, **values)
            _resolved = (dict(values), config)
        return config


_NAMES = frozenset(f.name for f in fields(Config))
_SWITCHES = tuple(f.name for f in fields(Config) if f.type == "bool")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_UNITS = {
    "": 1,
    **{f"{unit}{end}": KiB**n for n, unit in enumerate("kmgt", 1) for end in ("", "ib")},
}

_NOTHING: Mapping[str, Any] = {}
_installed: Mapping[str, Any] = _NOTHING
_scoped: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "fastserial_options", default=None
)
_lock = threading.RLock()  # a signal handler may come while its thread holds it
_names_checked = False
_NEAR = 0.7  # of a variable's name that is right, for `difflib`


def parse_bool(text: str) -> bool:
    """Return the truth value of an environment variable's text."""
    low = text.strip().lower()
    if low in _TRUE:
        return True
    if low in _FALSE:
        return False
    raise ConfigError(f"expected a yes/no value (1, 0, true, false, on, off), not {text!r}")


def parse_size(text: str) -> int:
    """Return the bytes that `"8MiB"`, `"64k"` or `"4096"` stand for (binary units)."""
    low = text.strip().lower()
    digits = low.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = low[len(digits) :].strip()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"expected a size such as 8MiB, 64k or 4096, not {text!r}") from None


def _parse_direct(text: str) -> Direct:
    return "auto" if text.strip().lower() == "auto" else parse_bool(text)


def _parse_word(words: Sequence[str], text: str) -> str:
    word = text.strip().lower()
    if word not in words:
        raise ConfigError(f"expected {', '.join(words[:-1])} or {words[-1]}, not {text!r}")
    return word


def parse_count(text: str) -> int:
    """Return the number that a text stands for."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"expected a whole number, not {text!r}") from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "engine": str.strip,
    "direct": _parse_direct,
    **dict.fromkeys(_SIZES, parse_size),
    **dict.fromkeys(_COUNTS, parse_count),
    **dict.fromkeys(_SWITCHES, parse_bool),
    **{name: partial(_parse_word, words) for name, words in _WORDS.items()},
}
_PREFIX = "FASTSERIAL_"
_VARIABLES = {os.fsencode(_PREFIX + name.upper()): name for name in _PARSERS}


def _from_environment() -> Mapping[str, Any]:
    """Return the options that `FASTSERIAL_*` variables set."""
    if not _names_checked:
        _warn_of_names()
    # Each save asks. `os.environ` takes a microsecond for a variable, even for one that is not
    # there; the dictionary behind it takes one for them all.
    raw = getattr(os.environ, "_data", None)
    present = _VARIABLES.keys() & (os.environb if raw is None else raw).keys()
    values: dict[str, Any] = {}
    for variable in present:
        name = _VARIABLES[variable]
        try:
            values[name] = _PARSERS[name](os.environ[os.fsdecode(variable)])
        except ConfigError as error:
            raise ConfigError(f"{os.fsdecode(variable)}: {error}") from None
    return values


def unknown_variables() -> list[str]:
    """Return the `FASTSERIAL_*` variables that set no option."""
    known = {*map(os.fsdecode, _VARIABLES), SUMMARY}
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)


def _warn_of_names() -> None:
    """Warn, once in a process, of variables that look like misspelt ones."""
    global _names_checked
    _names_checked = True
    for name in unknown_variables():
        near = _nearest(name.removeprefix(_PREFIX), [*(one.upper() for one in _PARSERS), "SUMMARY"])
        if near:
            meant = f"is {_PREFIX}{near} meant?"
            text = f"{name} in the environment sets no option of fastserial; {meant}"
            warnings.warn(text, UserWarning, stacklevel=4)


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like one, empty if none is."""
    try:
        from difflib import get_close_matches  # rarely wanted
    except ImportError:  # a process that dropped privileges may not be able to read it
        return ""
    return "".join(get_close_matches(name, known, 1, _NEAR))


def _check_names(values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - _NAMES)
    if unknown:
        near = ", ".join(filter(None, (_nearest(name, _NAMES) for name in unknown)))
        meant = f" (is {near} meant?)" if near else ""
        known = ", ".join(sorted(_NAMES))
        raise ConfigError(f"unknown option {', '.join(unknown)}{meant}; there are: {known}")


def set_installed(**values: Any) -> None:
    """Add options given to `install()` to those that are set.

    Raises:
        ConfigError: an option has an unknown name or an impossible value.
    """
    global _installed
    _check_names(values)
    Config(**values)
    with _lock:
        _installed = {**_installed, **values}


def forget_installed() -> None:
    """Forget all options given to `install()`."""
    global _installed
    with _lock:
        _installed = _NOTHING


def chosen(**overrides: Any) -> Mapping[str, Any]:
    """Return the options that are set in the calling context; the others have their defaults.

    Raises:
        ConfigError: an option has an unknown name, or an environment variable an impossible value.
    """
    if overrides:
        _check_names(overrides)
    return {**_from_environment(), **_installed, **(_scoped.get() or _NOTHING), **overrides}


def origin_of(name: str) -> str:
    """Return what set an option: `options()`, `install()`, a variable's name, or `default`."""
    if name in (_scoped.get() or _NOTHING):
        return "options()"
    if name in _installed:
        return "install()"
    variable = f"FASTSERIAL_{name.upper()}"
    return variable if variable in os.environ else "default"


def current(**overrides: Any) -> Config:
    """Return the `Config` in force for the calling context.

    Raises:
        ConfigError: an option or environment variable has an impossible value.
    """
    return Config.resolve(chosen(**overrides))


@contextlib.contextmanager
def options(**values: Any) -> Iterator[Config]:
    """Set options for the saves made inside a `with` block (this thread or task only).

        with fastserial.options(durable=False):
            torch.save(state, "ckpt.pt")

    Raises:
        ConfigError: an option has an unknown name or an impossible value.
    """
    _check_names(values)
    config = current(**values)
    token = _scoped.set({**(_scoped.get() or {}), **values})
    try:
        yield config
    finally:
        _scoped.reset(token)


_DEFAULT = Config()
_resolved: tuple[Mapping[str, Any], Config] = (_NOTHING, _DEFAULT)
