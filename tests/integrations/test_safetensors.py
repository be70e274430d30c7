"""`install(safetensors=True)`: safetensors' own bytes, written whole or not at all."""

from __future__ import annotations

import os
import stat
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file, save_model  # bound before `install`
from support import ranks
from support.limits import file_size_limit
from support.others import in_child
from support.processes import python

import fastserial
from fastserial import reports
from fastserial.files import temporary
from fastserial.files.temporary import temporary_name
from fastserial.formats.safetensors import split

if not hasattr(safetensors, "TensorSpec"):
    pytest.skip("safetensors is older than 0.8", allow_module_level=True)

_stock = safetensors.torch.serialize_file


@pytest.fixture
def fast() -> Iterator[Callable[[], int]]:
    """Switched on; returns how many saves went through fastserial."""
    fastserial.install(safetensors=True)
    reports.SAVES.clear()
    yield lambda: reports.SAVES.count - reports.SAVES.by_torch
    fastserial.uninstall()
    assert safetensors.torch.serialize_file is _stock


def stock(call: Callable[..., object], *arguments: Any, **named: Any) -> None:
    with fastserial.options(safetensors=False):
        call(*arguments, **named)


def tensors() -> dict[str, torch.Tensor]:
    found = {'é/\n"': torch.arange(6.0).reshape(2, 3), "large": torch.randn(3_000_000)}
    for name in (
        *("float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2"),
    ):
        dtype = getattr(torch, name)
        found[f"z.{name}"] = torch.ones(3, 5, dtype=torch.uint8).to(dtype)
        found[f"a.{name}"] = torch.ones(7, dtype=torch.uint8).to(dtype)
    found["none"] = torch.empty(0, 4)
    found["scalar"] = torch.tensor(3.5)
    return found


