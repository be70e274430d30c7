"""Frameworks' own tests of their checkpoints, with stock torch and with fastserial installed.

What passes with stock has to pass here. The tests are not in the frameworks' wheels, nor in this
repository: `nox -s frameworks` takes them from the source distributions of the installed versions,
which `FASTSERIAL_SDISTS` names the folder of. Their files are small, and torch loads small files
itself; `FASTSERIAL_SMALL_FILE=0` makes it ours.
"""

from __future__ import annotations

import json
import os
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.processes import python

HERE = Path(__file__).resolve().parent
SDISTS = os.environ.get("FASTSERIAL_SDISTS")
# Of each source distribution, the tests that save and load, and which of them (`-k`).
SUITES = {
    "accelerate": ("tests/test_state_checkpointing.py", ""),
    "pytorch_ignite": ("tests/ignite/handlers/test_checkpoint.py", "not distrib"),
    "skorch": ("skorch/tests/callbacks/test_training.py", "Checkpoint or load or save"),
    "skorch-net": ("skorch/tests/test_net.py", "load or save or pickle or checkpoint"),
}
# What looks at what stock leaves where a save fails.
KNOWN = {
    "tests.ignite.handlers.test_checkpoint::test_disk_saver_atomic": (
        "asserts that a failed save leaves a torn file"
    ),
}


def unpacked(name: str, folder: Path) -> Path:
    """Unpack a source distribution and return its folder."""
    (archive,) = Path(SDISTS or "").glob(f"{name.partition('-')[0]}-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def outcomes(root: Path, suite: str, log: Path, ours: bool) -> dict[str, str]:
    """Run a suite; return how each of its tests ended."""
    file, words = SUITES[suite]
    report = log.with_suffix(".xml")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "FASTSERIAL": str(int(ours)),
        "FASTSERIAL_SMALL_FILE": "0",
        "FASTSERIAL_SUITE_LOG": str(log) if ours else "",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    flags = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "count_calls"]
    where = [f"--rootdir={root}", f"--junitxml={report}", "--timeout=300", file]
    chosen = ["-k", words] if words else []
    done = python(
        "-m", "pytest", *flags, *where, *chosen,
        code=None, variables=variables, cwd=root, timeout=1500,
    )  # fmt: skip
    assert report.exists(), done.out[-3000:]
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        text = "".join((child.text or "")[-3000:] for child in case if child.tag in kinds)
        found[f"{case.get('classname')}::{case.get('name')}"] = (
            " ".join(sorted(kinds)) + text if kinds else "passed"
        )
    return found


@pytest.mark.skipif(SDISTS is None, reason="FASTSERIAL_SDISTS names no folder")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES)
def test_what_passes_with_stock_passes_with_ours(suite: str, tmp_path: Path) -> None:
    root = unpacked(suite, tmp_path / "source")
    stock = outcomes(root, suite, tmp_path / "stock", False)
    ours = outcomes(root, suite, tmp_path / "ours", True)
    used = json.loads((tmp_path / "ours").read_text(encoding="utf-8"))
    passed = sorted(name for name, outcome in stock.items() if outcome == "passed")
    print(f"{suite}: {len(passed)} of {len(stock)} pass with stock; ours: {used}")
    assert used["saves"] > 3
    assert used["loads"] > 3
    failed = {name: ours.get(name, "missing") for name in passed if ours.get(name) != "passed"}
    new = {name: how for name, how in failed.items() if name not in KNOWN}
    print(f"known to differ: {sorted(failed.keys() - new.keys())}")
    assert not new, "\n".join(f"{name}: {how}" for name, how in new.items())
