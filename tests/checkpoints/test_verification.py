"""`verify` finds what is wrong, names it, and finds nothing wrong with what torch wrote."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import checkpoint, hostile, rewritten
from support.corpus import Case, name_of, saveable, without_crc
from support.damage import bad_sectors
from support.identity import saver, stock_bytes
from typer.testing import CliRunner

from fastserial import convert, load, load_into
from fastserial.checkpoints import load as checkpoints_load
from fastserial.checkpoints import verify as checkpoints_verify
from fastserial.checkpoints.verify import VerifyReport, verify
from fastserial.checkpoints.verify import zip as verify_zip_module
from fastserial.cli.main import app
from fastserial.config import Config
from fastserial.errors import CheckpointFileError, ConvertError, CorruptCheckpointError
from fastserial.files.linux import cached_fraction
from fastserial.formats.source import BytesSource, DescriptorSource, Source
from fastserial.formats.zip_format import RecordEntry, read_directory

# Small blocks, so that every seam between blocks is crossed.
SMALL = Config(block_size=4096, queue_depth=3, threads=2)
STATE = {"a": torch.arange(50), "b": [torch.ones(7)], "c": torch.zeros(0)}

# What stock torch writes and cannot read: broken, and rightly reported.
BROKEN_BY_TORCH = {
    "alignment_131072.zip",  # the padding's length overflows
    "storage_resized_odd.legacy",  # not a whole number of elements
    "storage_resized_among_others.legacy",
    "storage_resized_smaller.legacy",
    "storage_resized_to_zero.legacy",
}


ZIP = stock_bytes(STATE)
LEGACY = stock_bytes(STATE, "legacy")


def check(path: Path, data: bytes) -> VerifyReport:
    path.write_bytes(data)
    return verify(path, SMALL)


def entries(source: Source) -> dict[str, RecordEntry]:
    return {record.name: record for record in read_directory(source).records}


@pytest.mark.parametrize(("case", "fmt"), saveable(loads=False), ids=name_of)
def test_what_stock_torch_writes_is_whole(case: Case, fmt: str, tmp_path: Path) -> None:
    path, name = tmp_path / f"{fmt}.pt", f"{case.name}.{fmt}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saver(case, fmt, case.build())(path)
    report = verify(path, SMALL)
    expected = "damaged" if name in BROKEN_BY_TORCH else "ok"
    if name == "protocol_0.legacy":  # persistent ids are mere text
        expected = "unreadable"
    assert report.status == expected, report
    assert report.format == fmt


# -- damage --------------------------------------------------------------------------------------


def test_every_changed_byte_of_a_zip_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    unseen: list[int] = []
    for at in range(len(ZIP)):
        data = bytearray(ZIP)
        data[at] ^= 1 << at % 8
        if check(path, data).ok:
            unseen.append(at)
    assert unseen == []


@pytest.mark.parametrize("data", [ZIP, LEGACY], ids=["zip", "legacy"])
def test_truncation_is_found(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pt"
    assert [n for n in range(0, len(data), 5) if check(path, data[:n]).ok] == []
    assert [n for n in range(len(data) - 80, len(data)) if check(path, data[:n]).ok] == []


def test_the_damaged_record_and_its_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    big = torch.zeros(50_000)
    data = stock_bytes({"model": {"w": big, "tied": big}, "other": torch.ones(3)})
    record = entries(BytesSource(data))["data/0"]
    damaged = bytearray(data)
    damaged[record.data_offset + 123_456] ^= 4
    report = check(path, damaged)
    assert report.status == "damaged"
    (problem,) = report.problems
    assert problem.kind == "checksum"
    assert problem.record == "data/0"
    assert problem.tensors == ("model.w", "model.tied")
    assert problem.offset == record.data_offset
    assert report.checked_bytes == sum(
        r.size for r in entries(BytesSource(data)).values()
    )  # read, too


def test_records_saved_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with without_crc():
        torch.save(STATE, path)
    report = verify(path)
    assert report.ok
    assert report.unchecked == report.records - 1  # but for the empty one
    with torch.serialization.skip_data():
        torch.save(STATE, path)
    report = verify(path)
    assert report.ok
    assert report.unchecked == 2


def test_more_than_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets of 64 bits, in a file that is mostly a hole."""
    path = tmp_path / "x.pt"
    state = {"a": torch.ones(3), "big": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.ones(5)}
    with torch.serialization.skip_data():
        torch.save(state, path)
    report = verify(path)
    assert report.ok, report
    assert report.unchecked == 3
    size = path.stat().st_size
    with path.open("r+b") as file:
        header = entries(DescriptorSource(file.fileno()))["data/1"].header_offset
        for at in (header + 1, header + 50, *(size - n for n in (30, 150, 400, 700, 900))):
            before = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([before[0] ^ 2]), at)
            assert verify(path).status == "damaged", at
            os.pwrite(file.fileno(), before, at)


