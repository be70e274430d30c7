"""What travels, as runs of memory and as views: each way gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastserial.distributed.ranks.exchange import (
    Exchange,
    held_in_box,
    held_in_range,
    packed,
)
from fastserial.distributed.ranks.group import traffic_of
from fastserial.distributed.sharding.boxes import Box, within

SHAPE = (6, 8)
WHOLE = Box((0, 0), SHAPE)


def _plain(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(48).reshape(SHAPE).to(dtype)


def _in_columns(dtype: torch.dtype) -> torch.Tensor:
    return _plain(dtype).t().contiguous().t()


def _negated(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with a bit set that says that its elements are to be negated."""
    return torch._neg_view(_plain(dtype))


def _moved(tensor: torch.Tensor, box: Box, first: int, stop: int) -> torch.Tensor:
    """Return the elements [first, stop) of the whole, as far as the tensor has them, else 99."""
    target = torch.full((stop - first,), 99).to(tensor.dtype)
    found = list(within(SHAPE, box, first, stop))
    bytes_ = target.view(torch.uint8)
    sends = [held_in_box(tensor, box, part) for part in found]
    receives = [held_in_range(bytes_, target.dtype, SHAPE, first, part) for part in found]
    assert packed(sends) == packed(receives)
    Exchange(traffic_of(None, 10.0)).move({0: sends}, {0: receives})
    return target


def _expected(tensor: torch.Tensor, box: Box, first: int, stop: int) -> torch.Tensor:
    whole = torch.full(SHAPE, 99).to(tensor.dtype)
    whole[box.slices(WHOLE)] = tensor.resolve_neg().resolve_conj()
    return whole.flatten()[first:stop]


@pytest.mark.parametrize("make", [_plain, _in_columns, _negated])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "box", [WHOLE, Box((2, 0), (3, 8)), Box((0, 3), (6, 2)), Box((1, 2), (4, 5))], ids=str
)
def test_elements_come_as_they_are(
    make: Callable[[torch.dtype], torch.Tensor], dtype: torch.dtype, box: Box
) -> None:
    tensor = make(dtype)[box.slices(WHOLE)]
    for first, stop in [(0, 48), (5, 43), (17, 18), (8, 24)]:
        found = _moved(tensor, box, first, stop)
        assert torch.equal(found, _expected(tensor, box, first, stop))


def test_conjugated_elements_come_as_they_are() -> None:
    tensor = torch.complex(torch.arange(48.0), torch.ones(48)).reshape(SHAPE).conj()
    assert torch.equal(_moved(tensor, WHOLE, 3, 40), tensor.flatten()[3:40])
