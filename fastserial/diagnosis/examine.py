"""`fastserial doctor`: how saves and loads run here, what slows them, and what to do about it.

`examine` collects facts; `findings` judges them; the command shows both.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

from fastserial import __version__, config, engines, startup
from fastserial.config import Config
from fastserial.diagnosis.facts import Boot, Diagnosis, Option, Torch
from fastserial.diagnosis.folder import folder_problem, probe_folder
from fastserial.engines.gds.host import probe_gpus
from fastserial.errors import ConfigError, FastserialError, PatchError
from fastserial.memory import huge_pages
from fastserial.patching import install

__all__ = ["examine"]


def examine(folder: Path | None = None) -> Diagnosis:
    """Look at this Python, its torch, and a folder. Nothing is changed.

    Raises:
        FastserialError: the folder does not exist or is not a directory.
    """
    from fastserial.diagnosis.findings import judge

    unfit = folder_problem(folder) if folder is not None else None
    if unfit is not None:
        raise FastserialError(unfit)
    options, chosen, problem = _options()
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
        unknown_variables=tuple(config.unknown_variables()),
        small_pages=huge_pages.refused(),
        folder=probe_folder(folder) if folder is not None else None,
        gpus=probe_gpus(),
    )
    return dataclasses.replace(diagnosis, findings=tuple(judge(diagnosis, chosen)))


def _torch() -> Torch:
    """Try the patch on the installed torch, and leave torch as it was."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Torch(None, reason=f"torch cannot be imported: {error}")
    version, cuda = str(torch.__version__), bool(torch.cuda.is_available())
    hooks = importlib.import_module("fastserial.patching.save_hooks")
    before = install.installed()
    try:
        install.switch_on(strict=True)
        found = install.status()
    except PatchError as error:
        return Torch(version, reason=str(error), self_check=hooks.self_check(), cuda=cuda)
    finally:
        if not before:
            install.uninstall()
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


def _options() -> tuple[tuple[Option, ...], Config, str | None]:
    """Return the options with their sources; the defaults if one of them is impossible."""
    problem = None
    try:
        current = config.current()
    except ConfigError as error:
        current, problem = Config(), str(error)
    options = tuple(
        Option(
            name,
            getattr(current, name),
            "default" if problem else config.origin_of(name),
        )
        for name in (field.name for field in dataclasses.fields(Config))
    )
    return options, current, problem


def _boot() -> Boot:
    environment = {**os.environ, startup.VARIABLE: "1"}
    probe = subprocess.run(
        [sys.executable, "-c", startup.PROBE],
        env=environment,
        capture_output=True,
        check=False,
    )
    return Boot(os.environ.get(startup.VARIABLE), startup.switch(), probe.returncode == 0)
