"""Patches as data: choosing, inserting, checking; and `fastserial patches`."""

from __future__ import annotations

import ast
import builtins
import dis
import json
import os
import re
import shutil
import textwrap
from pathlib import Path
from types import FunctionType

import pytest
import torch
from typer.testing import CliRunner

from fastserial.cli.patches import patches_app
from fastserial.errors import PatchError
from fastserial.patching import maintain, patches
from fastserial.patching.patches import Edit, Patch, choose, read_patch

NOXFILE = Path(__file__).parents[2] / "noxfile.py"
(RELEASES,) = (
    ast.literal_eval(node.value)
    for node in ast.parse(NOXFILE.read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELEASES"
)
NAMES = patches.patch_names()
EDITS = patches.tomllib.loads((patches.patches_dir() / "edits.toml").read_text())


# --- the shipped patches ---------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu130", ".post1"])
def test_each_release_has_a_patch_and_each_patch_a_release(suffix: str) -> None:
    """Those that `noxfile.py` tests."""
    assert {patches.line_of(release + suffix) for release in RELEASES} == set(NAMES)


@pytest.mark.parametrize(
    "version", ["2.5.1", "99.1.0", "2.6.0a0+git12", "2.13.0.dev20261101", "nonsense", ""]
)
def test_other_versions_have_none(version: str) -> None:
    assert patches.line_of(version) not in NAMES
    assert not any(read_patch(name).is_for(version) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_patch_is_sound(name: str) -> None:
    own = patches.tomllib.loads((patches.patches_dir() / f"{name}.toml").read_text())
    assert own.keys() <= {"sha256", "edits"}
    assert own["sha256"].keys() == EDITS.keys()
    assert own.get("edits", {}).keys() <= EDITS.keys()
    for edit in own.get("edits", {}).values():
        assert edit.keys() <= {"before", "insert"}
    for function in read_patch(name).edits:
        assert function.hashes
        assert all(re.fullmatch("[0-9a-f]{64}", one) for one in function.hashes)
        # torch declares it `global` further down: naming it earlier is a SyntaxError
        assert "_serialization_tls" not in function.insert


# --- insertions ------------------------------------------------------------------------------


def patch_of(before: str, insert: str = "return 'ours'", function: str = "f") -> Patch:
    return Patch("v0.0", (Edit(function, (), before, insert),))


def without_ours(text: str) -> str:
    marked = rf"[ \t]*{patches.BEGIN}\n(.*\n)*?[ \t]*{patches.END}\n"
    return re.sub(marked, "", text)


def built_text(source: str, patch: Patch) -> str:
    source = textwrap.dedent(source)
    text, functions = patches.build(source, patch)
    assert text != source
    assert without_ours(text) == source
    for one in functions:
        assert without_ours(one.text) == one.original
        for whole, part, line in (
            (source, one.original, one.original_line),
            (text, one.text, one.line),
        ):
            lines, found = patches.split_lines(whole), patches.split_lines(part)
            assert lines[line - 1 : line - 1 + len(found)] == found
    compile(text, "built", "exec")
    return text


def namespace(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    exec(text, found)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return 1\n",
        "def f():\n    '''Doc.\n\n    More.\n    '''\n    return 1\n",
        "def f(\n    a=1,\n    b=(2,\n    3),\n) -> None:\n    return 1\nx = 2\n",
        "import functools\n@functools.cache\n@functools.lru_cache\ndef f():\n    return 1\n",
        "def f():\n# in the first column\n    return 1\n    # tail\n\n# of the next\ny = 1\n",
        "s = 'é\x0c\u2028'\ndef f():\n    'é'\n    return 1\n",
    ],
)
def test_lines_go_before_the_one_that_is_named(source: str) -> None:
    found = namespace(built_text(source, patch_of("return 1")))["f"]
    assert found() == "ours"  # type: ignore[operator]
    assert getattr(found, "__doc__", None) == namespace(source)["f"].__doc__


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "m.f is defined 0 times"),
        ("def f():\n    pass\ndef f():\n    pass\n", "m.f is defined 2 times"),
        ("def f():\n    return 1\n    return 1\n", "m.f has 2 lines `return 1`"),
        ("def f(): return 1\n", "m.f has 0 lines `return 1`"),
        ("def f():\n    a = 1; return 1\n", "m.f has 0 lines `return 1`"),
    ],
)
def test_a_place_that_is_not_the_only_one(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "MODULE", "m")
    with pytest.raises(PatchError, match=f"{message}.*, not one|{message}, not once"):
        patches.build(source, patch_of("return 1"))


# --- against the torch that is installed -----------------------------------------------------


@pytest.fixture
def torch_copy(tmp_path: Path) -> Path:
    """A folder that holds the two files of the installed torch that count; to be changed."""
    folder = tmp_path / "unpacked"
    (folder / "torch").mkdir(parents=True)
    for name in ("version.py", "serialization.py"):
        shutil.copyfile(Path(torch.__file__).parent / name, folder / "torch" / name)
    return folder


def set_version(folder: Path, version: str) -> None:
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n")


def edit_save(folder: Path, line: str = "    # changed\n") -> None:
    """Change `_save`, but no line that counts, whatever this torch's looks like."""
    path = folder / "torch/serialization.py"
    text = path.read_text()
    before = re.search(rf"\n +{re.escape(EDITS['_save']['before'])}\n", text)
    assert before is not None
    path.write_text(f"{text[: before.start() + 1]}{line}{text[before.start() + 1 :]}")


def test_the_installed_torch_checks() -> None:
    source = maintain.open_torch()
    assert source.version == torch.__version__
    patch, problems = choose(source.text, source.version)
    assert patch.is_for(torch.__version__)
    assert problems == dict.fromkeys(EDITS)


