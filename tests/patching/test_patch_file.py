"""Patches as data: choosing, anchoring, building, stripping; and `fastserial patches`."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import textwrap
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from fastserial.cli.patches import patches_app
from fastserial.errors import PatchError
from fastserial.patching import build, maintain, patch_file
from fastserial.patching.patch_file import Anchor, Edit, FunctionPatch, Match, Patch

NOXFILE = Path(__file__).parents[2] / "noxfile.py"
(RELEASES,) = (
    ast.literal_eval(node.value)
    for node in ast.parse(NOXFILE.read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RELEASES"
)
SHIPPED = patch_file.load_patches()
NEWEST = SHIPPED[0].oldest
NEXT = f"{NEWEST.major}.{NEWEST.minor + 1}.0"


def patch_of(*edits: Edit, function: str = "f") -> Patch:
    return Patch("v0.0", ">=0", (FunctionPatch("m", function, {}, edits),))


def built_text(source: str, *edits: Edit, function: str = "f") -> str:
    source = textwrap.dedent(source)
    built = build.build_module(source, patch_of(*edits, function=function), "m")
    assert build.strip(built.text) == source
    one = built.functions[0]
    assert build.strip(one.text) == one.original
    lines = build.split_lines
    assert lines(source)[one.original_line - 1] == lines(one.original)[0]
    assert lines(built.text)[one.line - 1] == lines(one.text)[0]
    compile(built.text, "built", "exec")
    return built.text


def namespace(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    exec(text, found)
    return found


AT_START = Edit(Anchor("start"), "return 'ours'")


# --- the shipped patches ---------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu130", ".post1"])
@pytest.mark.parametrize("release", RELEASES)
def test_each_release_has_one_patch(release: str, suffix: str) -> None:
    """Those that `noxfile.py` tests."""
    covering = [patch.name for patch in SHIPPED if patch.covers(release + suffix)]
    version = Version(release)
    assert covering == [f"v{version.major}.{version.minor}"]


@pytest.mark.parametrize("version", ["2.5.1", NEXT, "2.6.0a0+git12", f"{NEXT}.dev20261101"])
def test_other_versions_have_none(version: str) -> None:
    assert not [patch.name for patch in SHIPPED if patch.covers(version)]


def test_each_patch_has_a_release() -> None:
    """`noxfile.py` tests every one of them."""
    lines = {f"v{Version(one).major}.{Version(one).minor}" for one in RELEASES}
    assert {patch.name for patch in SHIPPED} == lines


def test_patches_come_newest_first() -> None:
    assert [patch.oldest for patch in SHIPPED] == sorted(
        (patch.oldest for patch in SHIPPED), reverse=True
    )
    assert SHIPPED[0].oldest > Version("2.9")  # by version, not by text


@pytest.mark.parametrize("patch", SHIPPED, ids=lambda patch: patch.name)
def test_a_shipped_file_is_as_the_tool_writes_it(patch: Patch) -> None:
    path = patch_file.patches_dir() / f"{patch.name}.toml"
    assert path.read_text() == maintain.render(patch)


@pytest.mark.parametrize("patch", SHIPPED, ids=lambda patch: patch.name)
def test_a_shipped_patch_is_sound(patch: Patch) -> None:
    for function in patch.functions:
        assert function.hashes
        for text in (*function.hashes, *function.hashes.values()):
            assert re.fullmatch("[0-9a-f]{64}", text)
        for edit in function.edits:
            compile("def f():\n" + textwrap.indent(edit.insert, "    "), "insert", "exec")
            # torch declares it `global` further down: naming it earlier is a SyntaxError
            assert "_serialization_tls" not in edit.insert


def test_candidates_begin_with_the_exact_one() -> None:
    order = list(patch_file.candidates("2.8.0+cpu", SHIPPED))
    assert order[0][0].name == "v2.8"
    assert [exact for _, exact in order] == [True] + [False] * (len(SHIPPED) - 1)
    assert [patch for patch, _ in order[1:3]] == list(SHIPPED[:2])


def _read_for(monkeypatch: pytest.MonkeyPatch, version: str) -> tuple[list[str], list[str]]:
    """Return the names of the candidates, and of the files read until the first of them."""
    read: list[str] = []
    read_patch = patch_file._read

    def noting(path: Path) -> Patch:
        read.append(path.stem)
        return read_patch(path)

    monkeypatch.setattr(patch_file, "_read", noting)
    found = patch_file.shipped_candidates(version)
    names = [next(found)[0].name]
    first = list(read)
    return [*names, *(patch.name for patch, _ in found)], first


def test_one_file_is_read_for_a_known_release(monkeypatch: pytest.MonkeyPatch) -> None:
    names, read = _read_for(monkeypatch, "2.8.0+cpu")
    assert read == ["v2.8"]
    assert names == [patch.name for patch, _ in patch_file.candidates("2.8.0+cpu", SHIPPED)]


def test_patches_are_named_like_their_release_line() -> None:
    for patch in SHIPPED:
        line = patch.name.removeprefix("v")
        assert patch.covers(f"{line}.0")
        assert patch.covers(f"{line}.9+cu130")
        assert [p.name for p, exact in patch_file.candidates(f"{line}.1", SHIPPED) if exact] == [
            patch.name
        ]


@pytest.mark.parametrize("version", ["2.99.0", "2.8.0a0+git1", "nonsense"])
def test_all_are_candidates_for_an_unknown_release(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    names, _ = _read_for(monkeypatch, version)
    assert names == [patch.name for patch, _ in patch_file.candidates(version, SHIPPED)]


@pytest.mark.parametrize("version", ["3.0", "not a version", ""])
def test_candidates_of_an_unknown_version(version: str) -> None:
    order = list(patch_file.candidates(version, SHIPPED))
    assert [patch.name for patch, _ in order] == [patch.name for patch in SHIPPED]
    assert not any(exact for _, exact in order)


# --- anchors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return 1\n",
        "def f():\n    '''Doc.\n\n    More.\n    '''\n    return 1\n",
        "def f():\n    '''Doc.'''\n",
        "def f():\n    # a comment\n\n    return 1\n",
        "async def g(): pass\ndef f(\n    a=1,\n    b=(2,\n3),\n) -> None:\n    return 1\nx = 2\n",
        "import functools\n@functools.cache\n@functools.lru_cache\ndef f():\n    return 1\n",
        "def f():\n    x = '''\ndef g():\nend'''\n    return x\n\n# tail\ny = 1\n",
        "s = 'é\x0c\u2028'\ndef f():\n    'é'\n    return 'é'\n",
    ],
)
def test_insertion_at_the_start(source: str) -> None:
    found = namespace(built_text(source, AT_START))["f"]
    assert found() == "ours"  # type: ignore[operator]
    assert getattr(found, "__doc__", None) == namespace(source)["f"].__doc__


LOOP = """
    def f(items):
        for item in items:
            item.check()
        if items:
            for item in items:
                item.write(1)
        else:
            pass
        try:
            g()
        except ValueError:
            h()
        for item in items:
            item.write(2)
        # the end

    def g(): pass
