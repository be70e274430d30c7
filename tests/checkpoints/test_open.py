"""fastserial.open: single tensors and parts of them, equal to what torch.load gives."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.archives import checkpoint, rewritten
from support.corpus import MIB, Case, name_of, noise, saveable
from support.identity import saver, stock
from support.nests import differing, flat

import fastserial
from fastserial.checkpoints import tensor_read
from fastserial.checkpoints.lazy import LazyCheckpoint, open_checkpoint
from fastserial.config import Config
from fastserial.errors import (
    CheckpointKeyError,
    CorruptCheckpointError,
    FastserialError,
    UnreadableTensorError,
)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not differing(one, other)


@pytest.fixture(autouse=True)
def _stock() -> Iterator[None]:
    """All files are written by stock torch."""
    with stock():
        yield


def test_scattered_parts_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that only large tensors take; small ones: `test_properties`."""
    monkeypatch.setattr(tensor_read, "SCATTERED_CHUNK", 50_000)
    monkeypatch.setattr(tensor_read, "CONTIGUOUS_RUN", 2000)
    path = tmp_path / "f.pt"
    tensor = torch.randn(30, 40, 500)
    torch.save({"x": tensor, "t": tensor.permute(1, 2, 0), "odd": tensor[:, 3:9, ::7]}, path)
    with open_checkpoint(path) as file:
        for key, whole in torch.load(path).items():
            sliced = file.get_slice(key)
            assert same(file.get_tensor(key), whole)
            for index in (
                (slice(None), slice(None), 3),
                (slice(None), slice(2, 5)),
                (slice(3, 29, 5), slice(None), slice(0, 2)),
                (Ellipsis, slice(1, None, 3)),
                (slice(None), 2),
            ):
                assert same(sliced[index], whole[index]), (key, index)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"x": noise(40 * MIB).view(40, -1), "y": noise(5 * MIB)}, path)
    with open_checkpoint(path) as file:
        before = bytes_read()
        file.get_slice("x")[7]
        assert bytes_read() - before < MIB + 64 * 1024
        file.get_slice("x")[3:5, 10:20]
        assert bytes_read() - before < 3 * MIB