def test_without_our_lines_it_is_torchs_own_file() -> None:
    source = maintain.open_torch()
    built_text(source.text, choose(source.text, source.version)[0])


def strange_names(original: FunctionType, patched: FunctionType) -> set[str]:
    """Return what our lines read that is not there, and what they make under a name of torch's."""
    code = patched.__code__
    read = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    made = {*code.co_varnames, *code.co_cellvars}
    made -= {*original.__code__.co_varnames, *original.__code__.co_cellvars}
    unknown = read - original.__globals__.keys() - set(dir(builtins))
    return unknown | {name for name in made if not name.startswith("_fastserial")}


def test_our_lines_know_the_names_they_use() -> None:
    swaps = patches.prepare(torch.__version__).swaps
    assert {swap.name for swap in swaps} == EDITS.keys()
    for swap in swaps:
        assert strange_names(swap.original, swap.ours) == set(), swap.name


def test_a_changed_torch_does_not_check(torch_copy: Path) -> None:
    edit_save(torch_copy)
    source = maintain.open_torch(torch_copy)
    patch, found = choose(source.text, source.version)
    assert patch.is_for(source.version)
    assert [name for name, problem in found.items() if problem] == ["_save"]
    assert "the source of torch.serialization._save is not the one" in (found["_save"] or "")


# --- a new release ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(patches.patches_dir(), tmp_path / "patches"))


def applies(torch_copy: Path, folder: Path) -> bool:
    source = maintain.open_torch(torch_copy)
    patch, problems = choose(source.text, source.version, folder)
    return patch.is_for(source.version) and not any(problems.values())


@pytest.mark.parametrize("kind", ["missing", "pipe", "text", "folder"])
def test_what_holds_no_torch(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "torch.whl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(PatchError, match=r"torch\.whl holds no torch"):
        maintain.open_torch(path)


def test_new_makes_the_file_of_a_new_release(torch_copy: Path, folder: Path) -> None:
    edit_save(torch_copy)
    set_version(torch_copy, "99.7.1+cpu")
    assert not applies(torch_copy, folder)
    made = maintain.new(maintain.open_torch(torch_copy), folder)
    assert made == folder / "v99.7.toml"
    assert "[edits" not in made.read_text()
    assert applies(torch_copy, folder)


def test_new_adds_the_hashes_of_a_patch_release(torch_copy: Path, folder: Path) -> None:
    assert applies(torch_copy, folder)
    other = Path(shutil.copytree(torch_copy, torch_copy.with_name("other")))
    edit_save(other)
    assert not applies(other, folder)
    made = maintain.new(maintain.open_torch(other), folder)
    assert applies(torch_copy, folder)
    assert applies(other, folder)
    hashes = [len(one.hashes) for one in read_patch(made.stem, folder).edits]
    assert sorted(hashes) == [1, 1, 1, 1, 2]


def test_an_edit_written_by_hand(torch_copy: Path, folder: Path) -> None:
    """As CONTRIBUTING.md says: `new` names the file; an edit there is kept, and gets hashes."""
    path = torch_copy / "torch/serialization.py"
    text = path.read_text()
    assert text.count(EDITS["_save"]["before"]) == 1
    path.write_text(text.replace(EDITS["_save"]["before"], "# Write each tensor"))
    set_version(torch_copy, "99.7.0")
    with pytest.raises(PatchError) as caught:
        maintain.new(maintain.open_torch(torch_copy), folder)
    by_hand = folder / "v99.7.toml"
    for word in ("_save has 0 lines", EDITS["_save"]["before"], str(by_hand)):
        assert word in str(caught.value)
    assert not by_hand.exists()
    by_hand.write_text('[edits._save]\nbefore = "# Write each tensor"\n')
    assert not applies(torch_copy, folder)
    maintain.new(maintain.open_torch(torch_copy), folder)
    assert applies(torch_copy, folder)
    assert by_hand.read_text().endswith('\n\n[edits._save]\nbefore = "# Write each tensor"\n')
    # the next release begins with what the newest needs
    set_version(torch_copy, "99.8.0")
    assert maintain.new(maintain.open_torch(torch_copy), folder).read_text() == by_hand.read_text()
    assert applies(torch_copy, folder)


# --- the command line ------------------------------------------------------------------------


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(patches_app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_cli(torch_copy: Path, folder: Path, tmp_path: Path) -> None:
    source = maintain.open_torch()
    name = choose(source.text, source.version)[0].name
    code, output = invoke("list")
    assert code == 0
    assert [line.split()[1] for line in output.splitlines() if line.startswith("*")] == [name]
    assert len(output.splitlines()) == len(NAMES)

    code, output = invoke("show")
    assert code == 0
    assert "+    from fastserial.patching import save_hooks" in output
    assert invoke("show", "--torch", torch_copy) == (0, output)

    code, output = invoke("check")
    assert code == 0
    assert f"patch {name}, made for it" in output
    assert output.count(": ok") == len(EDITS)
    assert "the patch applies" in output
    report = json.loads(invoke("check", "--json")[1])
    assert (report["patch"], report["exact"], report["ok"]) == (name, True, True)
    assert report["functions"] == dict.fromkeys(EDITS)

    edit_save(torch_copy)
    set_version(torch_copy, "99.1.0")
    code, output = invoke("check", "--torch", torch_copy)
    assert code == 1
    assert "does NOT apply" in output
    assert "_save: the source of" in output
    code, output = invoke("new", "--torch", torch_copy, "--folder", folder)
    assert (code, output.strip()) == (0, str(folder / "v99.1.toml"))
