"""The second tier of a `Checkpointer`: its checkpoints, copied to a remote folder.

In the remote folder a checkpoint is its file, under the same name, and a manifest, `NAME.json`,
with the file's size and CRC-32. The manifest is written last and removed first: a checkpoint
without one does not exist, so that none is ever seen half-written.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from fastserial.checksums import crc32, crc_mismatch
from fastserial.errors import CorruptCheckpointError, RemoteError
from fastserial.files.remote import remote_folder
from fastserial.interrupts import Locked, ours
from fastserial.saving.writer import FastFileWriter
from fastserial.training.folder import CheckpointFolder, Retention

_CHUNK = 8 * 1024 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries of an upload
_log = logging.getLogger("fastserial")
_mirrors: weakref.WeakSet[Mirror] = weakref.WeakSet()


class Mirror:
    """Uploads checkpoints on a thread, and downloads what the local folder lacks."""

    def __init__(
        self,
        url: str,
        folder: CheckpointFolder,
        retention: Retention,
        bandwidth: float | None,
        timeout: float,
    ) -> None:
        """Connect a local folder and a remote one; no request is made yet.

        Args:
            retention: which checkpoints stay in the remote folder.
            bandwidth: most bytes per second that uploads may take; None: no bound.
            timeout: for so many seconds an upload that fails is tried again.

        Raises:
            ConfigError: the URL cannot be opened.
        """
        self._remote = remote_folder(url, timeout, create=True)
        self._folder = folder
        self._retention = retention
        self._bandwidth = bandwidth
        self._timeout = timeout
        self._lock = threading.RLock()  # a signal handler may save, too
        self._waiting: dict[int, Mapping[str, float]] = {}
        self._newest: int | None = None  # the highest step that this process has uploaded
        self._failed: dict[int, Exception] = {}
        self._thread: threading.Thread | None = None
        self._caught_up = False
        self._manifests: dict[int, dict[str, Any]] = {}
        _mirrors.add(self)

    # -- uploads ---------------------------------------------------------------------------------

    def is_waiting(self, step: int) -> bool:
        """Return whether a checkpoint is still to be uploaded."""
        return step in self._waiting

    def add(self, step: int, metrics: Mapping[str, float], uploaded: Callable[[], object]) -> None:
        """Upload a checkpoint of the local folder in the background, newer ones first.

        The first call also uploads what an earlier process, which was killed, left to be uploaded.
        Call it on a thread that no signal handler interrupts.

        Args:
            step, metrics: of the checkpoint.
            uploaded: called on the uploading thread after each upload.
        """
        with Locked(self._lock):
            self._waiting[step] = metrics
            if self._thread is None or not self._thread.is_alive():  # in a forked child it is not
                thread = threading.Thread(
                    target=self._run, args=(uploaded,), name="fastserial-mirror"
                )
                self._thread = thread
                thread.start()

    def close(self) -> None:
        """Wait until nothing is left to be uploaded.

        Raises:
            Exception: why the newest checkpoint could not be uploaded. It is in the local folder.
        """
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()
        failed, self._failed = self._failed, {}
        if failed and max(failed) > (-1 if self._newest is None else self._newest):
            raise failed[max(failed)]

    def _run(self, uploaded: Callable[[], object]) -> None:
        if not self._caught_up:
            self._caught_up = True
            self._catch_up()
        while True:
            with Locked(self._lock):
                if not self._waiting:
                    self._thread = None
                    return
                step = max(self._waiting)
                metrics = self._waiting[step]
            try:
                if self._is_wanted(step, metrics):
                    self._upload_within_timeout(step, metrics)
                self._failed.pop(step, None)
            except ours(FileNotFoundError):
                pass  # it was removed meanwhile
            except ours(Exception) as error:
                self._failed[step] = error
                _log.error("step %d of %s is not mirrored: %s", step, self._folder.path, error)
            with Locked(self._lock):
                if self._waiting[step] is metrics:  # else it was saved anew meanwhile
                    del self._waiting[step]
            uploaded()

    def _catch_up(self) -> None:
        try:
            there = set(self.steps())
        except ours(RemoteError) as error:
            _log.warning("checkpoints of earlier processes are not mirrored: %s", error)
            return
        for step in self._folder.steps():
            if step not in there and self._folder.is_complete(step):
                with Locked(self._lock):
                    self._waiting.setdefault(step, {})

    def _is_wanted(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a rule keeps a checkpoint, of which a newer one is mirrored by now.

        Raises:
            Exception: as `_prune`.
        """
        if self._newest is None or step > self._newest:
            return True
        written = self._folder.written_at(step) or 0.0
        mine = {step: {"written": written, "metrics": metrics}}
        return step not in self._surplus({step, *self.steps()}, mine)

    def _upload_within_timeout(self, step: int, metrics: Mapping[str, float]) -> None:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while True:
            try:
                self._prune(self._upload(step, metrics))
                return
            except ours(RemoteError):
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _upload(self, step: int, metrics: Mapping[str, float]) -> dict[str, int]:
        """Copy a file, check its size there, and write its manifest.

        Returns:
            The sizes of all objects in the remote folder.

        Raises:
            FileNotFoundError: the file is gone.
            RemoteError: the store failed.
        """
        name = self._folder.name(step)
        with open(self._folder.file(step), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            checksums: list[int] = []
            self._remote.remove([_manifest_name(name)])
            self._manifests.pop(step, None)
            self._remote.put(name, self._read(file.fileno(), checksums), status.st_size)
        sizes = self._remote.sizes()
        if sizes.get(name) != status.st_size:
            text = f"{name} has {sizes.get(name)} of {status.st_size} bytes"
            raise RemoteError(f"{self._remote.url}: {text}")
        manifest = {
            "version": 1,
            "step": step,
            "nbytes": status.st_size,
            "crc32": checksums[-1],
            "written": status.st_mtime,
            "metrics": dict(metrics),
        }
        data = json.dumps(manifest).encode()
        self._remote.put(_manifest_name(name), [data], len(data))
        self._manifests[step] = manifest
        self._newest = step if self._newest is None else max(step, self._newest)
        return {**sizes, _manifest_name(name): len(data)}

    def _read(self, fd: int, checksums: list[int]) -> Iterator[bytes]:
        """Yield a file's bytes at no more than the bandwidth; append their CRC-32 at the end."""
        began, offset, checksum = time.monotonic(), 0, 0
        while data := os.pread(fd, _CHUNK, offset):
            checksum = crc32(data, checksum)
            yield data
            os.posix_fadvise(fd, offset, len(data), os.POSIX_FADV_DONTNEED)
            offset += len(data)
            if self._bandwidth is not None:
                time.sleep(max(0.0, began + offset / self._bandwidth - time.monotonic()))
        checksums.append(checksum)

    def _prune(self, sizes: Mapping[str, int]) -> None:
        """Remove what no rule keeps, manifests first.

        A file without a manifest may be the user's, and stays.

        Args:
            sizes: of all objects in the remote folder.

        Raises:
            CorruptCheckpointError: a manifest that the rules need is damaged.
            RemoteError: the store failed.
        """
        surplus = self._surplus(self._steps_in(sizes))
        names = [self._folder.name(step) for step in surplus]
        self._remote.remove(map(_manifest_name, names))
        self._remote.remove(names)

    def _surplus(
        self, steps: Collection[int], added: Mapping[int, Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the steps that no rule keeps. Those after the newest are another run's.

        Args:
            added: what manifests will say of steps that are not in the remote folder yet.

        Raises:
            Exception: as `_prune`.
        """

        def manifest(step: int) -> Mapping[str, Any]:
            found = (added or {}).get(step)
            return self._manifest(step) if found is None else found

        def age(step: int) -> float:
            return time.time() - float(manifest(step)["written"])

        def value(step: int) -> float | None:
            best = self._retention.best
            return None if best is None else manifest(step)["metrics"].get(best[0])

        mine = [step for step in steps if self._newest is None or step <= self._newest]
        return self._retention.surplus(sorted(mine, reverse=True), (), age, value)

    def _manifest(self, step: int) -> dict[str, Any]:
        """Return a checkpoint's manifest.

        Raises:
            FileNotFoundError: there is none.
            CorruptCheckpointError: it is damaged.
            RemoteError: the store failed.
        """
        if step not in self._manifests:
            name = _manifest_name(self._folder.name(step))
            try:
                found = json.loads(b"".join(self._remote.chunks(name)))
                usable = isinstance(found, dict) and found["version"] == 1
                usable = usable and {"nbytes", "crc32", "written", "metrics"} <= found.keys()
            except ours(ValueError, KeyError):
                usable = False
            if not usable:
                raise CorruptCheckpointError("no manifest", path=f"{self._remote.url}/{name}")
            self._manifests[step] = found
        return self._manifests[step]

    # -- downloads -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in the remote folder, the last one first.

        Raises:
            RemoteError: the store failed.
        """
        return self._steps_in(self._remote.sizes())

    def _steps_in(self, sizes: Mapping[str, int]) -> list[int]:
        found = ((name, self._folder.step_of(name)) for name in sizes)
        steps = [one for name, one in found if one is not None and _manifest_name(name) in sizes]
        return sorted(steps, reverse=True)

    def fetch(self, step: int) -> None:
        """Download a checkpoint into the local folder, which has it whole or not at all.

        Raises:
            FileNotFoundError: the remote folder has no checkpoint of this step.
            CorruptCheckpointError: its bytes are not those that were uploaded.
            RemoteError: the store failed.
            WriteError: the local file cannot be written.
        """
        self._manifests.pop(step, None)
        manifest = self._manifest(step)
        name = self._folder.name(step)
        os.makedirs(self._folder.path, exist_ok=True)
        checksum = nbytes = 0
        with FastFileWriter(self._folder.file(step)) as file:
            for data in self._remote.chunks(name):
                checksum, nbytes = crc32(data, checksum), nbytes + len(data)
                file.write(data)
            problem = crc_mismatch(checksum, manifest["crc32"])
            if nbytes != manifest["nbytes"]:
                problem = f"it has {nbytes} bytes, not {manifest['nbytes']}"
            if problem is not None:
                raise CorruptCheckpointError(problem, path=f"{self._remote.url}/{name}")


def _in_child() -> None:
    """Renew locks: the thread that may have held one does not exist in a forked child."""
    for mirror in _mirrors:
        mirror._lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def _manifest_name(name: str) -> str:
    return f"{name}.json"