"""


@pytest.mark.parametrize(
    ("anchor", "before"),
    [
        (Anchor("before", Match("For", calls="write", last=True)), "write(2)"),
        (Anchor("before", Match("For", calls="check")), "check()"),
        (Anchor("before", Match("For"), inside=(Match("If"),)), "write(1)"),
        (
            Anchor("before", Match("Expr", calls="write"), inside=(Match("If"), Match("For"))),
            "write(1)",
        ),
    ],
)
def test_insertion_before(anchor: Anchor, before: str) -> None:
    lines = [line.strip() for line in built_text(LOOP, Edit(anchor, "here()")).splitlines()]
    at = lines.index("here()")
    assert lines[at - 1] == build.BEGIN
    assert lines[at + 1] == build.END
    following = lines[at + 2 : at + 4]
    assert following[0].startswith("for") or anchor.match == Match("Expr", calls="write")
    assert any(before in line for line in following)


def test_insertion_after_and_in_a_handler() -> None:
    after = Edit(Anchor("after", Match("For", calls="write", last=True)), "here()")
    lines = built_text(LOOP, after).splitlines()
    assert lines[lines.index("    here()") - 2].strip() == "item.write(2)"
    handler = Anchor("after", Match("Expr", calls="h"), inside=(Match("Try"),))
    lines = built_text(LOOP, Edit(handler, "here()")).splitlines()
    assert lines[lines.index("        here()") - 2].strip() == "h()"


def test_a_nested_function_can_be_entered() -> None:
    source = """
        def f():
            def one():
                return 1
            def two():
                return 2
            return one(), two()
    """
    inside = (Match("FunctionDef", name="two"),)
    found = namespace(built_text(source, Edit(Anchor("start", inside=inside), "return 3")))["f"]
    assert found() == (1, 3)  # type: ignore[operator]


def test_several_edits_of_one_function() -> None:
    text = built_text(
        LOOP,
        Edit(Anchor("start"), "one = 1"),
        Edit(Anchor("before", Match("For", calls="check")), "two = 2"),
        Edit(Anchor("before", Match("For", calls="write", last=True)), "three = 3"),
    )
    assert text.index("one = 1") < text.index("two = 2") < text.index("three = 3")
    assert text.count(build.BEGIN) == 3


@pytest.mark.parametrize(
    ("source", "anchor", "message"),
    [
        (LOOP, Anchor("before", Match("For")), "2 statements"),
        (LOOP, Anchor("before", Match("While")), "0 statements"),
        (LOOP, Anchor("before", Match("For", calls="check", last=True)), "0 statements"),
        (LOOP, Anchor("before", Match("For", calls="nothing")), "0 statements"),
        (LOOP, Anchor("start", inside=(Match("If"),)), "one block"),
        ("def f(): return 1\n", Anchor("start"), "shares its line"),
        ("def f():\n    a = 1; return a\n", Anchor("before", Match("Return")), "shares its line"),
        ("def f():\n    a = 1; return a\n", Anchor("after", Match("Assign")), "shares its line"),
        ("def f():\n    return 1", Anchor("after", Match("Return")), "shares its line"),
        ("x = 1\n", Anchor("start"), "0 times"),
        ("def f():\n    pass\ndef f():\n    pass\n", Anchor("start"), "2 times"),
        ("if True:\n    def f():\n        pass\n", Anchor("start"), "0 times"),
        ("@g(\n)\ndef f():\n    pass\n", Anchor("start"), "decorator"),
        ("def f():\n    return (\n", Anchor("start"), "cannot be parsed"),
        (f"def f():\n    pass\n{build.BEGIN}\n", Anchor("start"), "already"),
    ],
)
def test_refused_anchors(source: str, anchor: Anchor, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        build.build_module(textwrap.dedent(source), patch_of(Edit(anchor, "here()")), "m")


@pytest.mark.parametrize(
    "text",
    [
        f"{build.BEGIN}\n",
        f"{build.END}\n",
        f"{build.BEGIN}\n{build.BEGIN}\n{build.END}\n{build.END}\n",
    ],
)
def test_strip_refuses_markers_that_do_not_pair(text: str) -> None:
    with pytest.raises(PatchError, match="pair"):
        build.strip(text)


def test_verify_tells_what_differs() -> None:
    source = "def f():\n    return 1\n"
    built = build.build_module(source, patch_of(AT_START), "m").functions[0]

    def verdict(before: str, after: str) -> str | None:
        function = FunctionPatch("m", "f", {before: after}, (AT_START,))
        return build.check_hashes(build.build_module(source, Patch("v", "", (function,)), "m"))

    before, after = build.digest(built.original), build.digest(built.text)
    assert verdict(before, after) is None
    assert "the source of m.f" in (verdict(after, after) or "")
    assert "the built copy of m.f" in (verdict(before, before) or "")


# --- files -----------------------------------------------------------------------------------

GOOD = maintain.render(Patch("v0.0", ">=0", (FunctionPatch("m", "f", {"a": "b"}, (AT_START,)),)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('built_sha256 = "b"\n', "", r"f: it has 1 sha256 and 0 built_sha256; delete them all"),
        (
            'place = "start"',
            'place = "before", statement = "For", call = "g"',
            "f: the anchor .*'call': 'g'.* may have calls, name, last",
        ),
        ('place = "start"', 'place = "before", calls = "g"', "f: the anchor .* needs `statement`"),
        ('place = "start"', 'place = "before"', "f: the anchor .* needs `place`"),
    ],
)
def test_a_slip_in_a_patch_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = _written(tmp_path / "v0.toml", GOOD.replace(old, new))
    with pytest.raises(PatchError, match=f"^{re.escape(str(path))} is not a patch: {message}"):
        patch_file.read_patch(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not toml",
        'torch = ">=1"\nfunction = []\n',
        GOOD.replace('torch = ">=0"', 'torch = "new"'),
        GOOD.replace('torch = ">=0"\n', ""),
        GOOD.replace('sha256 = "a"', 'sha256 = ["a", "c"]'),
        GOOD.replace('{place = "start"}', '{place = "end"}'),
        GOOD.replace('{place = "start"}', '{place = "before"}'),
        GOOD.replace('{place = "start"}', '{place = "start", statement = "For"}'),
        GOOD.replace('{place = "start"}', '{place = "before", statement = "For", color = 1}'),
        GOOD + GOOD[GOOD.index("[[function]]") :],
    ],
)
def test_a_file_that_is_no_patch(text: str, tmp_path: Path) -> None:
    (tmp_path / "v1.toml").write_text(text)
    assert patch_file.read_patch(_written(tmp_path / "v0.toml", GOOD)).torch == ">=0"
    with pytest.raises(PatchError, match="not a patch"):
        patch_file.load_patches(tmp_path)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_render_and_read_agree_on_everything(tmp_path: Path) -> None:
    inside = (Match("With", calls="open"), Match("FunctionDef", name="g"))
    functions = (
        FunctionPatch("m", "f", {"a": "b", "c": "d"}, (AT_START, AT_START)),
        FunctionPatch(
            "m.n", "f", {"a": "b"}, (Edit(Anchor("after", Match("If", last=True), inside), "x"),)
        ),
    )
    patch = Patch("v1.2", ">=1.2,<1.3", functions)
    text = maintain.render(patch)
    again = patch_file.read_patch(_written(tmp_path / "v1.2.toml", text))
    assert maintain.render(again) == text
    assert again.functions[1] == functions[1]._replace(
        edits=(Edit(functions[1].edits[0].anchor, "x\n"),)
    )


# --- against the torch that is installed -----------------------------------------------------


@pytest.fixture(scope="module")
def torch_source() -> maintain.TorchSource:
    return maintain.open_torch()


@pytest.fixture
def torch_copy(torch_source: maintain.TorchSource, tmp_path: Path) -> Path:
    folder = tmp_path / "unpacked"
    for name in ("torch/version.py", "torch/serialization.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(torch_source.read(name))
    return folder


def edit_save(folder: Path) -> None:
    """Change `_save`, but no anchor, whatever this torch's looks like."""
    path = folder / "torch/serialization.py"
    lines = path.read_text().split("\n")
    (save,) = (
        node
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.FunctionDef) and node.name == "_save"
    )
    lines.insert(save.body[0].lineno - 1, "    # changed")
    path.write_text("\n".join(lines))


