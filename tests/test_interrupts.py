"""Signal handlers, interrupts and the end of the interpreter: no hang, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import run

from fastserial.interrupts import finish


@pytest.mark.parametrize("what", ["save", "load", "half"])
def test_while_the_interpreter_shuts_down(what: str, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    if what == "load":
        torch.save({str(i): torch.full((100_000,), float(i)) for i in range(10)}, path)
    ended = run("at_exit", path, what, "fast", code=1, timeout=100)
    assert "the trainer lives on" in ended.err
    if what == "half":  # what its threads had begun is lost; that is told
        assert "shutting down" in ended.err or path.read_bytes() == bytes(2_000_000)
        return
    assert ended.out == "done\n", ended.err
    if what == "save":
        again = tmp_path / "stock" / "f.pt"
        again.parent.mkdir()
        assert run("at_exit", again, what, "stock", code=1).out == "done\n"
        assert len(torch.load(path)) == 10
        assert path.read_bytes() == again.read_bytes()


def test_clean_up_goes_on_where_it_was_interrupted() -> None:
    done: list[int] = []
    interrupts = [KeyboardInterrupt("first"), OSError("second"), None, KeyboardInterrupt("third")]

    def step() -> None:
        error = interrupts.pop(0) if interrupts else None
        if error is not None:
            raise error
        done.append(1)

    with pytest.raises(KeyboardInterrupt, match="first"):
        finish(step, step, lambda: done.append(2))
    assert done == [1, 1, 2]
