"""Options: one frozen `Config`, and one rule for the origin of its values.

A value set nearer to the call wins:
`with options(...)`  >  `install(...)`  >  `FASTSERIAL_<NAME>` in the environment  >  default.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, get_args

from fastserial.config.performance import BLOCK_SIZE, PAGE, QUEUE_DEPTH, SMALL_FILE, THREADS, MiB
from fastserial.errors import ConfigError

if TYPE_CHECKING:
    from fastserial.engines import EngineFactory
    from fastserial.reports import LoadReport, SaveReport

MAX_BLOCK = 1024 * MiB
_log = logging.getLogger("fastserial")

Direct = Literal["auto"] | bool
Cache = Literal["auto", "keep", "drop"]
Compare = Literal["sampled", "all"]
Transfer = Literal[
    "auto", "gds", "cpu", "cpu_gpu", "cpu_async_gpu", "cpu_cached_gpu", "gpu_async", "gpu_batch"
]
TRANSFERS = get_args(Transfer)[1:]  # as gdsio numbers them, from 0 on (`-x`)
PAST_HOST = ("gds", "gpu_async", "gpu_batch")  # between device and drive: engines.gds


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
            far as it costs no time (see `fastserial.files.linux`); `"keep"`: the file; `"drop"`:
            nothing, where the file system takes direct I/O.
        small_file: files up to this many bytes are written through the page cache, without an
            engine. torch itself loads files up to twice, and cached ones up to four times this
            size: that takes it no longer. 0: we load every file that we can, however small its
            records are (a switch for tests).
        retry_seconds: how long, from its first error on, a save to a path on a network file system
            or FUSE is repeated as a whole while it fails with EIO, ESTALE or ETIMEDOUT; 0: never.
        progress: show on standard error how far a long save or load is.
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
    small_file: int = SMALL_FILE
    retry_seconds: int = 30
    progress: bool = False
    on_report: Callable[[SaveReport], None] | None = None
    verify_on_load: bool = False
    fast_unpickler: bool = True
    on_load: Callable[[LoadReport], None] | None = None
    safetensors: bool = False
    compare: Compare = "sampled"
    transfer: Transfer = "auto"

    def __post_init__(self) -> None:
        for option in fields(self):
            value = _checked(option.name, getattr(self, option.name))
            object.__setattr__(self, option.name, value)

    @property
    def never_direct(self) -> bool:
        """Whether every file goes through the page cache."""
        return self.direct is False or self.transfer == "cpu_cached_gpu"


# -- the values of each option -------------------------------------------------------------------

_CHOICES: dict[str, tuple[Any, ...]] = {
    "direct": ("auto", True, False),
    "cache": get_args(Cache),
    "compare": get_args(Compare),
    "transfer": get_args(Transfer),
    **{option.name: (True, False) for option in fields(Config) if option.type == "bool"},
}
_RANGES = {
    "block_size": range(PAGE, MAX_BLOCK + 1, PAGE),
    "queue_depth": range(1, 1025),
    "threads": range(1, 1025),
    "small_file": range(sys.maxsize),
    "retry_seconds": range(86_401),
}
_TRUTH = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_UNITS = {
    f"{unit}{end}": base**n
    for n, unit in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_PREFIX = "FASTSERIAL_"
# In bytes, as the dictionary behind `os.environ` has them.
_VARIABLES = {os.fsencode(_PREFIX + name.upper()): name for name in ("engine", *_CHOICES, *_RANGES)}


def _checked(name: str, value: Any) -> Any:
    """Return the value of an option as plain Python's: True for 1, or for NumPy's true.

    Raises:
        ConfigError: the option cannot have this value.
    """
    if name in _CHOICES:
        for choice in _CHOICES[name]:
            if value == choice:
                return choice
        expected = f"one of {', '.join(map(str, _CHOICES[name]))}"
    elif name in _RANGES:
        allowed = _RANGES[name]
        if isinstance(value, SupportsIndex) and index(value) in allowed:
            return index(value)
        kind = "whole number" if allowed.step == 1 else f"multiple of {allowed.step}"
        expected = f"a {kind} from {allowed.start} to {allowed[-1]}"
    elif name == "engine" and not isinstance(value, str) and not callable(value):
        expected = "a name or a function"
    else:
        return value
    raise ConfigError(f"{name} must be {expected}, not {value!r}")


def _parse(name: str, text: str) -> Any:
    """Return the value that the text of a variable gives to an option."""
    word = text.strip().lower()
    if name == "engine":
        value: Any = text.strip()
    elif name in _RANGES:
        value = parse_size(word)
    else:
        value = word if word in _CHOICES[name] else _TRUTH.get(word, word)
    return _checked(name, value)


def parse_size(text: str) -> int:
    """Return the bytes that `"8MiB"` or `"8m"` (binary), `"8MB"` (decimal) or `"4096"` stand for.

    Raises:
        ConfigError: it is not a size.
    """
    low = text.strip().lower()
    digits = low.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = low[len(digits) :].strip()
    try:
        return int(float(digits) * (_UNITS[unit] if unit else 1))
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"expected a size such as 8MiB, 64k or 4096, not {text!r}") from None


# -- where the values come from ------------------------------------------------------------------

_NEAR = 0.7  # of a misspelt name that is right, for `difflib`
_DEFAULT = Config()
_NOTHING: Mapping[str, Any] = {}
_installed: Mapping[str, Any] = _NOTHING
_names_checked = False
_refused: dict[tuple[str, str], str] = {}  # why the value of a variable is not used


class _Scope:
    """The options of a `with` block, or of none, and the `Config` that was made of them last.

    That may hold what the caller's functions refer to: it is gone with the block.
    """

    __slots__ = ("last", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.last: tuple[Mapping[str, Any], Config] = (_NOTHING, _DEFAULT)

    def with_options(self, values: Mapping[str, Any]) -> _Scope:
        """Return a scope inside of this one.

        Raises:
            ConfigError: an option has an unknown name.
        """
        _check_names(values)
        return _Scope({**self.values, **values})

    def config(self) -> Config:
        """Return the options in force.

        Raises:
            ConfigError: an option has an impossible value.
        """
        values = {**_from_environment(), **_installed, **self.values}
        if not values:
            return _DEFAULT
        known, config = self.last  # the same options come again and again
        if known != values:
            config = replace(_DEFAULT, **values)
            self.last = values, config
        return config


_outside = _Scope(_NOTHING)
_scoped: contextvars.ContextVar[_Scope] = contextvars.ContextVar(
    "fastserial_options", default=_outside
)


def current(**overrides: Any) -> Config:
    """Return the `Config` in force for the calling context.

    An impossible value in the environment is not used: a warning names it, once.

    Args:
        overrides: options that take precedence over all others.

    Raises:
        ConfigError: an option has an unknown name or an impossible value.
    """
    scope = _scoped.get()
    return (scope.with_options(overrides) if overrides else scope).config()


@contextlib.contextmanager
def options(**values: Any) -> Iterator[Config]:
    """Set options for the saves made inside a `with` block (this thread or task only).

        with fastserial.options(durable=False):
            torch.save(state, "ckpt.pt")

    Raises:
        ConfigError: an option has an unknown name or an impossible value.
    """
    scope = _scoped.get().with_options(values)
    config = scope.config()
    token = _scoped.set(scope)
    try:
        yield config
    finally:
        _scoped.reset(token)


def set_installed(**values: Any) -> None:
    """Add options given to `install()` to those that are set.

    Raises:
        ConfigError: an option has an unknown name or an impossible value.
    """
    global _installed
    _check_names(values)
    Config(**values)
    _installed = {**_installed, **values}


def forget_installed() -> None:
    """Forget all options given to `install()`."""
    global _installed
    _installed = _NOTHING
    _outside.last = _NOTHING, _DEFAULT


def origin_of(name: str) -> str:
    """Return what set an option: `options()`, `install()`, a variable's name, or `default`."""
    if name in _scoped.get().values:
        return "options()"
    if name in _installed:
        return "install()"
    variable = f"{_PREFIX}{name.upper()}"
    text = os.environ.get(variable)
    return "default" if text is None or (variable, text) in _refused else variable


