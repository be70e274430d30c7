"""Says why the other tests of this folder are not run, where they are not."""

from __future__ import annotations

import pytest

from fastserial.engines.deepspeed.aio_op import load_op, missing


def test_deepspeed_is_there() -> None:
    lacks = missing()
    if lacks:
        pytest.skip("; ".join(lacks))
    assert load_op().aio_handle