def test_the_installed_torch_checks(torch_source: maintain.TorchSource) -> None:
    report = maintain.check(torch_source)
    assert report.ok, report
    assert report.exact
    assert {one.function for one in report.functions} >= {
        "torch.serialization._save",
        "torch.serialization._legacy_save",
        "torch.serialization._open_zipfile_writer",
        "torch.serialization._open_file_like",
    }


def test_a_changed_torch_does_not_check(torch_copy: Path) -> None:
    edit_save(torch_copy)
    report = maintain.check(maintain.open_torch(torch_copy))
    assert not report.ok
    assert report.exact
    bad = [one for one in report.functions if not one.ok]
    assert [one.function for one in bad] == ["torch.serialization._save"]
    assert bad[0].anchored
    assert bad[0].strips_back
    assert not bad[0].source_hash
    with pytest.raises(PatchError, match="_save"):
        maintain.build(torch_copy, maintain.open_torch(torch_copy))


def test_the_same_from_wheel_folder_and_file(
    torch_copy: Path, torch_source: maintain.TorchSource, tmp_path: Path
) -> None:
    wheel = tmp_path / "torch.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (torch_copy / "torch").iterdir():
            archive.write(path, f"torch/{path.name}")
    places = [wheel, torch_copy, torch_copy / "torch", torch_copy / "torch/serialization.py"]
    for place in places:
        source = maintain.open_torch(place)
        assert source.version == torch_source.version
        assert maintain.check(source).ok


