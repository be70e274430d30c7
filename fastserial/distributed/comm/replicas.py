"""Whether the copies that several ranks have of one plain tensor are equal.

Nothing in a plain tensor says that it is the same on all ranks. So every save compares a checksum
of each: of sampled bytes, or of all (option `compare`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fastserial.checksums import crc32
from fastserial.distributed.comm.exchange import as_integers
from fastserial.formats.tensors import reach
from fastserial.memory.storages import synchronize

_Key = TypeVar("_Key")  # of a tensor: its numbers, or its name
NAMED_RANKS = 11  # that an error names, and one more

# The sample: spots of the same size, the first and the last bytes among them.
_SPOTS = 8
_SPOT = 512
_SAMPLE = _SPOTS * _SPOT
_WIDEST = 16  # bytes of an element
_CHUNK = 16 * 1024 * 1024  # bytes that are brought to the host at once to be compared as a whole


class Copies(NamedTuple):
    """What is known of the copies that some ranks have of one thing.

    Attributes:
        value: of the first of them, such as a checksum or digest.
        ranks: the first ones that have this value, in order.
        others: the first ones that have another value.
    """

    value: Any
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()


def join_copies(every: Sequence[Mapping[_Key, Copies]]) -> dict[_Key, Copies]:
    """Return what is known of all copies.

    Args:
        every: what is known of those of some ranks each, in the order of the ranks.
    """
    found = dict(every[0])
    for some in every[1:]:
        for key, one in some.items():
            first = found.setdefault(key, one)
            if first is one:
                continue
            same, others = (one.ranks, one.others) if one.value == first.value else ((), one.ranks)
            found[key] = Copies(
                first.value,
                (first.ranks + same)[:NAMED_RANKS],
                (first.others + others)[:NAMED_RANKS],
            )
    return found


def differing(every: Sequence[Mapping[_Key, int]]) -> dict[_Key, list[int]]:
    """Return the tensors whose copies differ, each with the ranks that differ from the first one.

    Args:
        every: the checksums of each rank.
    """
    known = [
        {key: Copies(value, (rank,)) for key, value in sums.items()}
        for rank, sums in enumerate(every)
    ]
    return {key: list(one.others) for key, one in join_copies(known).items() if one.others}


def checksums(
    tensors: Sequence[torch.Tensor], whole: bool, tick: Callable[[], object] = lambda: None
) -> list[int]:
    """Return a checksum of each plain tensor, the same for equal elements.

    Args:
        whole: of all bytes, not of sampled ones.
        tick: called after each tensor.
    """
    found = [0] * len(tensors)
    spots: dict[torch.device, dict[int, torch.Tensor]] = {}
    storages = [one.untyped_storage() for one in tensors if not one.is_cpu]
    if storages:
        synchronize(storages)
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            nbytes = 0 if tensor._is_zerotensor() else tensor.nbytes
            if tensor.is_cpu and tensor.is_contiguous():
                before = tensor.storage_offset() * tensor.element_size()
                if nbytes and before + nbytes <= tensor.untyped_storage().nbytes():
                    found[number] = _of_memory(tensor.data_ptr(), nbytes, whole)
            elif nbytes and _has_memory(tensor) and whole:
                found[number] = _of_elements(tensor)
            elif nbytes and _has_memory(tensor):
                spots.setdefault(tensor.device, {})[number] = _sampled(tensor)
            tick()
        for some in spots.values():  # one copy to the host for each device
            host = torch.cat(list(some.values())).cpu()
            for (number, _), part in zip(
                some.items(), torch.split(host, [one.numel() for one in some.values()]), strict=True
            ):
                found[number] = _of_memory(part.data_ptr(), part.numel(), True)
    return found


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether all elements lie in memory: a storage may have been resized."""
    end = int(tensor.storage_offset()) + reach(tensor.shape, tensor.stride())
    return end * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _spots(nbytes: int) -> list[int]:
    """Return where the spots in `nbytes` bytes begin: between elements of any size."""
    step = (nbytes - _SPOT) // (_SPOTS - 1) // _WIDEST * _WIDEST
    return [*range(0, (_SPOTS - 1) * step, step), nbytes - _SPOT]


def _of_memory(address: int, nbytes: int, whole: bool) -> int:
    """Return the checksum of host memory."""
    if whole:
        return crc32((ctypes.c_char * nbytes).from_address(address))
    if nbytes <= _SAMPLE:
        return crc32(ctypes.string_at(address, nbytes))
    return crc32(b"".join([ctypes.string_at(address + at, _SPOT) for at in _spots(nbytes)]))


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same sample as bytes, where the tensor is."""
    integers, item = as_integers(tensor), tensor.element_size()
    if tensor.nbytes <= _SAMPLE:
        return integers.contiguous().view(-1).view(torch.uint8)
    firsts = _spots(tensor.nbytes)
    if integers.is_contiguous():
        memory = integers.view(-1).view(torch.uint8)
        return torch.cat([memory[first : first + _SPOT] for first in firsts])
    spot = torch.arange(_SPOT // item, device="cpu")
    indices = torch.cat([spot + first // item for first in firsts])
    at = [one.to(tensor.device) for one in torch.unravel_index(indices, tensor.shape)]
    return integers[tuple(at)].view(torch.uint8)


def _of_elements(tensor: torch.Tensor) -> int:
    """Return the checksum of all elements, brought to the host in bounded parts."""
    integers = as_integers(tensor).unsqueeze(0) if not tensor.dim() else as_integers(tensor)
    rows = max(1, _CHUNK * integers.shape[0] // tensor.nbytes)
    checksum = 0
    for part in torch.split(integers, rows):
        host = part.contiguous().cpu()
        checksum = crc32((ctypes.c_char * host.nbytes).from_address(host.data_ptr()), checksum)
    return checksum