# -- what is not read is not called whole --------------------------------------------------------


@pytest.fixture(scope="module")
def inflating() -> bytes:
    """A checkpoint with one more record, of 257 MiB in 1 MB."""
    out = io.BytesIO(ZIP)
    with zipfile.ZipFile(out, "a") as file:
        more = bytes(257 << 20) + os.urandom(50_000)
        file.writestr("archive/more", more, zipfile.ZIP_DEFLATED, 1)
    return out.getvalue()


def test_a_large_compressed_record_is_read(tmp_path: Path, inflating: bytes) -> None:
    path = tmp_path / "x.pt"
    report = check(path, inflating)
    assert report.fully_checked, report
    assert report.checked_bytes > 257 << 20
    record = entries(BytesSource(inflating))["more"]
    damaged = bytearray(inflating)
    damaged[record.data_end - 10_000] ^= 16
    report = check(path, bytes(damaged))
    assert [(one.kind, one.record) for one in report.problems] == [("checksum", "more")]


def test_a_limit_leaves_a_record_unchecked(
    tmp_path: Path, inflating: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(inflating)
    monkeypatch.setattr(verify_zip_module, "_INFLATED", 0)
    monkeypatch.setattr(verify_zip_module, "_INFLATED_OF_ONE", 1)
    assert (verify(path).status, verify(path).unchecked) == ("unchecked", 1)
    for words, status in (([], 2), (["--quiet"], 2), (["--quiet", "--strict"], 1)):
        done = CliRunner().invoke(app, ["verify", *words, str(path)])
        assert done.exit_code == status
        assert "unchecked" in done.output
        assert "too long" in done.output
    with pytest.raises(ConvertError, match="too long"):
        convert(path, tmp_path / "t.pt")
    convert(path, tmp_path / "t.pt", verify=False)


def test_a_pickle_beyond_the_limits_leaves_its_records_unchecked(tmp_path: Path) -> None:
    """Whether the archive has all storages is not known."""
    path = tmp_path / "x.pt"
    key, deep = b"X\1\0\0\0w", b")" + b"\x85" * 300_000  # it cannot be hashed
    data = rewritten(checkpoint(), change=lambda name, body: (name, body.replace(key, deep)))
    assert check(path, data).status == "unchecked"


def test_files_without_checksums(tmp_path: Path) -> None:
    """They are whole as far as can be known; `--strict` asks for more."""
    whole, legacy, bare = (tmp_path / name for name in ("zip.pt", "legacy.pt", "bare.pt"))
    whole.write_bytes(ZIP)
    legacy.write_bytes(LEGACY)
    with without_crc():
        torch.save(STATE, bare)
    safetensors = tmp_path / "x.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    safetensors.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for path in (whole, legacy, bare, safetensors):
        report = verify(path)
        assert report.ok
        assert report.no_checksums is not report.fully_checked
        assert report.fully_checked is (path == whole)
        for words, status, shown in (
            ([], 0, True),
            (["-q"], 0, False),
            (["-q", "--strict"], int(path != whole), path != whole),
        ):
            done = CliRunner().invoke(app, ["verify", *words, str(path)])
            assert (done.exit_code, path.name in done.output) == (status, shown), (path, words)
            assert ("checksums: structure only" in done.output) is (shown and path != whole)
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert "4 checkpoints: 4 ok, 3 without checksums" in done.output


# -- hostile directories -------------------------------------------------------------------------


@pytest.mark.parametrize("name", hostile())
def test_hostile_directories(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    data = hostile()[name]
    report = check(path, data)
    assert report.status == "damaged", report
    for headers in (True, False):
        try:
            directory = read_directory(BytesSource(data), headers=headers)
        except CheckpointFileError:
            continue
        for record in directory.records:
            assert 0 <= record.data_offset <= record.data_end <= len(data)


# -- what is no damage ---------------------------------------------------------------------------


def test_what_cannot_be_checked(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (("missing", "No such file"), ("fifo", "regular"), (".", "directory")):
        for cold in (False, True):
            report = verify(tmp_path / name, cold=cold)
            assert report.status == "unreadable"
            assert any(reason in note for note in report.notes)


def test_cold_reads_what_the_device_holds(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(2_000_000)}, path)
    with path.open("rb") as file:
        fd, nbytes = file.fileno(), path.stat().st_size
        assert verify(path).ok
        assert cached_fraction(fd, 0, nbytes) in (1.0, None)
        report = verify(path, cold=True)
        if report.notes and "stays in the page cache" in report.notes[-1]:
            pytest.skip("the file system is in memory")
        assert report.ok
        assert report.checked_bytes > 16_000_000
        assert (cached_fraction(fd, 0, nbytes) or 0.0) < 0.5  # its ends were read once more


def test_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pt"
    other = stock_bytes({"a": torch.arange(50) + 1, "b": [torch.zeros(7)], "c": torch.zeros(0)})
    assert len(other) == len(ZIP)
    real = checkpoints_verify.verify_zip
    for change, status in (
        (lambda: path.write_bytes(other), "unreadable"),
        (lambda: path.write_bytes(ZIP + ZIP), "unreadable"),
        (lambda: os.utime(path, ns=(1, 1)), "ok"),
    ):
        path.write_bytes(ZIP)
        os.utime(path, ns=(2, 2))

        def slow(*args: Any, change: Any = change) -> Any:
            result = real(*args)
            change()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints_verify, "verify_zip", slow)
            report = verify(path)
        assert report.status == status
        assert any("changed" in note for note in report.notes) == (status == "unreadable")


def test_a_disk_error_is_reported_with_the_records_it_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    data = stock_bytes(
        {"a": torch.zeros(50_000), "b": torch.zeros(50_000), "c": torch.zeros(50_000)}
    )
    path.write_bytes(data)
    record = entries(BytesSource(data))["data/1"]
    bad = record.data_offset + 100_000
    bad_sectors(monkeypatch, bad)
    report = verify(path, SMALL)
    assert [(p.kind, p.record, p.tensors) for p in report.problems] == [("read", "data/1", ("b",))]


@pytest.mark.parametrize("what", ["convert", "load_into", "load"])
def test_the_file_that_was_verified_is_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file, with damage, gets its name after the check."""
    path, other = tmp_path / "source.pt", tmp_path / "other.pt"
    torch.save({"a": torch.ones(300)}, path)
    data = path.read_bytes()
    at = data.index(torch.ones(300).numpy().tobytes())
    other.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    check = checkpoints_verify._verify

    def swap(name: str, opened: int | None, config: Any) -> Any:
        report = check(name, opened, config)
        os.replace(other, path)
        return report

    monkeypatch.setattr(checkpoints_verify, "_verify", swap)
    if what == "convert":
        convert(path, tmp_path / "t.pt")
        assert torch.load(tmp_path / "t.pt")["a"].tolist() == [1.0] * 300
    elif what == "load_into":
        target = {"a": torch.zeros(300)}
        load_into(target, path, verify=True)
        assert target["a"].tolist() == [1.0] * 300
    else:
        without_patch(monkeypatch)
        assert load(path, verify=True)["a"].tolist() == [1.0] * 300


def without_patch(monkeypatch: pytest.MonkeyPatch, function: Any = None) -> None:
    """Let `load` call `function`, by default torch's, as if no patch applied."""
    monkeypatch.setattr(torch, "load", function or torch.load)
    monkeypatch.setattr(checkpoints_load, "_function", lambda: torch.load)


def test_without_a_patch_the_verified_file_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file has its path while torch loads; with `mmap=True`, too, which needs a path."""
    path, other, moved = (tmp_path / name for name in ("x.pt", "other.pt", "moved.pt"))
    torch.save({"a": torch.ones(300)}, path)
    torch.save({"a": torch.zeros(300)}, other)
    stock_load = torch.load

    def replaced(f: Any, **options: Any) -> Any:
        os.rename(path, moved)
        os.rename(other, path)
        try:
            return stock_load(f, **options)
        finally:
            os.rename(path, other)
            os.rename(moved, path)

    without_patch(monkeypatch, replaced)
    for options in ({}, {"mmap": True}):
        assert load(path, verify=True, **options)["a"].tolist() == [1.0] * 300


def test_without_a_patch_a_file_must_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stock_load = tmp_path / "x.pt", torch.load
    torch.save({"a": torch.ones(300)}, path)

    def replaced(f: Any, **options: Any) -> Any:
        found = stock_load(f, **options)
        path.write_bytes(path.read_bytes()[::-1])  # in place
        return found

    without_patch(monkeypatch, replaced)
    with pytest.raises(CorruptCheckpointError, match="changed"):
        load(path, verify=True)
