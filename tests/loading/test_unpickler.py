"""torch's weights-only unpickler and ours: the same objects, the same refusals."""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mutated_pickles
from support.identity import digest, stock
from torch import _weights_only_unpickler as torchs
from torch import nn

import fastserial
from fastserial.loading import unpickler
from fastserial.loading.unpickler import WeightsOnlyUnpickler, unpickler_module

PLAIN = {
    "tensors": lambda: {f"layer.{i}": torch.arange(i, i + 6.0).view(2, 3) for i in range(9)},
    "module": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict(),
    "parameter": lambda: [nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)],
    "tied": lambda: (lambda t: {"a": t, "b": t, "c": t[1:]})(torch.arange(8.0)),
    "numbers": lambda: {"i": [0, 255, 65_536, -1, 1 << 70, -(1 << 300)], "f": (1.5, float("inf")),
                        "n": None, "b": [True, False], 3: {"": []}},
    "strings": lambda: ["ü" * 300, "\ud800", "x" * 70_000],
    "dtypes": lambda: [torch.bfloat16, torch.Size([2, 3])],
    "many": lambda: {i: (i, str(i), [i]) for i in range(2_000)},
    "halves": lambda: [torch.ones(3, dtype=d) for d in (torch.half, torch.bfloat16, torch.bool)],
}  # fmt: skip


class _Saved:
    """The pickle of an archive, and how torch makes its storages."""

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        reader = torch._C.PyTorchFileReader(file)
        self.data = reader.get_record("data.pkl")
        self.records = {
            name: reader.get_record(f"data/{name}")
            for name in (r.partition("/")[2] for r in reader.get_all_records() if "data/" in r)
            if name.isdigit()
        }

    def load(self, kind: Any, data: bytes | None = None) -> Any:
        unpickler = kind(io.BytesIO(self.data if data is None else data), encoding="utf-8")
        storages: dict[str, Any] = {}

        def load_storage(pid: Any) -> Any:
            storage_type, key = pid[1], pid[2]
            if key not in storages:
                untyped = torch.UntypedStorage(list(self.records[key]))
                storages[key] = torch.storage.TypedStorage(
                    wrap_storage=untyped,
                    dtype=getattr(storage_type, "dtype", torch.uint8),
                    _internal=True,
                )
            return storages[key]

        unpickler.persistent_load = load_storage
        return unpickler.load()


@pytest.fixture
def without_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> Any:
        raise AssertionError("torch's own unpickler was asked")

    monkeypatch.setattr(torchs.Unpickler, "load", refuse)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_pickles_are_read_in_c(name: str, request: pytest.FixtureRequest) -> None:
    value = PLAIN[name]()
    saved = _Saved(value)
    torch_s = saved.load(torchs.Unpickler)
    request.getfixturevalue("without_torchs")
    ours = saved.load(WeightsOnlyUnpickler)
    assert type(ours) is type(torch_s)
    assert digest(ours) == digest(torch_s) == digest(value)
    if isinstance(ours, OrderedDict):
        assert vars(ours) == vars(torch_s)
        assert "_metadata" in vars(ours)


def _form(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """All but what is in tensors: a mutant's may be larger than what was saved of them."""
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, torch.Tensor):
        place = value.shape, value.stride(), value.storage_offset()
        return type(value), value.dtype, *place, value.requires_grad
    if isinstance(value, dict):
        items = [(_form(key, seen), _form(item, seen)) for key, item in value.items()]
        return type(value), items, sorted(getattr(value, "__dict__", ()), key=str)
    if isinstance(value, list | tuple):
        return type(value), [_form(item, seen) for item in value]
    if isinstance(value, str | int | float):
        return type(value), str(value)
    return "callable" if callable(value) else type(value)  # ours has a name of its own


def _outcome(saved: _Saved, kind: Any, data: bytes) -> tuple[Any, ...]:
    try:
        return "loaded", _form(saved.load(kind, data))
    except (Exception, RecursionError) as error:
        return "refused", type(error), re.sub("0x[0-9a-f]+", "0x", str(error))


HOSTILE = {
    "system": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "eval": b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.",
    "getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "protocol 4": pickle.dumps([1, 2], 4),
    "protocol 0": pickle.dumps([1, 2], 0),
    "cut short": b"\x80\x02}q",
    "cut in a string": b"\x80\x02X\xff\xff\xff\xffabc",
    "cut in a long": b"\x80\x02\x8a\x09\x01.",
    "a call of a string": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "a call of a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
    "an item of a tuple": b"\x80\x02)K\x01K\x02s.",
    "an unhashable key": b"\x80\x02}]K\x01s.",
    "a number as persistent id": b"\x80\x02K\x01Q.",
    "another persistent id": b"\x80\x02X\x06\x00\x00\x00module\x85Q.",
    "a function's attribute": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}K\x02K\x01sb.",
    "a type's attribute": b"\x80\x02ccollections\nOrderedDict\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
    "not utf-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "an item set in a list": b"\x80\x02]K\x01aK\x00K\x02s.",
    "items set in a list": b"\x80\x02](K\x01K\x01e(K\x00K\x02u.",
    "no items set in a number": b"\x80\x02K\x01(u.",
    "no items added to a number": b"\x80\x02K\x01(e.",
    "no items added to a dictionary": b"\x80\x02}(e.",
    "an odd number of items": b"\x80\x02}(K\x01u.",
    "items behind a mark": b"\x80\x02}((K\x01K\x02u.",
    "items of a state's `extend`": (
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x06\x00\x00\x00extendctorch\nSize\nsb(K\x01e."
    ),
    "an item of a state's `append`": (
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x06\x00\x00\x00appendctorch\nSize\nsb]a."
    ),
    "bytes as persistent id": b"\x80\x02C\x01uQ.",
    "a change as persistent id": b"\x80\x02}K\x01K\x02\x86X\x01\x00\x00\x00u\x87Q.",
}  # fmt: skip

STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQ"
)
LONGS = STORAGE.replace(b"Float", b"Long").replace(b"\x000X", b"\x001X")


def _view(storage: bytes, size: bytes, stride: bytes) -> bytes:
    arguments = b"K\x00" + size + b"\x85" + stride + b"\x85\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments + b"tR"


TENSOR = _view(STORAGE, b"K\x03", b"K\x01")
HUGE = _view(LONGS, b"\x8a\x05\x00\x00\x00\x00\x10", b"K\x00")  # 2 ** 36 times one element
ATTRIBUTE = b"}X\x01\x00\x00\x00xK\x01s"
LEFT_TO_TORCH = {
    "a device, which can be called": b"ctorch\ndevice\nX\x03\x00\x00\x00cpu\x85R",
    "a long size": b"ctorch\nSize\n](" + b"K\x01" * 2000 + b"e\x85R",
    "a dictionary of a list": b"ccollections\nOrderedDict\n]K\x01K\x02\x86a\x85R",
    "a class": b"ccollections\nOrderedDict\n",
    "a function": b"]ctorch._utils\n_rebuild_tensor_v2\na",
    "a storage's attribute": STORAGE + ATTRIBUTE + b"b",
    "a tensor's state": TENSOR + ATTRIBUTE + b"b",
    "an item of a tensor": TENSOR + HUGE + b"G" + bytes(8) + b"s",
    "items of a tensor": TENSOR + b"(" + HUGE + b"G" + bytes(8) + b"u",
    "an item of a storage": STORAGE + b"K\x00G" + bytes(8) + b"s",
}  # fmt: skip


# Older releases set items in any object; in one of 2^36 elements for a minute. They also read past
# the end of a record that is smaller than the pickle says, where we call the file damaged.
SETS_ITEMS_IN_ANYTHING = not hasattr(torchs.Unpickler, "_check_set_item_target")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [*HOSTILE, *LEFT_TO_TORCH])
def test_what_torch_refuses_is_refused_in_its_words(name: str) -> None:
    """What ours leaves to torch's has its outcome, too."""
    if SETS_ITEMS_IN_ANYTHING and "item" in name:
        pytest.skip("this torch sets items in any object")
    saved = _Saved([torch.ones(3), torch.zeros(3, dtype=torch.long)])
    data = HOSTILE.get(name) or b"\x80\x02" + LEFT_TO_TORCH[name] + b"."
    theirs = _outcome(saved, torchs.Unpickler, data)
    assert _outcome(saved, WeightsOnlyUnpickler, data) == theirs
    assert theirs[0] == "refused" or name in LEFT_TO_TORCH


def test_all_pickles_can_be_left_to_torch(tmp_path: Any, without_torchs: None) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with fastserial.options(fast_unpickler=False):
        assert unpickler_module(torchs) is torchs
        with pytest.raises(AssertionError, match="torch's own"):
            fastserial.load(tmp_path / "a.pt")
    assert fastserial.load(tmp_path / "a.pt")["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("error", [OSError(5, "no such luck"), KeyboardInterrupt()])
def test_an_error_of_a_storage_is_passed_on_and_not_tried_again(error: BaseException) -> None:
    saved = _Saved({"a": torch.ones(3), "b": torch.ones(4)})
    asked = []

    def fail(pid: Any) -> Any:
        asked.append(pid[2])
        raise error

    unpickler = WeightsOnlyUnpickler(io.BytesIO(saved.data), encoding="utf-8")
    unpickler.persistent_load = fail  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        unpickler.load()
    assert asked == ["0"]


def _python_would(target: Any, items: Any) -> None:
    """What Python's unpickler does with items: any object takes them that can."""
    for at in range(0, len(items), 2):
        target[items[at]] = items[at + 1]


@pytest.mark.slow
@pytest.mark.skipif(SETS_ITEMS_IN_ANYTHING, reason="this torch sets items in any object")
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "control"])
def test_mutated_pickles_load_as_with_torch(
    is_guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`support/mutated_pickles.py` compares 100,000 of them. In the control some differ."""
    if not is_guarded:
        for opcode in (b"s", b"u"):
            monkeypatch.setitem(unpickler._CHANGES, opcode, _python_would)
    with stock():
        found = [mutated_pickles.compare(tmp_path / "a.pt", seed) for seed in range(500, 1000)]
    differences = [difference for _, difference in found if difference is not None]
    assert bool(differences) != is_guarded, differences
    assert sum(outcome == "loaded" for outcome, _ in found) > 20  # or nothing was tested
