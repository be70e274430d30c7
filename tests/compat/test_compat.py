"""Write with A, read with B: a stock torch and this tree, in processes of their own.

``FASTSERIAL_STOCK_PYTHON`` is the interpreter of the stock torch (it needs numpy, too); it may
have another release of torch or Python than this one, which is the default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
STOCK = os.environ.get("FASTSERIAL_STOCK_PYTHON", sys.executable)
# The stock side gets no path to this tree's packages: it must not even be able to install them.
SIDES = {
    "stock": (STOCK, ""),
    "fast": (sys.executable, os.pathsep.join(filter(None, sys.path))),
    "stock here": (sys.executable, ""),  # the torch of "fast", without it
}


def run(side: str, folder: Path, what: str) -> dict[str, Any]:
    """Run `side.py`."""
    python, path = SIDES[side]
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FASTSERIAL"))
    }
    if path:
        environment["PYTHONPATH"] = path
    else:
        environment["FASTSERIAL_IDENTITY_STOCK_ONLY"] = "1"
    command = [python, "-W", "ignore", str(HERE / "side.py"), str(folder), side, what]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("writer", "reader"), [("fast", "stock"), ("stock", "fast")])
def test_write_and_read(writer: str, reader: str, tmp_path: Path) -> None:
    """All values arrive, in both formats, also through a mapping."""
    written = run(writer, tmp_path, "write")
    found = run(reader, tmp_path, "read")
    assert len(written["values"]) > 40
    wrong = {
        name: value
        for name, value in found["values"].items()
        if value != written["values"][name.removesuffix(" mapped")]
    }
    assert not wrong, f"written by torch {written['torch']}, read by {found['torch']}"
    assert {name for name in found["values"] if "mapped" not in name} == set(written["values"])


@pytest.mark.parametrize(("writer", "reader"), [("fast", "stock"), ("stock", "fast")])
def test_folders_of_shards(writer: str, reader: str, tmp_path: Path) -> None:
    """All values arrive, unless stock torch cannot pass them from the one release to the other."""
    for folder in ("mixed", "stock"):
        (tmp_path / folder).mkdir()
    written = run(writer, tmp_path / "mixed", "save")
    if sys.executable != STOCK:
        stocks = [side.replace("fast", "stock here") for side in (writer, reader)]
        run(stocks[0], tmp_path / "stock", "save")
        try:
            run(stocks[1], tmp_path / "stock", "load")
        except AssertionError as error:
            # `.metadata` of newer releases has strides, which 2.6 does not understand
            if "too many values to unpack" not in str(error):
                raise
            return
    found = run(reader, tmp_path / "mixed", "load")
    assert len(written["values"]) > 20
    assert found["values"] == written["values"], (written["torch"], found["torch"])
