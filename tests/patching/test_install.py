"""Patching torch and giving its functions back, whatever torch is, and when a process starts."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import linecache
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import processes
from support.patched import both
from torch import save

import fastserial
from fastserial.patching import install, patches, save_hooks

ROOT = Path(patches.__file__).resolve().parents[2]
TESTS = Path(__file__).parents[1]
NAMES = ("_save", "_legacy_save", "_open_zipfile_writer", "_open_file_like")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process: nothing was compiled, and nothing was warned of."""
    fastserial.uninstall()
    monkeypatch.setattr(install, "prepare", patches.prepare)
    monkeypatch.setattr(install, "_ready", None)
    monkeypatch.setattr(install, "_warned", set())
    yield
    fastserial.uninstall()


def functions() -> dict[str, Any]:
    return {name: getattr(torch.serialization, name) for name in NAMES}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] is other[name] for name in NAMES)


def check_stays_stock(*said: str) -> None:
    """`install` warns once, raises if `strict`, and leaves torch alone."""
    before = functions()
    with pytest.warns(fastserial.UnsupportedTorchWarning) as found:
        assert not fastserial.install()
    (warned,) = (str(one.message) for one in found)
    for text in (*said, "stay stock", "`fastserial doctor`", "`fastserial patches check`"):
        assert text in warned
    assert not fastserial.install()
    with pytest.raises(fastserial.PatchError) as error:
        fastserial.install(strict=True)
    assert isinstance(error.value, ImportError)
    assert str(error.value) == warned
    assert same(functions(), before)
    assert not both()
    assert not fastserial.installed()
    status = fastserial.status()
    assert status.patch is None
    assert str(status.reason) in warned


# --- on and off ------------------------------------------------------------------------------


def test_on_and_off_give_back_the_same_objects() -> None:
    stock = functions()
    assert not fastserial.uninstall()
    assert install.get_original("_save") is stock["_save"]
    for _ in range(3):
        assert fastserial.install()
        mine = functions()
        assert not any(mine[name] is stock[name] for name in NAMES)
        assert fastserial.install()
        assert same(functions(), mine)
        assert install.get_original("_save") is stock["_save"]
        assert install.get_original("load") is torch.load
        assert both()
        assert both(save)
        assert fastserial.uninstall()
        assert not fastserial.uninstall()
        assert same(functions(), stock)
        assert not both()
        assert not both(save)
    # a name of ours that somebody kept behaves as stock
    for name in NAMES:
        assert mine[name].__code__ is stock[name].__code__
    with pytest.raises(AttributeError):
        install.get_original("nothing")


class _Bad:
    def __reduce__(self) -> str:
        raise ValueError("cannot")


def test_the_copies_look_like_the_originals() -> None:
    stock = functions()
    fastserial.install()
    linecache.checkcache()
    for name, mine in functions().items():
        old = stock[name]
        assert inspect.signature(mine) == inspect.signature(old)
        for attribute in ("annotations", "defaults", "kwdefaults", "module", "qualname"):
            assert getattr(mine, f"__{attribute}__") == getattr(old, f"__{attribute}__")
        assert mine.__globals__ is old.__globals__
        assert pickle.loads(pickle.dumps(mine)) is mine
        source = inspect.getsource(mine)
        assert source.startswith(f"def {name}(")
        assert "import save_hooks" in source
        before, after = inspect.getsource(old).splitlines(), source.splitlines()
        assert before[-1] == after[-1]
    for legacy in (False, True):
        with pytest.raises(ValueError, match="cannot") as error:
            torch.save(_Bad(), io.BytesIO(), _use_new_zipfile_serialization=not legacy)
        frames = traceback.extract_tb(error.tb)
        frame = [f for f in frames if f.name == ("_legacy_save" if legacy else "_save")][-1]
        assert "serialization.fastserial-v" in frame.filename
        assert frame.line == "pickler.dump(obj)"


def test_a_fork_while_another_thread_installs() -> None:
    stock = functions()
    fastserial.install()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with install._lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not pytest's
        signal.alarm(20)
        try:
            went_well = both() and fastserial.install() and fastserial.uninstall()
            os._exit(not (went_well and same(functions(), stock)))
        finally:
            os._exit(1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert both()


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


# --- other torches, and other code that patches it -------------------------------------------


def test_replaced_before_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.serialization._save
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "_save", lambda *words, **named: real(*words, **named))
        check_stays_stock("torch.serialization._save")
    assert fastserial.install()
    assert both()