CASES: dict[str, tuple[dict[str, torch.Tensor], dict[str, str] | None]] = {
    "all dtypes": (tensors(), {"format": "pt"}),
    "no metadata": ({"a": torch.arange(5)}, None),
    "empty metadata": ({"a": torch.arange(5)}, {}),
    "nothing": ({}, None),
    "a name of the format": (
        {"__metadata__": torch.zeros(2), "a": torch.zeros(2)},
        {"format": "pt"},
    ),
    "text": ({"a": torch.zeros(2)}, {"\t\x01é\x7f": '"/\\'}),
    "packed": ({"a": torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, None)
    if hasattr(torch, "float4_e2m1fn_x2")
    else ({"a": torch.zeros(2)}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_same_bytes(fast: Callable[[], int], case: str, tmp_path: Path) -> None:
    saved, metadata = CASES[case]
    stock(save_file, saved, tmp_path / "stock", metadata=metadata)
    assert fast() == 0
    save_file(saved, tmp_path / "ours", metadata=metadata)
    # safetensors does these itself
    assert fast() == (case not in ("empty metadata", "a name of the format"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "stock").read_bytes()


def test_models(fast: Callable[[], int], tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    model[1].weight = model[0].weight  # tied: the metadata says so
    stock(save_model, model, tmp_path / "stock")
    save_model(model, tmp_path / "ours")
    assert fast() == 1
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "stock").read_bytes()


def test_what_safetensors_refuses(fast: Callable[[], int], tmp_path: Path) -> None:
    shared = torch.zeros(10)
    for wrong, metadata in (
        ({"a": shared, "b": shared}, None),
        ({"a": torch.zeros(4, 4).t()}, None),
        ({"a": torch.zeros(2)}, {"a": 1}),
        ({"a": torch.zeros(2)}, UserDict(a="b")),
        ({"a": torch.zeros(2)}, [("a", "b")]),
        ({"a": [1.0]}, None),
        *(({key: torch.zeros(2)}, None) for key in (1, None, True, b"a")),
    ):
        errors = []
        for path in (tmp_path / "stock", tmp_path / "ours"):
            with fastserial.options(safetensors=path.name == "ours"):
                try:
                    save_file(wrong, path, metadata=metadata)  # type: ignore[arg-type]
                except Exception as error:
                    errors.append((type(error), str(error)))
        assert errors[0] == errors[1]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_save_that_fails_leaves_what_was_there(
    fast: Callable[[], int], kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The new file is whole before a link goes; what that led to stays."""
    blob, path = tmp_path_factory.mktemp("cache") / "blob", tmp_path / "a"
    if "link" in kind:
        path.symlink_to(blob)
    if kind != "dangling link":
        stock(save_file, {"a": torch.ones(3)}, blob if kind == "link" else path)
    with file_size_limit(1 << 20), pytest.raises(fastserial.WriteError, match=str(path)):
        save_file({"a": torch.zeros(4_000_000)}, path)
    assert path.is_symlink() == ("link" in kind)
    assert kind == "dangling link" or load_file(path)["a"].tolist() == [1.0] * 3
    assert os.listdir(tmp_path) == ["a"]
    # of a process that was killed before the rename
    (tmp_path / in_child(lambda: temporary_name("a"))).touch()
    temporary._due.clear()
    save_file({"a": torch.zeros(3)}, path)
    assert load_file(path)["a"].tolist() == [0.0] * 3
    assert os.listdir(tmp_path) == ["a"]
    assert not path.is_symlink()
    assert kind != "link" or load_file(blob)["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("case", ["no metadata", "empty metadata"])  # safetensors does the latter
@pytest.mark.parametrize("kind", ["device", "pipe", "descriptor"])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_not_a_file_is_written_to_and_stays(
    fast: Callable[[], int], case: str, kind: str, linked: bool, tmp_path: Path
) -> None:
    """safetensors itself renames a file over it, as root over `/dev/null`."""
    saved, metadata = CASES[case]
    stock(save_file, saved, tmp_path / "stock", metadata=metadata)
    path, out = tmp_path / "path", os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    node = tmp_path / "node" if linked else path
    reader = threading.Thread(target=lambda: os.write(out, node.read_bytes()), daemon=True)
    if kind == "device":
        try:
            os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null is
            node.write_bytes(b"")
        except PermissionError:
            pytest.skip("devices need root, and a mount that has them")
    elif kind == "pipe":
        os.mkfifo(node)
        reader.start()
    else:
        node = Path(f"/proc/self/fd/{out}")
    if node != path:
        path.symlink_to(node)  # as /dev/stdout is
    before = path.lstat().st_mode, path.stat().st_mode
    save_file(saved, path, metadata=metadata)
    assert (path.lstat().st_mode, path.stat().st_mode) == before
    if kind == "pipe":
        reader.join()
    os.close(out)
    expected = b"" if kind == "device" else (tmp_path / "stock").read_bytes()
    assert (tmp_path / "out").read_bytes() == expected
    assert fast() == 0


def test_switched_on_by_the_environment(tmp_path: Path) -> None:
    """Before safetensors is imported."""
    program = (
        "import fastserial.auto, sys, torch, safetensors.torch as s\n"
        "s.save_file({'a': torch.zeros(3)}, sys.argv[1])\n"
        "print(fastserial.last_save_report().container)\n"
    )
    done = python("-c", program, tmp_path / "a", variables={"FASTSERIAL_SAFETENSORS": "1"})
    assert done.out.strip() == "safetensors"


def test_tensors_are_divided_as_huggingface_divides_them() -> None:
    hub = pytest.importorskip("huggingface_hub")
    sizes = [0, 30, 50, 0, 40, 200, 0, 10, 90, 0]
    for start in range(len(sizes)):
        turned = sizes[start:] + sizes[:start]
        state = {f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(turned)}
        theirs = hub.split_torch_state_dict_into_shards(
            state, filename_pattern="model{suffix}.safetensors", max_shard_size=100
        )
        ours = split({key: tensor.numel() for key, tensor in state.items()}, 100)
        found = {name: sorted(keys) for name, keys in theirs.filename_to_tensors.items()}
        assert {name: sorted(keys) for name, keys in ours.items()} == found


def test_a_model_of_many_ranks_loads_by_from_pretrained(tmp_path: Path) -> None:
    """FSDP2 and tensor parallelism on four ranks: the files of `save_pretrained`, equal logits."""
    pytest.importorskip("transformers")
    if torch.__version__.startswith("2.6."):
        pytest.skip("transformers 5 needs a newer torch")
    assert ranks.run("ranks_pretrained", 4, tmp_path, timeout=300)[0].endswith("ok\n")
