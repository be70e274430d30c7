"""Correct on every file system, and the report names what it had to do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mounts import Lab, need
from proofs import Proof
from states import check, listing
from victims import Zygote

pytestmark = [pytest.mark.timeout(600), pytest.mark.proof("file systems")]

_BYTES = 320 << 20
_JOBS: list[dict[str, Any]] = [
    {"zipped": True, "nbytes": 12 << 20},
    {"zipped": False, "nbytes": 9_000_001},
    {"zipped": True, "nbytes": 4000},
    {"zipped": True, "nbytes": 5_000_000, "named": True},
    {"zipped": False, "nbytes": 5_000_000, "options": {"direct": False}},
    {"zipped": True, "nbytes": 3_000_000, "options": {"durable": False}},
]


def save_and_check(folder: Path, zygote: Zygote, proof: Proof, kind: str) -> list[dict[str, Any]]:
    """Save in every way, twice each, and return the reports."""
    reports = []
    path = folder / "x.pt"
    for number, job in enumerate(_JOBS):
        victim = zygote.start(path, 10 * number + 1, 2, report=True, **job)
        assert victim.wait() == 0, (kind, job, victim.lines())
        assert check(path) == 10 * number + 2
        assert listing(folder) == ["x.pt"], (kind, job)
        reports.append(victim.report())
        assert reports[-1]["bytes"] == path.stat().st_size
    proof.count(kind, 2 * len(_JOBS))
    return reports


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_block_devices(kind: str, sector: int, lab: Lab, zygote: Zygote, proof: Proof) -> None:
    need(f"mkfs.{kind}", "losetup")
    name = kind if sector == 512 else f"{kind} on {sector}-byte blocks"
    reports = save_and_check(lab.make(kind, _BYTES, sector=sector), zygote, proof, name)
    assert [report["direct"] for report in reports] == [
        True, True, False, True, False, True,
    ]  # fmt: skip
    assert all(report["fallback"] is None for report in reports)


def test_tmpfs(lab: Lab, zygote: Zygote, proof: Proof) -> None:
    need()
    save_and_check(lab.mount("none", "tmpfs", "size=200m"), zygote, proof, "tmpfs")


@pytest.mark.parametrize("lower_kind", ["same", "other"])
def test_overlayfs(lower_kind: str, lab: Lab, zygote: Zygote, proof: Proof) -> None:
    """The file that is replaced comes from below; with another file system there, too."""
    need("mkfs.ext4", "losetup")
    disk = lab.make("ext4", _BYTES)
    lower = disk / "lower"
    if lower_kind == "other":
        lower = lab.mount("none", "tmpfs", "size=100m")
    upper, work = disk / "upper", disk / "work"
    for folder in (lower, upper, work):
        folder.mkdir(exist_ok=True)
    assert zygote.start(lower / "x.pt", 5, 1, nbytes=2_000_000).wait() == 0
    old = (lower / "x.pt").read_bytes()
    merged = lab.mount(
        "none", "overlay", f"lowerdir={lower}", f"upperdir={upper}", f"workdir={work}"
    )
    assert check(merged / "x.pt") == 5
    reports = save_and_check(merged, zygote, proof, f"overlayfs ({lower_kind} file system below)")
    assert all(report["durable"] for report in reports[:5]), "written by torch itself"
    assert (lower / "x.pt").read_bytes() == old


@pytest.mark.parametrize(
    ("option", "fallback"),
    [
        ("--no-direct", "direct I/O refused: Invalid argument"),
        ("--short=10000", None),
        ("--no-dirsync", "the file system cannot sync a directory"),
    ],
)
def test_fuse_without(
    option: str, fallback: str | None, lab: Lab, zygote: Zygote, proof: Proof
) -> None:
    """No direct I/O; writes that take 10,000 bytes at a time; no sync of a directory."""
    need("fusermount")
    pytest.importorskip("fuse", reason="needs fusepy (pip install fusepy) and libfuse2")
    below = lab.folder / "below"
    below.mkdir()
    reports = save_and_check(lab.mirror(below, option), zygote, proof, f"FUSE {option}")
    assert reports[0]["fallback"] == fallback
    assert reports[0]["direct"] is (option != "--no-direct")
    assert (lab.folder / "below.short").exists() is option.startswith("--short")


def test_a_mounted_over_file(tmp_path: Path, lab: Lab, zygote: Zygote) -> None:
    """A bind-mounted file cannot be replaced, only overwritten: torch does that."""
    need()
    other = tmp_path / "other.pt"
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "x.pt"
    for file in (other, path):
        file.write_bytes(b"old")
    lab.bind(other, path)
    assert zygote.start(path, 1, 1, nbytes=1_000_000).wait() == 0
    assert check(path) == 1
    assert check(other) == 1
    assert listing(folder) == ["x.pt"]
