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
    """Change `_save`, but no anchor."""
    path = folder / "torch/serialization.py"
    text = path.read_text()
    changed = text.replace('write_record("byteorder"', 'write_record( "byteorder"')
    assert changed != text
    path.write_text(changed)


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


def test_a_torch_without_the_anchor_does_not_check(torch_copy: Path) -> None:
    path = torch_copy / "torch/serialization.py"
    path.write_text(path.read_text().replace(".write_record(name, storage", ".put(name, storage"))
    source = maintain.open_torch(torch_copy)
    bad = [one for one in maintain.check(source).functions if not one.ok]
    assert [(one.function, one.anchored) for one in bad] == [("torch.serialization._save", False)]
    with pytest.raises(PatchError, match="0 statements"):
        maintain.new(source)


def test_an_anchor_written_by_hand(torch_copy: Path, tmp_path: Path) -> None:
    """As CONTRIBUTING.md says: `new` names both files, and adds the hashes to a copy without."""
    folder = tmp_path / "patches"
    shutil.copytree(patch_file.patches_dir(), folder)
    path = torch_copy / "torch/serialization.py"
    path.write_text(path.read_text().replace(".write_record(name, storage", ".put(name, storage"))
    source = maintain.open_torch(torch_copy, "2.77.1")
    base = patch_file.load_patches(folder)[0]
    with pytest.raises(PatchError) as caught:
        maintain.new(source, folder)
    place = '{statement = "For", calls = "write_record", last = true}'
    for word in (place, str(folder / f"{base.name}.toml"), str(folder / "v2.77.toml")):
        assert word in str(caught.value)
    text = maintain.render(base).replace(base.torch, ">=2.77,<2.78")
    lines = text.replace(place[1:], place[1:].replace("write_record", "put")).splitlines(True)
    kept = [line for line in lines if not line.startswith(("sha256", "built_sha256"))]
    (folder / "v2.77.toml").write_text("".join(kept))
    assert not maintain.check(source, patches=patch_file.load_patches(folder)).ok
    maintain.new(source, folder)
    assert maintain.check(source, patches=patch_file.load_patches(folder)).ok


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
    path = torch_copy / "torch/serialization.py"
    path.write_text(
        path.read_text().replace('write_record("byteorder"', 'write_record( "byteorder"')
    )
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
    path = torch_copy / "torch/serialization.py"
    path.write_text(
        path.read_text().replace('write_record("byteorder"', 'write_record( "byteorder"')
    )
    maintain.new(maintain.open_torch(torch_copy), folder)
    patches = patch_file.load_patches(folder)
    assert maintain.check(source, patches=patches).ok
    assert maintain.check(maintain.open_torch(torch_copy), patches=patches).ok
    assert max(len(function.hashes) for patch in patches for function in patch.functions) == 2


def test_new_wants_to_know_the_version(torch_copy: Path) -> None:
    (torch_copy / "torch/version.py").unlink()
    with pytest.raises(PatchError, match="version"):
        maintain.new(maintain.open_torch(torch_copy))


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
