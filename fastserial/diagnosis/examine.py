"""`fastserial doctor`: how saves and loads run here, what slows them, and what to do about it.

`examine` collects facts; `doctor_findings` judges them; `doctor_view` shows both.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fastserial import __version__, boot, config, engines, hugepages, patching, tuned
from fastserial.config import Config
from fastserial.engines import EngineStatus
from fastserial.errors import ConfigError, FastserialError, PatchError
from fastserial.probes import Folder, folder_problem, probe_folder
from fastserial.tunedfile import Entry

__all__ = [
    "Boot",
    "Diagnosis",
    "Finding",
    "Option",
    "Package",
    "Torch",
    "examine",
]

_STARTS_WITH_PTH = "import sys; sys.exit('fastserial.boot' not in sys.modules)"
_LIBAIO = ("libaio.so.1", "libaio.so.1t64")
_NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
_PACKAGES = ("isal", "tqdm", "deepspeed", "cuda-bindings")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know, and what to do. `slow`: it makes saves stock or slow."""

    text: str
    remedy: str
    slow: bool


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch: the patch tried on it, and why it would stay stock (`reason`)."""

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
    """An option in force, and where its value comes from."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Package:
    """Something optional: its version, or None if it is not there."""

    name: str
    version: str | None


@dataclass(frozen=True, slots=True)
class Boot:
    """Starting with Python: the variable FASTSERIAL, and whether `fastserial.pth` is at work."""

    variable: str | None
    switch: bool | None
    pth: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that the doctor found. Sizes are bytes; `memlock` is None if unlimited.

    `small_pages` is why buffers get no huge pages, or None if they do.
    `tuned` is what `fastserial tune` found for the folder, in force or not.
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
    options_problem: str | None
    unknown_variables: tuple[str, ...]
    packages: tuple[Package, ...]
    memlock: int | None
    small_pages: str | None
    folder: Folder | None
    findings: tuple[Finding, ...] = ()
    tuned: Entry | None = None
    tuned_problem: str | None = None

    @property
    def fast(self) -> bool:
        """Whether nothing makes saves stock or slow."""
        return not any(finding.slow for finding in self.findings)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps({"fast": self.fast, **dataclasses.asdict(self)}, indent=2, default=str)


def examine(folder: Path | None = None) -> Diagnosis:
    """Look at this Python, its torch, and a folder. Nothing is changed.

    Raises:
        FastserialError: the folder does not exist or is not a directory.
    """
    from fastserial.doctor_findings import judge

    unfit = folder_problem(folder) if folder is not None else None
    if unfit is not None:
        raise FastserialError(unfit)
    options, chosen, problem = _options(folder)
    entry, tuned_problem = _tuned(folder)
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
        options_problem=problem,
        unknown_variables=_unknown_variables(),
        packages=_packages(),
        memlock=_memlock(),
        small_pages=hugepages.refused(),
        folder=probe_folder(folder) if folder is not None else None,
        tuned=entry,
        tuned_problem=tuned_problem,
    )
    return dataclasses.replace(diagnosis, findings=tuple(judge(diagnosis, chosen)))


def _torch() -> Torch:
    """Try the patch on the installed torch, and leave torch as it was."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Torch(None, reason=f"torch cannot be imported: {error}")
    version, cuda = str(torch.__version__), bool(torch.cuda.is_available())
    hooks = importlib.import_module("fastserial.hooks")
    before = patching.installed()
    try:
        patching.switch_on(strict=True)
        found = patching.status()
    except PatchError as error:
        return Torch(version, reason=str(error), self_check=hooks.self_check(), cuda=cuda)
    finally:
        if not before:
            patching.uninstall()
    return Torch(
        version,
        found.patch,
        found.exact,
        found.functions,
        found.replaced,
        None,
        hooks.self_check(),
        cuda,
    )


def _options(folder: Path | None) -> tuple[tuple[Option, ...], Config, str | None]:
    """Return the options with their sources; the defaults if one of them is impossible."""
    problem, by_tune = None, frozenset[str]()
    try:
        current = config.current()
        if folder is not None:
            current, by_tune = tuned.config_for(folder), tuned.sources_for(folder)
    except ConfigError as error:
        current, problem = Config(), str(error)
    options = tuple(
        Option(
            name,
            getattr(current, name),
            "default" if problem else "tune" if name in by_tune else _source(name),
        )
        for name in (field.name for field in dataclasses.fields(Config))
    )
    return options, current, problem


def _tuned(folder: Path | None) -> tuple[Entry | None, str | None]:
    """Return what `tune` found for a folder, or why that cannot be told."""
    if folder is None:
        return None, None
    try:
        return tuned.entry_for(folder)[1], None
    except (ConfigError, OSError) as error:
        return None, str(error)


def _source(name: str) -> str:
    if name in (config._scoped.get() or {}):
        return "options()"
    if name in config._installed:
        return "install()"
    variable = f"FASTSERIAL_{name.upper()}"
    return variable if variable in os.environ else "default"


def _unknown_variables() -> tuple[str, ...]:
    return tuple(config.unknown_variables())


def _boot() -> Boot:
    environment = {**os.environ, boot.VARIABLE: "1"}
    probe = subprocess.run(
        [sys.executable, "-c", _STARTS_WITH_PTH],
        env=environment,
        capture_output=True,
        check=False,
    )
    return Boot(os.environ.get(boot.VARIABLE), boot.switch(), probe.returncode == 0)


def _packages() -> tuple[Package, ...]:
    """Return what is optional. cuFile itself is never called: it may not return (no driver)."""
    found = [Package(name, _version(name)) for name in _PACKAGES]
    found.append(Package("libaio", _libaio()))
    found.append(Package("nvidia-fs", _first_line(_NVIDIA_FS)))
    return tuple(found)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _libaio() -> str | None:
    for name in _LIBAIO:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().partition("\n")[0] or None
    except OSError:
        return None


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