def unknown_variables() -> list[str]:
    """Return the `FASTSERIAL_*` variables that set no option."""
    names = {name for name in os.environ if name.startswith(_PREFIX)}
    return sorted(names.difference(_known_variables()))


def refused_variables() -> list[str]:
    """Return which `FASTSERIAL_*` variables have a value that is not used, each with the reason."""
    found = sorted(_refused.items())
    return [f"{name}: {why}" for (name, text), why in found if os.environ.get(name) == text]


def refuse_variable(name: str, value: str, why: str) -> bool:
    """Use the value of an option's variable no more, and warn of it.

    Args:
        name: of the option.
        value: of the option, which cannot be used,
        why: because of this.

    Returns:
        False if the variable has another value, or none.
    """
    variable = f"{_PREFIX}{name.upper()}"
    text = os.environ.get(variable, "")
    if text.strip() != value:
        return False
    _refuse(variable, text, why)
    return True


def _refuse(variable: str, text: str, why: str) -> None:
    _refused[variable, text] = why
    _warn(f"{variable} in the environment is not used: {why}")


def _known_variables() -> list[str]:
    return [*map(os.fsdecode, _VARIABLES), f"{_PREFIX}SUMMARY"]  # see `diagnosis.totals`


def _from_environment() -> Mapping[str, Any]:
    """Return the options that `FASTSERIAL_*` variables set to possible values."""
    if not _names_checked:
        _warn_of_names()
    # Each save asks. `os.environ` takes a microsecond for a variable, even for one that is not
    # there; the dictionary behind it takes one for them all.
    raw = getattr(os.environ, "_data", None)
    present = _VARIABLES.keys() & (os.environb if raw is None else raw).keys()
    values: dict[str, Any] = {}
    for variable in map(os.fsdecode, present):
        name, text = variable.removeprefix(_PREFIX).lower(), os.environ[variable]
        if (variable, text) in _refused:
            continue
        try:
            values[name] = _parse(name, text)
        except ConfigError as error:
            _refuse(variable, text, str(error))
    return values


def _warn_of_names() -> None:
    """Warn, once in a process, of variables that look like misspelt ones."""
    global _names_checked
    _names_checked = True
    known = [one.removeprefix(_PREFIX) for one in _known_variables()]
    for name in unknown_variables():
        near = _nearest(name.removeprefix(_PREFIX), known)
        if near:
            meant = f"is {_PREFIX}{near} meant?"
            _warn(f"{name} in the environment sets no option of fastserial; {meant}")


def _warn(text: str) -> None:
    """Warn; where warnings are errors (`-W error`), log: a variable must not fail a save."""
    try:
        warnings.warn(text, UserWarning, stacklevel=5)
    except UserWarning:
        _log.warning("%s", text)


def _check_names(values: Mapping[str, Any]) -> None:
    for name in values:
        if name not in Config.__dataclass_fields__:
            known = sorted(Config.__dataclass_fields__)
            near = _nearest(name, known)
            meant = f" (is {near} meant?)" if near else ""
            raise ConfigError(f"unknown option {name}{meant}; there are: {', '.join(known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like one, empty if none is."""
    try:
        from difflib import get_close_matches  # rarely wanted
    except ImportError:  # a process that dropped privileges may not be able to read it
        return ""
    return "".join(get_close_matches(name, known, 1, _NEAR))