def test_replaced_after_install(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = functions()
    fastserial.install()
    mine = torch.serialization._save
    calls = []

    def theirs(*words: Any, **named: Any) -> Any:
        calls.append(1)
        return mine(*words, **named)

    torch.serialization._save = theirs
    try:
        assert fastserial.install()
        assert torch.serialization._save is theirs
        assert fastserial.status().replaced == ("torch.serialization._save",)
        assert both()
        assert calls
        with pytest.warns(RuntimeWarning, match="_save was replaced by other code"):
            assert fastserial.uninstall()
        assert same(functions(), {**stock, "_save": theirs})
        calls.clear()
        assert not both()
        assert calls
    finally:
        torch.serialization._save = stock["_save"]


@pytest.mark.parametrize("version", ["99.1.0", "a fork of mine"])
def test_an_unknown_version_with_known_functions(
    version: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert fastserial.install(strict=True)
    assert not recwarn.list
    status = fastserial.status()
    assert (status.exact, status.torch) == (False, version)
    assert both()


@pytest.mark.parametrize(
    ("version", "said"), [("99.1.0", "no patch for"), (torch.__version__, "not as released")]
)
def test_unknown_functions_stay_stock(
    tmp_path: Path, version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown release (a version no patch covers), or a modified one (a version that is)."""
    for path in patches.patches_dir().glob("*.toml"):
        changed = path.read_text().replace('_load = "', '_load = "0')
        (tmp_path / path.name).write_text(changed)
    monkeypatch.setattr(patches, "patches_dir", lambda: tmp_path)
    monkeypatch.setattr(torch, "__version__", version)
    check_stays_stock(version, said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"byteorder"', '"byte" "order"', "the source of torch.serialization._save is not the one"),
        ("def _legacy_save(", "def _legacy_save2(", "0 times"),
        ("import ", "# one line more\nimport ", "the file changed after the import"),
        ("", None, "not installed"),
    ],
)
def test_modified_source_stays_stock(
    old: str, new: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = torch.serialization.__spec__
    text: str = spec.loader.get_source("torch.serialization")  # type: ignore[union-attr]
    changed = None if new is None else text.replace(old, new, -1 if "import" not in new else 1)
    assert changed != text
    monkeypatch.setattr(spec, "loader", SimpleNamespace(get_source=lambda name: changed))
    check_stays_stock(said)


def test_a_failed_self_check_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_hooks, "self_check", lambda: "a strange machine")
    check_stays_stock("a strange machine")


@pytest.mark.parametrize("first", ["", "torch._dynamo"])
def test_torch_compile_does_not_trace_it(first: str, tmp_path: Path) -> None:
    run("compiled", first, cwd=tmp_path)


# --- the environment -------------------------------------------------------------------------


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


@pytest.mark.parametrize("value", ["2", "enable"])
def test_a_value_that_is_neither_on_nor_off_is_named(site: str, value: str) -> None:
    scene = ("at_the_import_of_torch", "False", value)
    for flags in ((), ("-W", "error")):
        run("starting", *scene, flags=flags, PYTHONPATH=site, FASTSERIAL=value)


def test_a_bad_value_of_one_variable_leaves_the_rest_on(site: str) -> None:
    scene = ("at_the_import_of_torch", "True", "FASTSERIAL_CACHE")
    environment = {"FASTSERIAL": "1", "FASTSERIAL_CACHE": "kep"}
    for flags in ((), ("-W", "error")):
        run("starting", *scene, flags=flags, PYTHONPATH=site, **environment)


@pytest.mark.parametrize("value", ["2", "enable"])
def test_auto_names_a_value_that_is_neither_on_nor_off(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSERIAL", value)
    monkeypatch.delitem(sys.modules, "fastserial.auto", raising=False)
    with pytest.warns(UserWarning, match=f"FASTSERIAL={value} is neither on nor off"):
        importlib.import_module("fastserial.auto")
    assert fastserial.installed()


@pytest.mark.parametrize(("value", "installs"), [("", True), ("0", False)])
def test_auto(value: str, installs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERIAL", value)
    monkeypatch.delitem(sys.modules, "fastserial.auto", raising=False)
    importlib.import_module("fastserial.auto")
    assert fastserial.installed() is installs
    assert both() is installs


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
