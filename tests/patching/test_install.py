"""Permutations of patching torch; each in a process of its own, with real saves."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support import processes

from fastserial.patching import patches

ROOT = Path(patches.__file__).resolve().parents[2]
TESTS = Path(__file__).parents[1]


def run(
    program: str,
    *arguments: str,
    flags: tuple[str, ...] = (),
    cwd: Path | None = None,
    **environment: str,
) -> str:
    """Run one of `tests/programs` in a fresh process; it must end well. Return what it printed."""
    paths = [environment.pop("PYTHONPATH", ""), str(ROOT), str(TESTS)]
    path = os.pathsep.join(filter(None, paths))
    variables = {"PYTHONPATH": path, **environment}
    return processes.run(program, *arguments, flags=flags, cwd=cwd, variables=variables).out


# --- on and off ------------------------------------------------------------------------------


SCENES = {
    "switching": (
        "on_and_off_give_back_the_same_objects",
        "the_copies_look_like_the_originals",
        "a_fork_while_another_thread_installs",
    ),
    "other_code": (
        "replaced_before_install",
        "replaced_after_install",
        "an_unknown_version_with_known_functions",
        "a_failed_self_check_stays_stock",
    ),
}


@pytest.mark.parametrize("program", SCENES)
def test_scenes(program: str) -> None:
    run(program, "each", *SCENES[program])


@pytest.mark.parametrize(
    "imports",
    [
        "from torch import save; import fastserial",
        "import torch.distributed.checkpoint; import fastserial",
    ],
)
def test_import_orders(imports: str) -> None:
    run("starting", "import_orders", imports)


def test_status_tells() -> None:
    """Here fastserial is imported first, and imports torch itself."""
    out = run("starting", "status_tells")
    status = json.loads(out)
    assert status["installed"] is True
    assert status["exact"] is True
    assert status["patch"] in patches.patch_names()
    assert "torch.serialization._save" in status["functions"]
    assert status["replaced"] == []
    assert status["reason"] is None


# --- other torches ---------------------------------------------------------------------------


def test_unknown_functions_stay_stock(tmp_path: Path) -> None:
    """An unknown release (a version no patch covers), or a modified one (a version that is)."""
    for path in patches.patches_dir().glob("*.toml"):
        changed = path.read_text().replace('_load = "', '_load = "0')
        (tmp_path / path.name).write_text(changed)
    scene = f"unknown_functions_stay_stock|{tmp_path}"
    run("other_code", "each", f"{scene}|99.1.0|no patch for", f"{scene}||not as released")


def test_modified_source_stays_stock() -> None:
    changes = (
        "another line|the source of torch.serialization._save is not the one this patch",
        "another name|0 times",
        "a line more|the file changed after the import",
        "no source|not installed",
    )
    run("other_code", "each", *(f"modified_source_stays_stock|{change}" for change in changes))


@pytest.mark.parametrize("first", ["", "torch._dynamo"])
def test_torch_compile_does_not_trace_it(first: str, tmp_path: Path) -> None:
    run("other_code", "torch_compile_does_not_trace_it", first, cwd=tmp_path)


# --- the environment -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH that makes `fastserial.pth` active, as site-packages does."""
    folder = tmp_path_factory.mktemp("path")
    packages = folder / "packages"
    packages.mkdir()
    shutil.copy(ROOT / "fastserial.pth", packages)
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(packages)!r})\n")
    return str(folder)


def test_the_variable_installs_at_the_import_of_torch(site: str) -> None:
    for value, wanted in ((" Yes ", "True"), ("0", "False")):
        scene = ("at_the_import_of_torch", wanted)
        run("starting", *scene, PYTHONPATH=site, FASTSERIAL=value)


def test_trouble_at_the_start_stays_a_warning(site: str) -> None:
    scene = "trouble_at_the_start_stays_a_warning"
    out = run("starting", scene, PYTHONPATH=site, FASTSERIAL="1")
    assert "could not be installed: RuntimeError('broken') 1.0" in out
    run(
        "starting",
        "trouble_becomes_an_error_if_asked_for",
        flags=("-W", "error:fastserial could not:UserWarning"),
        PYTHONPATH=site,
        FASTSERIAL="1",
    )


def test_auto() -> None:
    run("starting", "auto", "True")
    run("starting", "auto", "False", FASTSERIAL="0")


@pytest.mark.parametrize("arguments", [["program.py", "a b", "-x"], ["-m", "program", "a b", "-x"]])
def test_run_covers_spawned_children(arguments: list[str], site: str, tmp_path: Path) -> None:
    shutil.copy(processes.program("spawns"), tmp_path / "program.py")
    out = run(
        "starting",
        "run_with",
        *arguments,
        flags=("-O",),
        cwd=tmp_path,
        PYTHONPATH=site,
        FASTSERIAL="0",
    )
    assert out.splitlines() == ["parent True 1 a b -x", "child True 1 a b -x"]


def test_run_without_the_pth_file_says_so(tmp_path: Path) -> None:
    # -S: no site-packages, so no .pth file wherever fastserial is installed
    out = run(
        "starting",
        "run_without_the_pth_file_says_so",
        flags=("-S",),
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
    )
    assert "fastserial.pth is not active" in out
    assert "pip install" in out


# --- the start of a process, and two copies of fastserial ------------------------------------


def test_the_start_imports_nothing(site: str) -> None:
    """Not even with the variable: most Python processes of a job never use torch."""
    without, with_it = (
        set(run("modules", PYTHONPATH=site, FASTSERIAL=value).split()) for value in ("0", "1")
    )
    ours = {"fastserial", "fastserial.startup", "fastserial.import_hook"}
    assert ours <= with_it
    assert with_it - without <= {"__future__", *ours}