def test_a_lone_file_is_recognised_by_its_hashes(torch_copy: Path, tmp_path: Path) -> None:
    alone = shutil.copy(torch_copy / "torch/serialization.py", tmp_path / "serialization.py")
    source = maintain.open_torch(alone)
    assert source.version == ""
    report = maintain.check(source)
    assert report.ok
    assert not report.exact


def test_what_is_no_torch(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="not a wheel"):
        maintain.open_torch(tmp_path / "missing")
    with pytest.raises(PatchError, match="holds no torch"):
        maintain.open_torch(tmp_path)
    (tmp_path / "torch").mkdir()
    report = maintain.check(maintain.open_torch(tmp_path))
    assert "no source" in (report.functions[0].problem or "")


def test_build_writes_copies_and_diffs_that_apply(torch_copy: Path, tmp_path: Path) -> None:
    copy, diff = maintain.build(tmp_path / "out", maintain.open_torch(torch_copy))
    stock = torch_copy / "torch/serialization.py"
    assert build.strip(copy.read_bytes().decode()).encode() == stock.read_bytes()
    compile(copy.read_text(), copy, "exec")
    if shutil.which("patch") is None:
        pytest.skip("needs the patch program")
    subprocess.run(["patch", "-s", "-p1", "-i", diff], cwd=torch_copy, check=True)
    assert stock.read_bytes() == copy.read_bytes()


