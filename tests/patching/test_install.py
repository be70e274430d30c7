"""Permutations of patching torch; each in a process of its own, with real saves.

A script says `ours()` where `torch.save` must reach fastserial and `not ours()` where it must not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from fastserial import startup
from fastserial.cli import run as run_module
from fastserial.errors import FastserialError
from fastserial.patching import build, patch_file

ROOT = Path(build.__file__).resolve().parents[2]

PRELUDE = """
import io, sys, warnings

def ours(save=None, **kwargs):
    '''Does this save reach our hooks? (They are told to decline: torch writes.)'''
    import torch
    import fastserial.patching.save_hooks as hooks
    seen = []
    names = ("open_zip_writer", "open_file")
    real = [getattr(hooks, name) for name in names]
    for name in names:
        setattr(hooks, name, lambda *arguments: seen.append(arguments))
    try:
        target = io.BytesIO()
        (save or torch.save)({"a": torch.arange(3)}, target, **kwargs)
        target.seek(0)
        assert torch.load(target)["a"].tolist() == [0, 1, 2]
    finally:
        for name, function in zip(names, real):
            setattr(hooks, name, function)
    return bool(seen)

def both(save=None):
    '''The same for both containers, which must agree.'''
    zipped, legacy = ours(save), ours(save, _use_new_zipfile_serialization=False)
    assert zipped == legacy, (zipped, legacy)
    return zipped

NAMES = ("_save", "_legacy_save", "_open_zipfile_writer", "_open_file_like")

def functions():
    import torch
    return {name: getattr(torch.serialization, name) for name in NAMES}

def same(one, other):
    return all(one[name] is other[name] for name in NAMES)

def caught(function, **kwargs):
    '''Call it; return its result and its fastserial warnings.'''
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function(**kwargs)
    return result, [str(w.message) for w in found if "fastserial" in str(w.message)]
