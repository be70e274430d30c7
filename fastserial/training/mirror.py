"""The second tier of a `Checkpointer`: its checkpoints, copied to a remote folder.

In the remote folder a checkpoint is its file, under the same name, and a manifest, `NAME.json`,
with its run, and the file's size and CRC-32. An upload begins with a manifest that has the run
only, and ends with the whole one: without that a checkpoint does not exist, so that none is ever
seen half-written, and what a killed upload left is known.

A run has an identity, which the local folder and the remote one keep in `.fastserial.run`: what
another run left in the remote folder is neither resumed nor removed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from fastserial.checksums import crc32, crc_mismatch
from fastserial.config import current
from fastserial.errors import CorruptCheckpointError, RemoteError
from fastserial.files.durable import make_folder, replace_bytes
from fastserial.files.remote import ReadAhead, RemoteSource, remote_folder
from fastserial.interrupts import Locked, ours, suppress
from fastserial.saving.writer import FastFileWriter
from fastserial.training.folder import CheckpointFolder, Retention

_CHUNK = 8 * 1024 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries of an upload
_MANIFEST = ".json"
_RUN = ".fastserial.run"
_WHOLE = {"nbytes", "crc32", "written", "metrics"}  # what the manifest of a whole checkpoint has
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
            timeout: for so many seconds an upload that fails is tried again. A request fails after
                half of it, so that other ranks still wait.

        Raises:
            ConfigError: the URL cannot be opened.
        """
        self._remote = remote_folder(url, timeout / 2, create=True)
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
        self._run: str | None = None  # the identity of the run, once it is known
        self._is_kept = False  # the local folder has it
        self._is_known = False  # the remote one, too: once it has a whole checkpoint of this run
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
                    target=self._upload_all, args=(uploaded,), name="fastserial-mirror"
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

    def _upload_all(self, uploaded: Callable[[], object]) -> None:
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
            self._own_run()
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
                sizes = self._upload(step, metrics)
                break
            except ours(RemoteError):
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            self._prune(sizes)
        except ours(RemoteError, CorruptCheckpointError) as error:  # deletes are refused
            _log.warning("old checkpoints stay in %s: %s", self._remote.url, error)

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
            known = self._manifests.get(step, {})
            if (known.get("nbytes"), known.get("written")) == (status.st_size, status.st_mtime):
                # `_catch_up` found it before it was added: what is whole there must stay so
                self._write_manifest(step, known | {"metrics": dict(metrics)})
                return self._remote.sizes()
            checksums: list[int] = []
            manifest = {"version": 1, "run": self._own_run(), "step": step}
            self._write_manifest(step, manifest)
            self._remote.put(name, self._read(file.fileno(), checksums), status.st_size)
        sizes = self._remote.sizes()
        if sizes.get(name) != status.st_size:
            text = f"{name} has {sizes.get(name)} of {status.st_size} bytes"
            raise RemoteError(f"{self._remote.url}: {text}")
        manifest |= {
            "nbytes": status.st_size,
            "crc32": checksums[-1],
            "written": status.st_mtime,
            "metrics": dict(metrics),
        }
        self._write_manifest(step, manifest)
        if not self._is_known:
            self._write(_RUN, self._own_run())
            self._is_known = True
        self._newest = step if self._newest is None else max(step, self._newest)
        return sizes

    def _write_manifest(self, step: int, manifest: Mapping[str, Any]) -> None:
        self._manifests.pop(step, None)
        self._write(_manifest_name(self._folder.name(step)), json.dumps(manifest))
        self._manifests[step] = dict(manifest)

    def _write(self, name: str, text: str) -> None:
        data = text.encode()
        self._remote.put(name, [data], len(data))

    def _own_run(self) -> str:
        """Return the identity of this run, which the local folder has from now on.

        The remote folder stays that of the run before, until it has a whole checkpoint of this one.

        Raises:
            RemoteError: the store failed.
        """
        if not self._is_kept:
            run = self._run or self._run_here() or uuid.uuid4().hex
            there = self._run_there()
            if there not in (None, run):
                _log.warning(
                    "%s holds checkpoints of another run than %s: they stay, but those of the "
                    "same steps are replaced. Give each run its own mirror",
                    self._remote.url, self._folder.path,
                )  # fmt: skip
            self._keep_run(run)
            self._is_kept = True
            self._is_known = there == run
        return str(self._run)

    def _run_here(self) -> str | None:
        try:
            with open(os.path.join(self._folder.path, _RUN), encoding="utf-8") as file:
                return file.read() or None
        except ours(OSError, ValueError):
            return None

    def _run_there(self) -> str | None:
        try:
            return self._bytes_of(_RUN).decode(errors="replace") or None
        except ours(FileNotFoundError):
            return None

    def _keep_run(self, run: str) -> None:
        self._run = run
        with suppress(OSError):  # not a part of it after a crash, which would be another run's
            replace_bytes(os.path.join(self._folder.path, _RUN), run.encode(), current().durable)

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
        """Remove what no rule keeps, and what a killed upload of this run left; manifests last.

        A file without a manifest may be the user's, and stays.

        Args:
            sizes: of all objects in the remote folder.

        Raises:
            CorruptCheckpointError: a manifest that the rules need is damaged.
            RemoteError: the store failed.
        """
        mine = [step for step in self._listed(sizes) if self._is_mine(step)]
        whole = [step for step in mine if self._is_whole(step) and self._folder.name(step) in sizes]
        kept = {*whole} - {*self._surplus(whole)}
        surplus = [step for step in mine if step not in kept]
        for step in surplus:  # another run may have replaced it since it was read
            self._manifests.pop(step, None)
        names = [self._folder.name(step) for step in surplus if self._is_mine(step)]
        self._remote.remove(names)
        self._remote.remove(map(_manifest_name, names))

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
                found = json.loads(self._bytes_of(name))
                usable = isinstance(found, dict) and found["version"] == 1
            except ours(ValueError, KeyError):
                usable = False
            if not usable:
                raise CorruptCheckpointError("no manifest", path=f"{self._remote.url}/{name}")
            self._manifests[step] = found
        return self._manifests[step]

    def _is_mine(self, step: int) -> bool:
        """Return whether a manifest is of this run, or damaged."""
        try:
            return self._run is None or self._manifest(step).get("run") == self._run
        except ours(FileNotFoundError):
            return False
        except ours(CorruptCheckpointError):
            return True

    def _is_whole(self, step: int) -> bool:
        """Return whether the upload of a checkpoint came to its end, or its manifest is damaged."""
        try:
            return self._manifest(step).keys() >= _WHOLE
        except ours(CorruptCheckpointError):
            return True

    def _bytes_of(self, name: str) -> bytes:
        found = self._object(name)
        return found.read_at(0, found.size)

    def _object(self, name: str) -> RemoteSource:
        return RemoteSource(f"{self._remote.url.rstrip('/')}/{name}", self._timeout / 2)

    # -- downloads -------------------------------------------------------------------------------

    def steps(self, alive: Callable[[], object] = bool) -> list[int]:
        """Return the steps of this run's checkpoints in the remote folder, the last one first.

        Of a local folder that has no run yet, the run is the last one that used the remote folder.

        Args:
            alive: called between requests.

        Raises:
            RemoteError: the store failed.
        """
        self._run = self._run or self._run_here() or self._run_there()
        sizes = self._remote.sizes()
        found = []
        for step in self._listed(sizes):
            alive()
            is_there = self._folder.name(step) in sizes
            if is_there and self._is_mine(step) and self._is_whole(step):
                found.append(step)
        return found

    def _listed(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the steps that have a manifest, the last one first."""
        found = (self._folder.step_of(name.removesuffix(_MANIFEST)) for name in sizes)
        steps = {step for step in found if step is not None}
        return sorted(
            (one for one in steps if _manifest_name(self._folder.name(one)) in sizes), reverse=True
        )

    def fetch(self, step: int, alive: Callable[[], object]) -> None:
        """Download a checkpoint into the local folder, which has it whole or not at all.

        Parts of it are requested at the same time.

        Args:
            alive: called about once a second.

        Raises:
            FileNotFoundError: the remote folder has no checkpoint of this step and run.
            CorruptCheckpointError: its bytes are not those that were uploaded.
            RemoteError: the store failed.
            WriteError: the local file cannot be written.
        """
        self._manifests.pop(step, None)
        self._run = self._run or self._run_here() or self._run_there()
        manifest, name = self._manifest(step), self._folder.name(step)
        if not (self._is_mine(step) and self._is_whole(step)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        make_folder(self._folder.path, current().durable)
        checksum = nbytes = 0
        with (
            FastFileWriter(self._folder.file(step)) as file,
            ReadAhead(self._object(name), alive) as there,
        ):
            while data := there.read(_CHUNK):
                checksum, nbytes = crc32(data, checksum), nbytes + len(data)
                file.write(data)
                alive()
            problem = crc_mismatch(checksum, manifest["crc32"])
            if nbytes != manifest["nbytes"]:
                problem = f"it has {nbytes} bytes, not {manifest['nbytes']}"
            if problem is not None:
                raise CorruptCheckpointError(problem, path=f"{self._remote.url}/{name}")
        if self._run_here() is None and self._run is not None:
            self._keep_run(self._run)
            _log.warning(
                "%s: step %d is downloaded from %s; a new run needs a mirror of its own",
                self._folder.path, step, self._remote.url,
            )  # fmt: skip


def _in_child() -> None:
    """Renew locks: the thread that may have held one does not exist in a forked child."""
    for mirror in _mirrors:
        mirror._lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def _manifest_name(name: str) -> str:
    return name + _MANIFEST