def bytes_read() -> int:
    """By system calls of this process."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(("case", "fmt"), saveable(), ids=name_of)
def test_corpus(case: Case, fmt: str, tmp_path: Path) -> None:
    """Whatever torch.load makes of a file, a tensor is that or refused."""
    path = tmp_path / "f.pt"
    with stock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saver(case, fmt, case.build())(path)
        want = flat(torch.load(path, weights_only=False))
    try:
        file = open_checkpoint(path)
    except FastserialError as error:
        pytest.skip(str(error))
    with file:
        for key, tensor in want.items():
            if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
                continue
            try:
                found = file.get_tensor(key)
            except (UnreadableTensorError, CheckpointKeyError):
                lazy = tensor.is_conj() or tensor.is_neg()
                odd = tensor.is_quantized or tensor.is_meta or tensor.is_nested
                assert lazy or odd or "." in key, key
                continue
            assert same(found, tensor), key


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it, but only once per process
        quantized = torch.quantize_per_tensor(torch.randn(9), 0.1, 0, torch.qint8)
    torch.save({"x": torch.ones(9), "q": quantized, "m": torch.empty(3, device="meta")}, path)
    file = open_checkpoint(path)
    assert file.container == "zip"
    with pytest.raises(KeyError, match="no tensor 'y'"):
        file.get_tensor("y")
    for key in ("q", "m"):
        with pytest.raises(UnreadableTensorError, match=repr(key)):
            file.get_tensor(key)
    sliced = file.get_slice("x")
    for bad in (torch.tensor([1]), [1, 2], True, "a"):
        with pytest.raises(TypeError):
            sliced[bad]
    with pytest.raises(IndexError):
        sliced[9]
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.get_tensor("x")
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(OSError, match="regular"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("fmt", ["zip", "legacy"])
def test_a_file_that_is_touched(fmt: str, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    want = {"x": noise(90_000), "y": noise(300)}
    torch.save(want, path, _use_new_zipfile_serialization=fmt == "zip")
    with open_checkpoint(path) as file:
        for when in (1, 2):
            os.utime(path, (when, when))
            for key, value in want.items():
                assert torch.equal(file.get_tensor(key), value)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="changed"):
            file.get_tensor("x")


def test_in_a_forked_child(tmp_path: Path) -> None:
    """As in the workers of a DataLoader whose dataset has the file open."""
    path = tmp_path / "f.pt"
    want = {str(i): noise(200_000 + i) for i in range(3)}
    torch.save(want, path)
    with LazyCheckpoint(path, config=Config(small_file=250_000)) as file:
        assert same(file.get_tensor("0"), want["0"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
            child = os.fork()
        if not child:
            signal.alarm(30)
            torch.set_num_threads(1)  # as those workers do: OpenMP does not survive a fork
            equal = False
            with contextlib.suppress(BaseException):
                equal = all(same(file.get_tensor(key), want[key]) for key in ("1", "2"))
            os._exit(0 if equal else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert same(file.get_tensor("1"), want["1"])


def test_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the spawned workers of a DataLoader, wherever those run."""
    want = noise(50_000)
    torch.save({"x": want}, tmp_path / "f.pt")
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("f.pt") as file:
        text = pickle.dumps((file, file.get_slice("x")))
    monkeypatch.chdir("/")
    again, part = pickle.loads(text)
    assert same(again.get_tensor("x"), want)
    assert same(part[10:20], want[10:20])
    os.unlink(tmp_path / "f.pt")
    with pytest.raises(FileNotFoundError):
        pickle.loads(text)
    again.close()


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "f.safetensors"
    want = {"a": torch.randn(30, 7), "b": torch.arange(9), "c": torch.empty(0), "d": noise(5)}
    safetensors.save_file(want, path, metadata={"format": "pt"})
    with open_checkpoint(path) as file:
        assert file.container == "safetensors"
        assert sorted(file.keys()) == sorted(want)
        for key, tensor in want.items():
            assert same(file.get_tensor(key), tensor)
        assert same(file.get_slice("a")[3:9, 2:], want["a"][3:9, 2:])
        assert file.get_slice("a").get_dtype() == "F32"
    target = {key: torch.zeros_like(tensor) for key, tensor in want.items()}
    fastserial.load_into(target, path)
    assert not differing(target, want)
    found = fastserial.inspect(path)
    assert found.format == "safetensors"
    for shown in found.tensors:
        at, tensor = found.offset_of(shown), want[shown.key]
        assert at is not None
        assert path.read_bytes()[at : at + shown.nbytes] == tensor.numpy().tobytes()
    data = path.read_bytes()
    for broken in (
        data[:-1],
        data[:5],
        data + b"x",
        b"\xff" * 8 + data[8:],
        data[:8] + b"[" + data[9:],
    ):
        path.write_bytes(broken)
        with pytest.raises(CorruptCheckpointError, match=r"f\.safetensors"):
            open_checkpoint(path)
        with pytest.raises(CorruptCheckpointError):
            fastserial.inspect(path)


def test_dtypes_of_a_later_torch(tmp_path: Path) -> None:
    """Their tensors do not vanish: they are listed, and refused when they are asked for."""
    value = {"a": torch.ones(3), "later": torch.ones(4, dtype=torch.uint16)}

    def change(name: str, body: bytes) -> tuple[str, bytes]:
        return name, body.replace(b"uint16", b"uint99")

    path = tmp_path / "a.pt"
    path.write_bytes(rewritten(checkpoint(value), change=change))
    with fastserial.open(path) as file:
        assert sorted(file.keys()) == ["a", "later"]
        assert "later" in file
        assert torch.equal(file.get_tensor("a"), value["a"])
        for ask in (file.get_tensor, file.get_slice):
            with pytest.raises(UnreadableTensorError, match=r"'later' .* dtype, uint99"):
                ask("later")
    assert "uint99" in fastserial.inspect(path).notes[0]
    assert fastserial.verify(path).ok