"""


def run(
    script: str,
    *,
    flags: tuple[str, ...] = (),
    prelude: bool = True,
    cwd: Path | None = None,
    **environment: str,
) -> str:
    """Run a script in a fresh process; it must end well. Return what it printed."""
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(ROOT)]))
    inherited = {key: value for key, value in os.environ.items() if key != startup.VARIABLE}
    done = subprocess.run(
        [sys.executable, *flags, "-c", (PRELUDE if prelude else "") + textwrap.dedent(script)],
        env={**inherited, "PYTHONPATH": path, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- on and off ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, fastserial",
        "import fastserial, torch",
        "from torch import save; import fastserial",
        "import fastserial; fastserial.install(); fastserial.uninstall()",
        "from fastserial.patching.install import install; install(); import fastserial",
        "import torch.distributed.checkpoint; import fastserial",
    ],
)
def test_import_orders(imports: str) -> None:
    run(f"""
        {imports}
        fastserial.install(strict=True)
        import torch
        assert both()
        assert both(globals().get("save"))
        assert fastserial.installed()
        fastserial.uninstall()
        assert not both()
        assert not fastserial.installed()
    """)


def test_on_and_off_give_back_the_same_objects() -> None:
    run("""
        import torch, fastserial
        from fastserial.patching import install as patching
        from torch import save
        stock = functions()
        aliases = dict(stock)
        assert fastserial.uninstall() is False
        assert patching.get_original("_save") is stock["_save"]
        for _ in range(3):
            assert fastserial.install() is True
            mine = functions()
            assert not any(mine[name] is stock[name] for name in NAMES)
            assert fastserial.install() is True
            assert same(functions(), mine)
            assert patching.get_original("torch.serialization._save") is stock["_save"]
            assert patching.get_original("load") is torch.load
            assert both() and both(save)
            assert fastserial.uninstall() is True
            assert fastserial.uninstall() is False
            assert same(functions(), stock) and same(aliases, stock)
            assert not both() and not both(save)
        # a name of ours that somebody kept behaves as stock
        for name in NAMES:
            assert mine[name].__code__ is stock[name].__code__
        try:
            patching.get_original("nothing")
        except AttributeError:
            pass
        else:
            raise SystemExit("no AttributeError")
    """)


def test_options_are_kept_and_reset() -> None:
    run("""
        import fastserial
        from fastserial.config import current
        fastserial.install(durable=False)
        fastserial.install()
        assert current().durable is False
        fastserial.uninstall()
        assert current().durable is True
        try:
            fastserial.install(colour=1)
        except fastserial.ConfigError:
            assert not fastserial.installed()
        else:
            raise SystemExit("no ConfigError")
    """)


def test_wrong_options_are_told_at_once() -> None:
    run("""
        import os, fastserial
        from fastserial.config import current

        def refused(**options):
            try:
                fastserial.install(**options)
            except (fastserial.ConfigError, fastserial.EngineUnavailableError) as error:
                return str(error)
            raise SystemExit(f"{options} went through")

        assert "'thread'" in refused(engine="thread") and "threads" in refused(engine="thread")
        os.environ["FASTSERIAL_THREADS"] = "two"
        assert "FASTSERIAL_THREADS" in refused()
        assert "FASTSERIAL_THREADS" in refused(durable=False)
        del os.environ["FASTSERIAL_THREADS"]
        os.environ["FASTSERIAL_ENGINE"] = "warp"
        assert "'warp'" in refused()
        assert not fastserial.installed() and not both()
        assert fastserial.install(engine="null", threads=2)  # nearer than the environment
        assert "'thread'" in refused(engine="thread")
        assert current().engine == "null" and fastserial.installed()  # as before
    """)


def test_status_tells() -> None:
    out = run("""
        import fastserial, json
        before = fastserial.status()
        assert before.torch is None and not before.installed and "not been called" in before.reason
        fastserial.install()
        print(json.dumps(fastserial.status().as_dict()))
        fastserial.uninstall()
        assert "uninstall()" in fastserial.status().reason
    """)
    status = json.loads(out)
    assert status["installed"] is True
    assert status["exact"] is True
    assert status["patch"] in {patch.name for patch in patch_file.load_patches()}
    assert "torch.serialization._save" in status["functions"]
    assert status["replaced"] == []
    assert status["reason"] is None


def test_the_copies_look_like_the_originals() -> None:
    run("""
        import inspect, linecache, pickle, torch, traceback, fastserial
        stock = functions()
        fastserial.install()
        linecache.checkcache()
        for name, mine in functions().items():
            old = stock[name]
            assert inspect.signature(mine) == inspect.signature(old)
            assert mine.__annotations__ == old.__annotations__
            assert mine.__defaults__ == old.__defaults__
            assert mine.__kwdefaults__ == old.__kwdefaults__
            assert (mine.__module__, mine.__qualname__) == (old.__module__, old.__qualname__)
            assert mine.__globals__ is old.__globals__
            assert pickle.loads(pickle.dumps(mine)) is mine
            source = inspect.getsource(mine)
            assert source.startswith(f"def {name}(") and "import save_hooks" in source
            before, after = inspect.getsource(old).splitlines(), source.splitlines()
            assert [line for line in after if line in before] and before[-1] == after[-1]

        class Bad:
            def __reduce__(self):
                raise ValueError("cannot")

        for legacy in (False, True):
            try:
                torch.save(Bad(), io.BytesIO(), _use_new_zipfile_serialization=not legacy)
            except ValueError as error:
                frames = traceback.extract_tb(error.__traceback__)
            frame = [f for f in frames if f.name == ("_legacy_save" if legacy else "_save")][-1]
            assert "serialization.fastserial-v" in frame.filename
            assert frame.line == "pickler.dump(obj)", frame
    """)


# --- other people's code ---------------------------------------------------------------------


def test_replaced_before_install() -> None:
    run("""
        import torch, fastserial
        real = torch.serialization._save
        def theirs(*args, **kwargs):
            return real(*args, **kwargs)
        torch.serialization._save = theirs
        before = functions()
        result, warned = caught(fastserial.install)
        assert result is False and len(warned) == 1, warned
        assert "torch.serialization._save" in warned[0] and "fastserial doctor" in warned[0]
        assert caught(fastserial.install) == (False, [])
        assert same(functions(), before) and not both()
        try:
            fastserial.install(strict=True)
        except ImportError as error:
            assert isinstance(error, fastserial.PatchError)
        else:
            raise SystemExit("no PatchError")
        torch.serialization._save = real
        assert fastserial.install() and both()
    """)


def test_replaced_after_install() -> None:
    run("""
        import torch, fastserial
        stock = functions()
        fastserial.install()
        mine = torch.serialization._save
        calls = []
        def theirs(*args, **kwargs):
            calls.append(1)
            return mine(*args, **kwargs)
        torch.serialization._save = theirs
        assert fastserial.install() and torch.serialization._save is theirs
        assert fastserial.status().replaced == ("torch.serialization._save",)
        assert both() and calls
        done, warned = caught(fastserial.uninstall)
        assert done and len(warned) == 1 and "_save" in warned[0], warned
        assert same(functions(), {**stock, "_save": theirs})
        calls.clear()
        assert not both() and calls
        assert mine.__code__ is stock["_save"].__code__
    """)


def test_reloaded_after_install() -> None:
    run("""
        import importlib, torch, fastserial
        fastserial.install()
        importlib.reload(torch.serialization)
        fresh = functions()
        assert not fastserial.installed()
        assert "replaced" in fastserial.status().reason
        assert fastserial.install() and fastserial.installed()
        assert both(torch.serialization.save)
        fastserial.uninstall()
        assert same(functions(), fresh)
    """)


# --- other torches ---------------------------------------------------------------------------


def test_an_unknown_version_with_known_functions() -> None:
    run("""
        import torch, fastserial
        for version in ("99.1.0", "a fork of mine"):
            torch.__version__ = version
            assert caught(fastserial.install, strict=True) == (True, [])
            assert fastserial.status().exact is False and fastserial.status().torch == version
            assert both()
            fastserial.uninstall()
    """)


@pytest.mark.parametrize("version", ["99.1.0", None])
def test_unknown_functions_stay_stock(version: str | None, tmp_path: Path) -> None:
    """An unknown release (a version no patch covers), or a modified one (a version that is)."""
    for path in patch_file.patches_dir().glob("*.toml"):
        head, _, tail = path.read_text().rpartition('\nsha256 = "')
        (tmp_path / path.name).write_text(f'{head}\nsha256 = "0{tail}')
    out = run(f"""
        from pathlib import Path
        import torch, fastserial
        from fastserial.patching import patch_file as patchset
        patchset.patches_dir = lambda: Path({str(tmp_path)!r})
        torch.__version__ = {version!r} or torch.__version__
        before = functions()
        result, warned = caught(fastserial.install)
        assert result is False and len(warned) == 1, warned
        assert caught(fastserial.install) == (False, [])
        assert same(functions(), before) and not both() and not fastserial.installed()
        assert fastserial.status().patch is None and fastserial.status().reason in warned[0]
        assert torch.__version__ in warned[0] and "pgrade fastserial" in warned[0]
        assert "fastserial patches check" in warned[0]
        try:
            fastserial.install(strict=True)
        except fastserial.PatchError as error:
            assert isinstance(error, ImportError) and str(error) == warned[0]
        else:
            raise SystemExit("no PatchError")
        assert same(functions(), before)
        print(warned[0])
    """)
    assert ("no patch for" if version else "not as released") in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('text.replace(\'"byteorder"\', \'"byte" "order"\')', "not the one this patch"),
        ("text.replace('def _legacy_save(', 'def _legacy_save2(')", "0 times"),
        ("'# one line more\\n' + text", "the file changed after the import"),
        ("None", "not installed"),
    ],
)
def test_modified_source_stays_stock(change: str, message: str) -> None:
    run(f"""
        import torch, fastserial
        text = torch.serialization.__spec__.loader.get_source("torch.serialization")
        changed = {change}
        assert changed != text
        class Loader:
            def get_source(self, name):
                return changed
        torch.serialization.__spec__.loader = Loader()
        before = functions()
        result, warned = caught(fastserial.install)
        assert result is False and {message!r} in warned[0], warned
        assert same(functions(), before) and not both()
    """)


def test_a_failed_self_check_stays_stock() -> None:
    run("""
        import torch, fastserial
        import fastserial.patching.save_hooks as hooks
        hooks.self_check = lambda: "a strange machine"
        before = functions()
        result, warned = caught(fastserial.install)
        assert result is False and "a strange machine" in warned[0]
        assert same(functions(), before) and not both()
    """)


@pytest.mark.parametrize("first", ["", "import torch._dynamo"])
def test_torch_compile_does_not_trace_it(first: str, tmp_path: Path) -> None:
    run(
        f"""
        {first}
        import torch, fastserial
        fastserial.install()
        graphs = []
        def backend(module, inputs):
            graphs.append(module.code)
            return module
        @torch.compile(backend=backend)
        def step(x):
            y = x + 1
            torch.save({{"y": y}}, "a.pt")
            torch.save({{"y": y}}, "b.pt", _use_new_zipfile_serialization=False)
            return y * 2
        assert step(torch.ones(4)).tolist() == [4.0] * 4
        for path in ("a.pt", "b.pt"):
            assert torch.load(path)["y"].tolist() == [2.0] * 4
        assert len(graphs) == 2, graphs
        from torch._dynamo import trace_rules
        import fastserial.patching.save_hooks
        assert trace_rules.check(fastserial.patching.save_hooks.open_zip_writer)
        assert trace_rules.check(torch.serialization._save)
    """,
        cwd=tmp_path,
    )


# --- threads and processes -------------------------------------------------------------------


def test_threads_race_install_and_saves(tmp_path: Path) -> None:
    run(
        """
        import threading, time, torch, fastserial
        from torch import save
        stock = functions()
        fastserial.install(durable=False)
        stop, errors, saves, switches = threading.Event(), [], [0] * 4, [0] * 2

        def saver(number):
            while not stop.is_set():
                value = torch.full((1000 * (number + 1),), saves[number], dtype=torch.int64)
                path = f"{number}.pt"
                try:
                    save([value], path, _use_new_zipfile_serialization=bool(number % 2))
                    assert torch.equal(torch.load(path)[0], value)
                except BaseException as error:
                    errors.append(repr(error))
                    return
                saves[number] += 1

        def switcher(number):
            while not stop.is_set():
                fastserial.uninstall()
                fastserial.install()
                switches[number] += 1

        threads = [threading.Thread(target=saver, args=(n,)) for n in range(4)]
        threads += [threading.Thread(target=switcher, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        while not errors and (min(saves) < 15 or min(switches) < 40):
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not errors, errors[:3]
        fastserial.uninstall()
        assert same(functions(), stock) and not both()
    """,
        cwd=tmp_path,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork(tmp_path: Path) -> None:
    run(
        """
        import gc, os, signal, threading, torch, fastserial
        from fastserial.patching import install as patching
        stock = functions()

        def in_child(work):
            pid = os.fork()
            if pid == 0:
                status = 1
                signal.alarm(60)
                try:
                    work()
                    status = 0
                except BaseException as error:
                    print(repr(error), file=sys.stderr, flush=True)
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

        def child(installed):
            assert both() is installed
            fastserial.install()
            assert both()
            torch.save([torch.ones(3)], "c.pt")
            assert torch.load("c.pt")[0].sum() == 3
            fastserial.uninstall()
            assert not both() and same(functions(), stock)

        in_child(lambda: child(False))
        fastserial.install()
        in_child(lambda: child(True))
        assert both()

        # another thread is inside install() or uninstall() while we fork
        inside, leave = threading.Event(), threading.Event()
        def hold():
            from fastserial.memory.gc_pause import paused_collection

            with patching._lock, paused_collection():
                inside.set()
                leave.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        def child_collects():
            assert gc.isenabled()
            child(True)
        in_child(child_collects)
        leave.set()
        thread.join()
        assert both() and fastserial.uninstall()
    """,
        flags=("-W", "ignore::DeprecationWarning"),
        cwd=tmp_path,
    )


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
    script = """
        assert "torch" not in sys.modules
        assert ("fastserial" in sys.modules) is WANTED
        import torch
        import fastserial
        assert fastserial.installed() is WANTED
        assert both() is WANTED
    """
    for value in ("1", " Yes "):
        run(script.replace("WANTED", "True"), PYTHONPATH=site, FASTSERIAL=value)
    for value in ("0", ""):
        run(script.replace("WANTED", "False"), PYTHONPATH=site, FASTSERIAL=value)


def test_trouble_at_the_start_stays_a_warning(site: str) -> None:
    out = run(
        """
        from fastserial.patching import install as patching
        def broken():
            raise RuntimeError("broken")
        patching.install = broken
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            import torch
        print(found[-1].message, torch.ones(1).item())
    """,
        PYTHONPATH=site,
        FASTSERIAL="1",
    )
    assert "could not be installed: RuntimeError('broken') 1.0" in out
    run(
        """
        from fastserial.patching import install as patching
        patching.install = None
        import torch
    """,
        flags=("-W", "error:fastserial could not:UserWarning"),
        PYTHONPATH=site,
        FASTSERIAL="1",
    )


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("1", True), ("0", False)])
def test_auto(value: str | None, wanted: bool) -> None:
    run(f"""
        import os
        if {value!r} is not None:
            os.environ["FASTSERIAL"] = {value!r}
        import fastserial.auto
        assert fastserial.installed() is {wanted}
        assert both() is {wanted}
    """)


PROGRAM = """
import multiprocessing, sys

def report(where):
    import torch
    import fastserial
    print(where, fastserial.installed(), sys.flags.optimize, *sys.argv[1:], flush=True)

if __name__ == "__main__":
    report("parent")
    child = multiprocessing.get_context("spawn").Process(target=report, args=("child",))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("arguments", [["program.py", "a b", "-x"], ["-m", "program", "a b", "-x"]])
def test_run_covers_spawned_children(arguments: list[str], site: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out = run(
        f"from fastserial.cli.run import run; run({arguments!r})",
        flags=("-O",),
        prelude=False,
        cwd=tmp_path,
        PYTHONPATH=site,
        FASTSERIAL="0",
    )
    assert out.splitlines() == ["parent True 1 a b -x", "child True 1 a b -x"]


def test_run_passes_the_exit_status_on(site: str) -> None:
    run(
        """
        import subprocess
        code = "from fastserial.cli.run import run; run(['-c', 'raise SystemExit(7)'])"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 7
    """,
        PYTHONPATH=site,
    )


def test_run_without_the_pth_file_says_so(tmp_path: Path) -> None:
    # -S: no site-packages, so no .pth file wherever fastserial is installed
    out = run(
        """
        from fastserial.errors import FastserialError
        from fastserial.cli.run import run
        try:
            run(["program.py"])
        except FastserialError as error:
            print(error)
    """,
        flags=("-S",),
        prelude=False,
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
    )
    assert "fastserial.pth is not active" in out
    assert "pip install" in out


def test_run_needs_a_program() -> None:
    with pytest.raises(FastserialError, match="nothing to run"):
        run_module.run([])


# --- the start of a process, and two copies of fastserial ------------------------------------


def test_the_start_imports_nothing(site: str) -> None:
    """Not even with the variable: most Python processes of a job never use torch."""
    script = "import sys; print(*sorted(sys.modules))"
    without, with_it = (
        set(run(script, prelude=False, PYTHONPATH=site, FASTSERIAL=value).split())
        for value in ("0", "1")
    )
    ours = {"fastserial", "fastserial.startup", "fastserial.import_hook"}
    assert ours <= with_it
    assert with_it - without <= {"__future__", *ours}


def test_the_import_of_torch_looks_as_ever(site: str) -> None:
    script = """
        import importlib.util, sys, types
        assert importlib.util.find_spec("torch").loader is not None  # a look is no import
        import torch
        import fastserial
        assert fastserial.installed() is ("SWITCH" == "1")
        print(type(torch.__loader__), vars(torch.__loader__), torch.__spec__.loader is
              torch.__loader__, torch.__spec__.origin, torch.__spec__._initializing)
    """
    import_of = {
        value: run(script.replace("SWITCH", value), PYTHONPATH=site, FASTSERIAL=value)
        for value in ("0", "1")
    }
    assert import_of["0"] == import_of["1"]


def test_an_import_that_fails_may_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import sys\nif not hasattr(sys, 'ready'):\n    raise ImportError('not yet')\n"
    )
    run(
        """
        from fastserial.import_hook import when_imported
        seen = []
        when_imported("late", lambda module: seen.append((module, "other" in sys.modules)))
        try:
            import late
        except ImportError:
            assert not seen
        sys.ready = True
        import late
        assert [module for module, _ in seen] == [late]
        when_imported("late", lambda module: seen.append(module))
        assert seen[1:] == [late]
        """,
        PYTHONPATH=str(tmp_path),
    )


def test_threads_see_only_the_finished_module(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("import time\ntime.sleep(0.1)\n")
    run(
        """
        import threading
        from fastserial.import_hook import when_imported
        def finish(module):
            import time
            time.sleep(0.1)
            module.finished = True
        when_imported("late", finish)
        def look():
            import late
            seen.append(getattr(late, "finished", False))
        seen = []
        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 8, seen
        """,
        PYTHONPATH=str(tmp_path),
    )


def test_a_module_in_a_zip_file(tmp_path: Path) -> None:
    """One loader serves all modules of the file."""
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as archive:
        archive.writestr("late.py", "import other\n")
        archive.writestr("other.py", "")
    run(
        """
        from fastserial.import_hook import when_imported
        seen = []
        when_imported("late", lambda module: seen.append(module.__name__))
        import late
        assert seen == ["late"]
        assert type(late.__loader__).__name__ == "zipimporter"
        """,
        PYTHONPATH=str(tmp_path / "m.zip"),
    )


def test_a_second_copy_knows_of_the_first(tmp_path: Path) -> None:
    run(
        f"""
        import torch, fastserial
        stock = functions()
        fastserial.install()
        for name in [name for name in sys.modules if name.split(".")[0] == "fastserial"]:
            del sys.modules[name]
        first = fastserial
        import fastserial
        assert fastserial is not first
        assert fastserial.installed() and fastserial.status().installed
        result, warned = caught(fastserial.install)
        assert result is True and not warned, warned
        torch.save({{"a": torch.ones(3)}}, {str(tmp_path / "f.pt")!r})
        assert fastserial.last_save_report() is not None
        assert fastserial.uninstall() is True
        assert same(functions(), stock)
        assert not fastserial.installed() and not first.installed()
        assert fastserial.install() and fastserial.uninstall()
        assert same(functions(), stock)
    """
    )
