"""`fastserial doctor`: how saves and loads run here, what makes them slow, and what to do.

`examine` collects facts, and `judge` says what they mean; the command shows both.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserial import __version__, config, engines, startup
from fastserial.config import Config
from fastserial.diagnosis.folder import FolderFacts, folder_problem, probe_folder
from fastserial.engines import EngineStatus
from fastserial.errors import REMEDIES, FastserialError, PatchError
from fastserial.memory import huge_pages
from fastserial.memory.huge_pages import SWITCH
from fastserial.patching import install
from fastserial.reports import format_bytes

_LITTLE = 1 << 30  # bytes
_FREE_SPACE = REMEDIES[errno.ENOSPC]
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact to know, and what to do about it.

    Attributes:
        slow: it makes saves or loads stock or slow, or makes saves fail.
        fails: it makes saves fail.
    """

    text: str
    remedy: str
    slow: bool
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch: the patch that was tried, and why torch would stay stock (`reason`)."""

    version: str | None
    patch: str | None = None
    exact: bool = False
    functions: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    reason: str | None = None
    self_check: str | None = None
    cuda: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """An option in force, and the source of its value."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Boot:
    """Installation at start-up: the variable FASTSERIAL, and whether `fastserial.pth` is active."""

    variable: str | None
    switch: bool | None
    pth: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found. Sizes are bytes.

    Attributes:
        small_pages: why buffers get no huge pages, None if they do.
        address_space_bytes: what one process may take (`ulimit -v`), None without a limit.
    """

    fastserial: str
    python: str
    kernel: str
    torch: Torch
    boot: Boot
    engine: str
    engine_source: str
    engines: tuple[EngineStatus, ...]
    options: tuple[Option, ...]
    refused_variables: tuple[str, ...]
    unknown_variables: tuple[str, ...]
    small_pages: str | None
    address_space_bytes: int | None
    folder: FolderFacts | None
    findings: tuple[Finding, ...] = ()

    @property
    def fast(self) -> bool:
        """Whether nothing makes saves or loads stock or slow."""
        return not any(finding.slow for finding in self.findings)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"fast": self.fast, **dataclasses.asdict(self)}, indent=2, default=str)


def examine(folder: Path | None = None) -> Diagnosis:
    """Examine this Python, its torch, and a folder. Nothing is changed.

    Raises:
        FastserialError: the folder does not exist or is not a directory.
    """
    unfit = folder_problem(folder) if folder is not None else None
    if unfit is not None:
        raise FastserialError(unfit)
    options, chosen = _options()
    engine = next(option for option in options if option.name == "engine")
    diagnosis = Diagnosis(
        fastserial=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=_torch(),
        boot=_boot(),
        engine=engine.value,
        engine_source=engine.source,
        engines=tuple(engines.survey()),
        options=options,
        refused_variables=tuple(config.refused_variables()),
        unknown_variables=tuple(config.unknown_variables()),
        small_pages=huge_pages.refused(),
        address_space_bytes=_address_space(),
        folder=probe_folder(folder) if folder is not None else None,
    )
    return dataclasses.replace(diagnosis, findings=tuple(judge(diagnosis, chosen)))


def _torch() -> Torch:
    """Try the patch on the installed torch, and leave torch as it was."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Torch(None, reason=f"torch cannot be imported: {error}")
    hooks = importlib.import_module("fastserial.patching.save_hooks")
    version, cuda = str(torch.__version__), bool(torch.cuda.is_available())
    before = install.installed()
    try:
        install.switch_on(strict=True)
        found = install.status()
    except PatchError as error:
        return Torch(version, reason=str(error), self_check=hooks.self_check(), cuda=cuda)
    finally:
        if not before:
            install.uninstall()
    names = found.functions, found.replaced
    return Torch(version, found.patch, found.exact, *names, None, hooks.self_check(), cuda)


def _options() -> tuple[tuple[Option, ...], Config]:
    """Return the options with their sources."""
    current = config.current()
    options = tuple(
        Option(name, getattr(current, name), config.origin_of(name))
        for name in (field.name for field in dataclasses.fields(Config))
    )
    return options, current


def _boot() -> Boot:
    environment = {**os.environ, startup.VARIABLE: "1"}
    probe = subprocess.run(
        [sys.executable, "-c", startup.PROBE],
        env=environment,
        capture_output=True,
        check=False,
    )
    return Boot(os.environ.get(startup.VARIABLE), startup.switch(), probe.returncode == 0)


def _address_space() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit if limit != resource.RLIM_INFINITY else None


