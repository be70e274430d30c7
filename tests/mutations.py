"""Faults put into the package one at a time: do the tests of the room find them?

    python tests/mutations.py [WORD ...]

runs those whose number, file or name contains a word, or all of them (half an hour), in a copy of
the tree, and prints the table of docs/internals/testing.md. A fault whose line is not in the
source any more is listed as such: put it where its code went, or remove it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# What a fault is tried on, the quick ones first; not the corpus, which takes minutes.
TESTS = {
    "saving": """saving/test_extent_writer.py saving/test_writer.py saving/test_route.py
        memory/test_device_transfers.py saving/test_identity.py::test_durable
        files/test_replacement.py test_properties.py""",
    "loading": """loading/test_reader.py loading/test_prefetch.py loading/test_load_damaged.py
        loading/test_load_forms.py loading/test_load_files.py
        memory/test_device_transfers.py""",
    "distributed": """distributed/test_partition.py distributed/test_copies.py
        distributed/test_shared_file.py distributed/test_dcp_storage.py distributed/test_targets.py
        distributed/test_distributed_save.py""",
    "checksums.py": """saving/test_extent_writer.py saving/test_incremental.py
        distributed/test_targets.py""",
}


class Fault(NamedTuple):
    """In `file` of the package `old`, which is there once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


# fmt: off
FAULTS = [
    Fault("a short write counts as whole", "saving/extent_writer.py", "if completion.transferred == request.length:", "if True:"),  # noqa: E501
    Fault("what direct I/O leaves is not written", "saving/extent_writer.py", "if request.length < block.length:", "if request.length > block.length:"),  # noqa: E501
    Fault("a refused block is not written again", "saving/extent_writer.py", "        self._write_cached(request.view, request.offset)", "        pass"),  # noqa: E501
    Fault("the last block is not queued", "saving/extent_writer.py", "        self._dispatch()\n        self._drain()", "        self._drain()"),  # noqa: E501
    Fault("nothing waits for the writes", "saving/extent_writer.py", "while queue is not None and queue.is_busy:", "while False:"),  # noqa: E501
    Fault("a failed save fails no ledger", "saving/extent_writer.py", "self._ledger.fail()  #", "pass  #"),  # noqa: E501
    Fault("a gap in the file ends no block", "saving/extent_writer.py", "if offset != self._block_end:", "if False:"),  # noqa: E501
    Fault("the CRC-32 begins anew in each chunk", "saving/fill.py", "crc = crc32(view[done : done + size], crc)", "crc = crc32(view[done : done + size])"),  # noqa: E501
    Fault("the CRC-32 is entered at byte 0", "saving/fill.py", "ledger.add(record, start, length, crc)", "ledger.add(record, 0, length, crc)"),  # noqa: E501
    Fault("a block without an engine is written at byte 0", "saving/extent_writer.py", "self._write_cached(view, offset)", "self._write_cached(view, 0)"),  # noqa: E501
    Fault("the file is not synced", "saving/writer.py", "            self._run(\"sync\", self._destination.sync)", "            pass"),  # noqa: E501
    Fault("the file object is left where it was", "saving/writer.py", "self._destination.file.seek(self._destination.start + self._written)", "pass"),  # noqa: E501
    Fault("a forked child discards its parent's file", "saving/writer.py", "if os.getpid() != self._pid:", "if False:"),  # noqa: E501
    Fault("a short read counts as whole", "loading/pump.py", "while moved < block.length:", "while False:"),  # noqa: E501
    Fault("any error is taken for refused direct I/O", "loading/pump.py", "refused = isinstance(error, OSError) and error.errno == errno.EINVAL", "refused = True"),  # noqa: E501
    Fault("a read too few is waited for", "loading/pump.py", "        while self.in_flight:\n            self.reap()", "        while self.in_flight > 1:\n            self.reap()"),  # noqa: E501
    Fault("a direct read begins a block late", "loading/reader.py", "start = near[0].offset - near[0].offset % alignment", "start = near[0].offset + -near[0].offset % alignment"),  # noqa: E501
    Fault("runs are joined over large holes", "loading/reader.py", "at - end > NEAR_EXTENTS", "at - end > 2**40"),  # noqa: E501
    Fault("a part forgets where its sink begins", "loading/reader.py", "self.start + first - self.offset)", "self.start)"),  # noqa: E501
    Fault("memory is taken without a bound", "loading/prefetch.py", "elif self._held + group.nbytes > LOOK_AHEAD:", "elif False:"),  # noqa: E501
    Fault("a group is there with its first block", "loading/prefetch.py", "self.left = (self.left or 0) - 1", "self.left = 0"),  # noqa: E501
    Fault("damage found while reading ahead is kept silent", "loading/prefetch.py", "if isinstance(self.error, CorruptCheckpointError):\n                    raise", "if False:\n                    raise"),  # noqa: E501
    Fault("a block goes to a rank twice", "distributed/save/partition.py", "if begin != seen and (record.offset % GRAIN or end == begin):", "if record.offset % GRAIN or end == begin:"),  # noqa: E501
    Fault("a move goes to another place of its tile", "distributed/save/partition.py", "found.pieces[piece] = at + piece.offset - first", "found.pieces[piece] = at"),  # noqa: E501
    Fault("the tiles of a slab end elsewhere", "distributed/save/partition.py", "end = first + min(high, low + (tile + 1) * record.tile - done)", "end = first + high"),  # noqa: E501
    Fault("another rank's file is not compared", "distributed/save/shared_file.py", "if (found.st_ino, found.st_size) != (identity.inode, identity.nbytes):", "if False:"),  # noqa: E501
    Fault("another rank does not sync", "distributed/save/shared_file.py", "        synced(self.fd)", "        pass"),  # noqa: E501
    Fault("copies are not compared", "distributed/comm/replicas.py", "if first.setdefault(leaf, checksum) != checksum:", "if first.setdefault(leaf, checksum) is None:"),  # noqa: E501
    Fault("CRC-32s are combined with a wrong length", "checksums.py", "crc32_combine(crc, piece.crc, piece.length)", "crc32_combine(crc, piece.crc, piece.length - 1)"),  # noqa: E501
    Fault("an older shard file stays", "distributed/dcp/storage_writer.py", "        folder.sweep(self._alone)\n\n    def storage_meta", "\n    def storage_meta"),  # noqa: E501
]
# fmt: on


def found_by(fault: Fault, tree: Path) -> str:
    """Return the test that finds a fault, or what is said instead of its name."""
    source = tree / "fastserial" / fault.file
    text = source.read_text() if source.exists() else ""
    if text.count(fault.old) != 1:
        return "(its line is not there any more)"
    source.write_text(text.replace(fault.old, fault.new))
    tests = [f"tests/{name}" for name in TESTS[fault.file.partition("/")[0]].split()]
    words = ["-m", "pytest", "-x", "-q", "--timeout=120", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True, check=False
        )
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED tests/", "ERROR tests/")):
                return f"`{line.split()[1].removeprefix('tests/')}`"
        if done.returncode != 0:
            return f"a test run that ended with {done.returncode}"
    finally:
        source.write_text(text)
    return "**no test**"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fastserial-faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".nox", "dist"))
        print("| | Fault | Where | Found by |\n|---|---|---|---|")
        for number, fault in enumerate(FAULTS, 1):
            if not sys.argv[1:] or any(f"{number} {fault}".count(word) for word in sys.argv[1:]):
                row = number, fault.name, f"`{fault.file}`", found_by(fault, tree)
                print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
