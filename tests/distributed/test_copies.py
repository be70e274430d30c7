"""Checksums of the copies that ranks have of a tensor, without ranks."""

from __future__ import annotations

import pytest
import torch

from fastserial.distributed.comm.replicas import checksums


@pytest.mark.parametrize("rows", [3, 100_000])
@pytest.mark.parametrize("whole", [False, True])
def test_equal_elements_are_equal_however_they_lie_in_memory(rows: int, whole: bool) -> None:
    base = torch.arange(2.0 * rows).reshape(rows, 2)
    views = [base[:, 1], base.T, base[:1].expand(rows, 2), base[0, :1].expand(rows), base[:, :1]]
    alike = checksums([view.clone(memory_format=torch.contiguous_format) for view in views], whole)
    assert checksums(views, whole) == alike
    assert len(set(alike)) == len(views)
