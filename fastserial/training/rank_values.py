"""The values that each rank has of its own: random generators, and the user's `per_rank` entries.

They are packed into bytes. A file has one tensor of bytes with a row for each rank, so ranks may
have different entries, and the layout of the file does not change while the size of a row stays.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from math import prod
from typing import Any

import torch
from torch import _weights_only_unpickler

from fastserial.interrupts import ours
from fastserial.memory.storages import bytes_at

_LENGTH = 8  # bytes of the length of the pickle, which a row begins with
_UNIT = 4096  # the size of a row is a multiple (bytes): it stays when a count grows
_MERSENNE = "MT19937"  # NumPy's global generator, unless a program sets another one


class _RowPickler(pickle.Pickler):
    """Pickles values as torch does, with the bytes of tensors behind the pickle."""

    def __init__(self, file: io.BytesIO, with_tensors: bool) -> None:
        super().__init__(file, protocol=2)
        self._with_tensors = with_tensors
        self.data = bytearray()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        if not self._with_tensors:
            return ("storage", "uint8", (0,), 0)
        tensor, offset = obj.detach().cpu().contiguous(), len(self.data)
        if tensor.nbytes:
            self.data += bytes_at(tensor.data_ptr(), tensor.nbytes)
        return ("storage", str(tensor.dtype).partition(".")[2], tuple(tensor.shape), offset)


def packed(value: Any, *, with_tensors: bool = True) -> bytes:
    """Return plain values and tensors as bytes; see `unpacked`.

    Args:
        with_tensors: False: empty ones replace them.

    Raises:
        Exception: it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _RowPickler(file, with_tensors)
    pickler.dump(value)
    text = file.getvalue()
    data = len(text).to_bytes(_LENGTH, "little") + text + pickler.data
    return data + bytes(-len(data) % _UNIT)


def row_of(data: bytes, nbytes: int) -> torch.Tensor:
    """Return the result of `packed` as a tensor, padded to `nbytes` bytes."""
    return torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)


def unpacked(data: bytes, *, weights_only: bool) -> Any:
    """Return what was packed.

    Raises:
        UnpicklingError: it holds what `weights_only` refuses.
    """
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    tensors = data[start:]

    def tensor_of(name: tuple[str, str, tuple[int, ...], int]) -> torch.Tensor:
        _, dtype, shape, offset = name
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        if made.nbytes:
            part = bytearray(tensors[offset : offset + made.nbytes])
            made = torch.frombuffer(part, dtype=made.dtype, count=prod(shape)).reshape(shape)
        return made

    file = io.BytesIO(data[_LENGTH:start])
    kind: Any = _weights_only_unpickler.Unpickler if weights_only else pickle.Unpickler
    unpickler = kind(file, encoding="utf-8")
    unpickler.persistent_load = tensor_of
    return unpickler.load()


def refusal_of(value: Any) -> Exception | None:
    """Return why `weights_only` refuses to load a value; None, too, if it cannot be pickled."""
    try:
        data = packed(value, with_tensors=False)
    except ours(Exception):  # the save raises it
        return None
    try:
        unpacked(data, weights_only=True)
    except ours(Exception) as error:
        return error
    return None


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, torch's, NumPy's and CUDA's generators.

    They are tensors, whose sizes do not change from save to save.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": torch.tensor([version, *numbers]),
        "python_gauss": _tensor_of(gauss),
        "torch": torch.get_rng_state(),
    }
    numpy: Any = sys.modules.get("numpy")
    found = None if numpy is None else numpy.random.get_state(legacy=False)
    if found is not None and found["bit_generator"] == _MERSENNE:
        keys, position = found["state"]["key"].tolist(), found["state"]["pos"]
        states["numpy"] = torch.tensor([*keys, position])
        states["numpy_gauss"] = _tensor_of(found["gauss"] if found["has_gauss"] else None)
    cuda: Any = torch.cuda
    if cuda.is_initialized():  # `is_available` could initialize it
        states["cuda"] = cuda.get_rng_state_all()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Restore the states of the generators, as far as these exist here."""
    version, *numbers = states["python"].tolist()
    random.setstate((version, tuple(numbers), _number_in(states["python_gauss"])))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        try:
            import numpy
        except ImportError:  # nothing here uses it
            pass
        else:
            *keys, position = states["numpy"].tolist()
            gauss = _number_in(states["numpy_gauss"])
            rest = position, int(gauss is not None), gauss or 0.0
            numpy.random.set_state((_MERSENNE, numpy.array(keys, dtype="uint32"), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])


def _tensor_of(number: float | None) -> torch.Tensor:
    return torch.tensor(float("nan") if number is None else number, dtype=torch.float64)


def _number_in(tensor: torch.Tensor) -> float | None:
    return None if tensor.isnan() else float(tensor)