def test_new_makes_the_file_for_a_new_release(torch_copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(patch_file.patches_dir(), folder)
    edit_save(torch_copy)
    source = maintain.open_torch(torch_copy, "2.77.1+cpu")
    assert not maintain.check(source, patches=patch_file.load_patches(folder)).ok
    made = maintain.new(source, folder)
    assert made == folder / "v2.77.toml"
    report = maintain.check(source, patches=patch_file.load_patches(folder))
    assert report.ok
    assert report.exact
    assert patch_file.load_patches(folder)[0].torch == ">=2.77,<2.78"


def test_new_adds_the_hashes_of_a_patch_release(torch_copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(patch_file.patches_dir(), folder)
    source = maintain.open_torch(torch_copy)
    name = maintain.check(source).patch
    assert maintain.new(source, folder).read_text() == maintain.render(
        patch_file.read_patch(patch_file.patches_dir() / f"{name}.toml")
    )
    edit_save(torch_copy)
    maintain.new(maintain.open_torch(torch_copy), folder)
    patches = patch_file.load_patches(folder)
    assert maintain.check(source, patches=patches).ok
    assert maintain.check(maintain.open_torch(torch_copy), patches=patches).ok
    assert max(len(function.hashes) for patch in patches for function in patch.functions) == 2


def test_new_wants_to_know_the_version(torch_copy: Path) -> None:
    (torch_copy / "torch/version.py").unlink()
    with pytest.raises(PatchError, match="--torch-version"):
        maintain.new(maintain.open_torch(torch_copy))


# --- against a torch of a few lines, which no release changes --------------------------------

SMALL = """
import io

COUNT = 1


def _save(obj, zip_file):
    global LAST
    try:
        sizes = [len(part) for part in obj]
    except TypeError as error:
        raise ValueError from error
    for index, part in enumerate(obj):
        zip_file.write_record(part)

    def inner(depth):
        return depth

    return inner(sizes)
"""
PATCH_OF_SMALL = """
torch = ">=2.76,<2.77"
module = "torch.serialization"

[[function]]
name = "_save"

[[function.edit]]
anchor = {place = "before", statement = "For", calls = "write_record"}
insert = '''
import os as _fastserial

zip_file = _fastserial.fspath(zip_file)
'''
"""


class Small:
    """A torch and a folder of patches; what is written there can be changed."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "torch/serialization.py"
        self.patches = folder / "patches"
        for one in (self.file.parent, self.patches):
            one.mkdir(parents=True)
        self.file.write_text(SMALL)
        self.patch("v2.76", PATCH_OF_SMALL)
        maintain.new(self.source("2.76.0"), self.patches)
        assert self.checks("2.76.0").ok

    def source(self, version: str) -> maintain.TorchSource:
        return maintain.open_torch(self.file.parent, version)

    def patch(self, name: str, text: str) -> None:
        (self.patches / f"{name}.toml").write_text(text)

    def checks(self, version: str) -> maintain.CheckReport:
        return maintain.check(self.source(version), patches=patch_file.load_patches(self.patches))

    def change(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path / "small")


def test_a_torch_without_the_anchor_does_not_check(small: Small) -> None:
    small.change(".write_record(", ".put(")
    (bad,) = small.checks("2.76.0").functions
    assert not bad.anchored
    with pytest.raises(PatchError, match="0 statements"):
        maintain.new(small.source("2.76.0"), small.patches)


def test_an_anchor_written_by_hand(small: Small) -> None:
    """As CONTRIBUTING.md says: `new` names both files, and adds the hashes to a copy without."""
    small.change(".write_record(", ".put(")
    with pytest.raises(PatchError) as caught:
        maintain.new(small.source("2.77.1"), small.patches)
    for word in (
        '{statement = "For", calls = "write_record"}',
        str(small.patches / "v2.76.toml"),
        str(small.patches / "v2.77.toml"),
    ):
        assert word in str(caught.value)
    text = PATCH_OF_SMALL.replace(">=2.76,<2.77", ">=2.77,<2.78").replace("write_record", "put")
    small.patch("v2.77", text)
    assert not small.checks("2.77.1").ok
    maintain.new(small.source("2.77.1"), small.patches)
    assert small.checks("2.77.1").ok


def test_a_copy_that_still_names_the_old_release(small: Small) -> None:
    small.patch("v2.77", PATCH_OF_SMALL)
    with pytest.raises(PatchError, match=r"v2\.77\.toml .*write torch = \">=2\.77,<2\.78\""):
        maintain.new(small.source("2.77.1"), small.patches)
    assert (small.patches / "v2.77.toml").read_text() == PATCH_OF_SMALL
    small.patch("v2.77", PATCH_OF_SMALL.replace(">=2.76,<2.77", ">=2.77,<2.78"))
    maintain.new(small.source("2.77.0.dev20261101"), small.patches)  # a nightly build of it


def test_a_renamed_variable(small: Small) -> None:
    """The anchor matches, and our lines would raise a NameError at every save."""
    small.change("zip_file", "archive")
    (bad,) = small.checks("2.76.0").functions
    assert bad.anchored
    assert not bad.ok
    assert "zip_file" in (bad.problem or "")
    with pytest.raises(PatchError, match=r"_save: .* name zip_file, .*v2\.76\.toml"):
        maintain.new(small.source("2.77.0"), small.patches)
    assert not (small.patches / "v2.77.toml").exists()


@pytest.mark.parametrize(
    ("insert", "missing"),
    [
        ("use(obj)", "use"),
        ("obj = obj2", "obj2"),
        ("zip_files += 1", "zip_files"),
        ("archive = 1", "archive"),  # what torch reads has another name by now
        ("print(depth)", "depth"),  # known in `inner` only
        ("[part.size for _fastserial_x in obj if part in parts]", "parts"),
        ("def _fastserial_f(a):\n    return a, b", "b"),
        ("if (", "no valid Python"),
        ("print(LAST)", "no valid Python"),  # before torch says that it is global
        ("len(obj); sizes; index; part; inner; COUNT; io; _save; ValueError", None),
        ("obj.nothing(nothing=1).more", None),  # attributes and keywords are no names
        ("list({one: two for one, two in obj} or (three for three in obj))", None),
        ("sorted(obj, key=lambda one: one)", None),
        ("if (_fastserial_x := obj):\n    print(_fastserial_x)", None),
        ("import os.path as _fastserial\n_fastserial.join(obj)", None),
        ("try:\n    pass\nexcept OSError as _fastserial_e:\n    print(_fastserial_e)", None),
    ],
)
def test_names_that_inserted_lines_use(insert: str, missing: str | None) -> None:
    at = Anchor("start") if "LAST" in insert else Anchor("before", Match("For"))
    edits = (
        Edit(Anchor("start"), "_fastserial_first = 1"),
        Edit(at, insert),
        Edit(Anchor("before", Match("Return")), "print(_fastserial_first, error, LAST)"),
    )
    found = build.unknown_names(SMALL, FunctionPatch("m", "_save", {}, edits))
    if missing is None:
        assert found is None
    else:
        assert re.match(f"the inserted lines (name {missing}, which|are {missing})", found or "")


def test_a_nested_function_knows_those_around_it() -> None:
    anchor = Anchor("start", inside=(Match("FunctionDef", name="inner"),))

    def verdict(insert: str) -> str | None:
        return build.unknown_names(SMALL, FunctionPatch("m", "_save", {}, (Edit(anchor, insert),)))

    assert verdict("print(depth, obj, COUNT)") is None
    assert "deep" in (verdict("print(deep)") or "")


# --- the command line ------------------------------------------------------------------------


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(patches_app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_cli(torch_copy: Path, tmp_path: Path) -> None:
    name = maintain.check(maintain.open_torch()).patch
    code, output = invoke("list", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(output)["patches"] if row["used"]] == [name]
    assert "*" in invoke("list")[1]

    assert invoke("show")[1] == (patch_file.patches_dir() / f"{name}.toml").read_text()
    assert (
        "+    from fastserial.patching import save_hooks"
        in invoke("show", "--diff", "--torch", torch_copy)[1]
    )
    code, output = invoke("show", "v0.1")
    assert code == 2
    assert "there is no patch v0.1" in output

    code, output = invoke("check", "--json")
    assert code == 0
    assert json.loads(output)["ok"] is True
    other = "v2.6" if name != "v2.6" else "v2.15"
    code, output = invoke("check", "--torch", torch_copy, "--patch", other)
    assert code == 1
    assert "does NOT apply" in output

    code, output = invoke("build", tmp_path / "out", "--json")
    assert code == 0
    assert all(Path(path).is_file() for path in json.loads(output))

    folder = tmp_path / "patches"
    shutil.copytree(patch_file.patches_dir(), folder)
    code, output = invoke(
        "new", "--torch", torch_copy, "--torch-version", "3.1.0", "--folder", folder
    )
    assert (code, output.strip()) == (0, str(folder / "v3.1.toml"))
    assert "folder" in invoke("new", "--torch", tmp_path / "nothing")[1]