def judge(found: Diagnosis, options: Config) -> Iterator[Finding]:
    """Yield the findings, the most serious first."""
    yield from _about_torch(found.torch)
    yield from _about_options(found, options)
    if found.small_pages is not None:
        yield _slow(
            f"no huge pages for buffers ({found.small_pages}): direct I/O takes up to half as long "
            "again",
            f"as root: echo madvise > {SWITCH}; and start the program where they are not switched "
            "off for it",
        )
    if found.address_space_bytes is not None:
        yield _slow(
            "torch reads every file itself: the address space is limited, and our threads would "
            "take of it what torch may need",
            "ulimit -v unlimited; limit memory by a control group, as schedulers of jobs can",
        )
    if found.folder is not None:
        yield from _about_folder(found.folder, options)
    yield from _about_boot(found.boot)


def _note(text: str, remedy: str) -> Finding:
    return Finding(text, remedy, slow=False)


def _slow(text: str, remedy: str) -> Finding:
    return Finding(text, remedy, slow=True)


def _fails(text: str, remedy: str) -> Finding:
    return Finding(text, remedy, slow=True, fails=True)


def _about_torch(torch: Torch) -> Iterator[Finding]:
    if torch.version is None:
        yield _slow(torch.reason or "there is no torch", "pip install torch")
    elif torch.reason is not None:
        yield _slow(
            f"torch.save and torch.load stay stock: {torch.reason}",
            "`fastserial patches check` shows which functions differ from the release: undo the "
            "changes in torch, if there are any; else install a newer fastserial, or a torch that "
            "`fastserial patches list` names",
        )
    elif not torch.exact:
        yield _note(
            f"no patch is made for torch {torch.version}; {torch.patch} fits it function by "
            "function and is used",
            "install a newer fastserial",
        )
    if torch.replaced:
        yield _slow(
            f"other code replaced {', '.join(torch.replaced)}",
            "call fastserial.install() after what replaces them",
        )


def _about_options(found: Diagnosis, options: Config) -> Iterator[Finding]:
    status = {engine.name: engine for engine in found.engines}.get(found.engine)
    lacks = status.missing if status is not None else f"there is no engine {found.engine!r}"
    if lacks is not None:
        fix = f"change {found.engine_source}; engine `threads` runs everywhere"
        if found.engine_source in os.environ:
            yield _slow(f"engine `threads` is used: {lacks}", fix)
        else:
            yield _fails(f"saves will fail: {lacks}", fix)
    for variable in found.refused_variables:
        yield _slow(f"{variable}; it is not used", "correct or unset the variable")
    if found.unknown_variables:
        known = ", ".join(f"FASTSERIAL_{option.name.upper()}" for option in found.options)
        names = ", ".join(found.unknown_variables)
        yield _note(f"{names}: no option of this name", f"there are: {known}")
    if found.torch.version is not None:
        from fastserial.engines.gds.memory import missing  # not without torch

        why = missing(options.transfer)
        if why is not None:
            text = f"transfer {options.transfer!r} is not available: {why}"
            yield _note(text, 'set transfer to "auto"')


def _about_folder(folder: FolderFacts, options: Config) -> Iterator[Finding]:
    kind, size = folder.file_system, folder.alignment.offset if folder.alignment else 0
    if folder.problem is not None:
        yield _fails(
            f"no file can be written in {folder.path}: {folder.problem}",
            folder.remedy or "check the folder's owner, mode and mount options, or save elsewhere",
        )
        return
    if folder.free_bytes is not None and folder.free_bytes < _LITTLE:
        text = f"only {format_bytes(folder.free_bytes)} are free in {folder.path}"
        if folder.free_bytes:
            yield _note(f"{text}: a new checkpoint needs room beside the old one", _FREE_SPACE)
        else:
            yield _fails(f"{text}, but for what is kept for root: saves will fail", _FREE_SPACE)
    if kind in _IN_MEMORY:
        yield _note(
            f"{kind} keeps files in memory: they are lost at power-off",
            "save to a disk what has to last",
        )
    elif folder.direct_problem is not None or not size:
        why = folder.direct_problem or "the kernel says this file system has none"
        yield _slow(
            f"no direct I/O on {kind} ({why}): saves go through the page cache",
            "save to a local ext4 or XFS",
        )
    elif options.block_size % size:
        yield _slow(
            f"block_size {options.block_size} is no multiple of the device's {size} bytes: saves "
            "go through the page cache",
            f"set block_size to a multiple of {size}",
        )
    if folder.leftovers:
        yield _note(
            f"{len(folder.leftovers)} temporary files of killed saves: "
            f"{', '.join(folder.leftovers)}",
            "remove them; the next save into the folder does it, too",
        )


def _about_boot(boot: Boot) -> Iterator[Finding]:
    variable = f"FASTSERIAL={boot.variable}"
    if boot.switch is False:
        yield _slow(f"{variable} switches `import fastserial.auto` off", "unset FASTSERIAL")
    elif boot.switch is True and not boot.pth:
        yield _slow(
            f"{variable} has no effect: fastserial.pth is not active in this Python",
            "install fastserial there with pip, or put `import fastserial.auto` into the program",
        )
    elif boot.variable and boot.switch is None:
        yield _slow(f"{variable} is neither on nor off", "set it to 1 or 0")
