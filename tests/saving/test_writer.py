"""FastFileWriter as a file, and what it promises about the file it replaces."""

from __future__ import annotations

import errno
import gc
import io
import os
import time
import weakref
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.identity import fast, stock, stock_bytes
from support.limits import file_size_limit, peak

import fastserial
from fastserial import FastFileWriter, WriteError, config, progress
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.files import destination
from fastserial.saving.archive import ZipArchive

BLOCKS = {"block_size": 64 * 1024, "queue_depth": 3, "small_file": 0, "cache": "drop"}


@pytest.mark.parametrize("seed", range(60))
def test_any_calls_in_any_order(tmp_path: Path, seed: int) -> None:
    """What is small, and what goes into blocks, changes from call to call."""
    random = Random(seed)
    way = config.current(
        block_size=random.choice([4096, 16384, 65536]),
        small_file=random.choice([0, 100_000, 300_000, 1_000_000]),
        queue_depth=random.choice([1, 3]),
        durable=False,
    )
    expected = bytearray()
    with FastFileWriter(tmp_path / "f", way) as writer:
        for _ in range(random.randint(1, 6)):
            texts = [
                random.randbytes(random.choice([0, 8, 1000, 65_536, 70_000, 200_000]))
                for _ in range(random.randint(1, 3))
            ]
            if random.random() < 0.5:
                for text in texts:
                    given = bytearray(text)
                    writer.write(given)
                    given[:] = bytes(len(given))  # it is the caller's again
                    expected += text
            else:
                made = [torch.tensor(list(text), dtype=torch.uint8) for text in texts]
                storages = [(tensor.untyped_storage(), torch.uint8) for tensor in made]
                sized = random.random() < 0.5
                counts = [len(text).to_bytes(8, "little") if sized else b"" for text in texts]
                nbytes = writer.save_torch_storage_object_list(storages, save_size=sized)
                pieces = b"".join(map(bytes.__add__, counts, texts))
                assert nbytes == len(pieces)
                expected += pieces
                for tensor in made:
                    tensor.fill_(0)  # they are the caller's again
            assert writer.tell() == len(expected)
    assert (tmp_path / "f").read_bytes() == expected


def test_a_full_disk_keeps_what_was_in_the_callers_file(tmp_path: Path) -> None:
    """Reserved space is given back."""
    path = tmp_path / "f"
    state = {"a": torch.zeros(12_000)}
    for use_zip in (True, False):
        with open(path, "wb", buffering=0) as file:
            file.write(bytes(40))
            with fast(small_file=0), file_size_limit(30_000):  # noqa: SIM117
                with pytest.raises(WriteError, match="incomplete"):
                    torch.save(state, file, _use_new_zipfile_serialization=use_zip)
        assert path.stat().st_size == 40


@pytest.mark.parametrize("use_zip", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_as_f_of_torch_save(tmp_path: Path, use_zip: bool, installed: bool) -> None:
    state = {"a": torch.randn(333, 333), "b": torch.arange(17), "c": torch.empty(0)}
    want = stock_bytes(state, "zip" if use_zip else "legacy")
    with (
        fast() if installed else stock(),
        FastFileWriter(tmp_path / "x.pt", config.current(**BLOCKS)) as writer,
    ):
        writer.write(b"head")
        torch.save(state, writer, _use_new_zipfile_serialization=use_zip)
        state["a"].zero_()
        writer.write(b"tail")
    assert (tmp_path / "x.pt").read_bytes() == b"head" + want + b"tail"


class _Unpicklable:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


@pytest.mark.parametrize("use_zip", [True, False])
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt("^C")])
def test_close_after_a_failed_save_keeps_the_old_file(
    tmp_path: Path, use_zip: bool, installed: bool, error: BaseException
) -> None:
    """DeepSpeed's way to use its writer: `try: torch.save(...) finally: writer.close()`."""
    path = tmp_path / "x.pt"
    torch.save("old", path)
    writer = FastFileWriter(path)
    with fast() if installed else stock():
        with pytest.raises(type(error), match=str(error).replace("^", r"\^")):
            try:
                state = [torch.ones(300_000), _Unpicklable(error)]
                torch.save(state, writer, _use_new_zipfile_serialization=use_zip)
            finally:
                writer.close()
        with pytest.raises(ValueError, match=r"for .*x\.pt was discarded"):
            torch.save("new", writer, _use_new_zipfile_serialization=use_zip)
        writer.close()
    assert torch.load(path) == "old"
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("use_zip", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_a_writer_works_where_another_error_is_handled(
    tmp_path: Path, use_zip: bool, installed: bool
) -> None:
    """A program may save, flush or close because of an error."""
    state = [torch.arange(10.0)]

    def flush(writer: FastFileWriter) -> None:
        writer.flush()

    def save_within() -> None:
        with FastFileWriter(tmp_path / "within") as writer:
            torch.save(state, writer, _use_new_zipfile_serialization=use_zip)

    before = FastFileWriter(tmp_path / "before")
    before.write(b"before")
    with fast() if installed else stock():
        try:
            torch.save(
                _Unpicklable(KeyError("why")),
                tmp_path / "no",
                _use_new_zipfile_serialization=use_zip,
            )
        except KeyError:
            flush(before)
            before.close()
            FastFileWriter(tmp_path / "empty").close()
            save_within()
        try:
            raise KeyError("why")
        except KeyError:
            writer = FastFileWriter(tmp_path / "failed")
            with pytest.raises(ValueError, match="no"):
                torch.save(
                    _Unpicklable(ValueError("no")), writer, _use_new_zipfile_serialization=use_zip
                )
            writer.close()
    (tmp_path / "no").unlink(missing_ok=True)  # stock's
    assert sorted(os.listdir(tmp_path)) == ["before", "empty", "within"]
    assert (tmp_path / "before").read_bytes() == b"before"
    assert (tmp_path / "empty").read_bytes() == b""
    assert (tmp_path / "within").read_bytes() == stock_bytes(state, "zip" if use_zip else "legacy")


@pytest.mark.parametrize("use_zip", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_close_after_a_swallowed_error_keeps_the_old_file(
    tmp_path: Path, use_zip: bool, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its writes a signal handler interrupts, nothing torn is committed."""
    path = tmp_path / "x.pt"
    path.write_bytes(b"old")
    calls = 0
    append, interrupted_at = FastFileWriter._append, 0

    def interrupted(writer: FastFileWriter, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        append(writer, *arguments)
        if calls == interrupted_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(FastFileWriter, "_append", interrupted)
    failed: list[type] = []
    with fast() if installed else stock():
        while path.read_bytes() == b"old":
            interrupted_at += 1
            calls = 0
            writer = FastFileWriter(path)
            try:
                torch.save([torch.ones(3)], writer, _use_new_zipfile_serialization=use_zip)
            except (KeyboardInterrupt, RuntimeError) as error:
                # torch's own writer, which then has lost its position, raises an error of its own
                failed.append(type(error if installed else error.__context__ or error))
            writer.close()
    assert failed == [KeyboardInterrupt] * (interrupted_at - 1)
    assert failed or (use_zip and installed)  # then nothing goes through `write`
    assert torch.load(path)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("old", [True, False])
def test_an_error_before_the_first_byte_keeps_the_old_file(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "x.pt"
    if old:
        path.write_bytes(b"old")
    for outer in (None, KeyError("handled when the writer is opened")):
        with pytest.raises(ZeroDivisionError):
            try:
                if outer is not None:
                    raise outer
                raise LookupError
            except LookupError:
                writer = FastFileWriter(path)
                try:
                    torch.save(1 // 0, writer)
                finally:
                    writer.close()
    assert os.listdir(tmp_path) == (["x.pt"] if old else [])
    assert not old or path.read_bytes() == b"old"


def test_a_discarded_writer_does_not_close_in_silence(tmp_path: Path) -> None:
    """Unless an error says that nothing was saved."""
    writer = FastFileWriter(tmp_path / "f")
    writer.write(b"x")
    writer.abort()
    with pytest.raises(ValueError, match="was discarded"):
        writer.flush()
    with pytest.raises(ValueError, match="was discarded"):
        writer.close()
    with pytest.raises(ValueError, match="was discarded"), FastFileWriter(tmp_path / "g") as writer:
        writer.abort()
    with pytest.raises(KeyError), FastFileWriter(tmp_path / "h") as writer:
        raise KeyError
    writer.close()
    assert os.listdir(tmp_path) == []


def test_a_forgotten_writer_saves_nothing(tmp_path: Path) -> None:
    writer = FastFileWriter(tmp_path / "f")
    writer.write(b"x")
    with pytest.warns(ResourceWarning, match="never closed"):
        del writer
        gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_leaves_the_parents_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "_can_link", lambda: False)  # the new file has a name
    path = tmp_path / "f"
    data = os.urandom(1_000_000)
    with FastFileWriter(path) as writer:
        writer.write(data)
        child = os.fork()
        if child == 0:
            writer.abort()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == data


class FailingEngine(ThreadsEngine):
    """Fails the write at an offset with an errno, or cuts it short (0); the others are real."""

    number = errno.ENOSPC
    at = 128 * 1024

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._move = self.failing

    @classmethod
    def failing(cls, request: Any) -> int:
        done = transfer(request)
        if request.offset == cls.at and cls.number:
            raise OSError(cls.number, os.strerror(cls.number))
        return done - (request.offset == cls.at)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, 0])
def test_an_error_in_a_thread_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(FailingEngine, "number", number)
    monkeypatch.setattr(
        "fastserial.saving.extent_writer.create", lambda name, threads: FailingEngine(threads)
    )
    path = tmp_path / "f"
    path.write_bytes(b"old")
    threads = len(os.listdir("/proc/self/task"))
    with pytest.raises(WriteError) as caught:  # noqa: SIM117
        with FastFileWriter(path, config.current(**BLOCKS)) as writer:
            writer.write(os.urandom(1_000_000))
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.errno == (number or errno.EIO)
    assert caught.value.filename == str(path)
    assert isinstance(caught.value.__cause__, OSError)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]
    for _ in range(200):  # until the kernel has taken leave of those that ended
        if len(os.listdir("/proc/self/task")) <= threads:
            break
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) <= threads


def test_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for target in ("/dev/null", io.BytesIO(), tmp_path, tmp_path / "fifo"):
        with pytest.raises(WriteError):
            FastFileWriter(target)


def test_report_and_callback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[fastserial.SaveReport] = []

    def broken(report: fastserial.SaveReport) -> None:
        seen.append(report)
        raise ValueError("in the callback")

    with fastserial.options(on_report=broken, **BLOCKS), FastFileWriter(tmp_path / "f") as writer:
        writer.write(os.urandom(200_000))
    assert seen == [fastserial.last_save_report()]
    report = seen[0]
    assert (report.engine, report.durable) == ("threads", True)
    assert "200KB" in str(report) or "200kB" in str(report)
    assert report.to_dict()["bandwidth"] == report.bandwidth > 0
    assert "on_report failed" in caplog.text
    assert (tmp_path / "f").stat().st_size == 200_000


def test_a_save_does_not_need_its_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its terminal may go away, as in `train.py 2>&1 | head`."""
    failed: list[str] = []

    def fail(*arguments: object, **options: object) -> None:
        failed.append("shown")
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(progress, "show_line", fail)
    (tmp_path / "f").write_bytes(b"old")
    with fast(progress=True, **BLOCKS):
        torch.save(torch.ones(5 << 20), tmp_path / "f")
    assert failed == ["shown"]
    assert torch.load(tmp_path / "f").numel() == 5 << 20


def test_a_large_pickle_is_not_copied(tmp_path: Path) -> None:
    """What is not a tensor, such as arrays, is in memory once as a pickle, not twice."""
    nbytes = 100 << 20

    def write(name: str, data: bytes) -> None:
        with ZipArchive(FastFileWriter(tmp_path / "f"), "f", owns_writer=True) as archive:
            archive.write_record(name, data, len(data))

    pickled = bytes(nbytes)
    write("warm", b"")
    assert peak(lambda: write("data.pkl", pickled)) < nbytes // 2
    assert zipfile.ZipFile(tmp_path / "f").testzip() is None


def test_peak_memory_is_the_pool(tmp_path: Path) -> None:
    """Extra memory does not grow with the checkpoint: at most the pool and a little."""
    with fast(block_size=1 << 20, queue_depth=4):
        state = {f"l{i}": torch.ones(1_000_000) for i in range(100)}  # 400 MB
        torch.save({"warm": torch.ones(10)}, tmp_path / "w.pt")
        assert peak(lambda: torch.save(state, tmp_path / "x.pt")) < 24 << 20


class Memory(bytearray):
    """Can be referred to weakly."""


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("ending", ["well", "well, small", "device", "copy", "passing error"])
def test_storages_are_free_when_a_save_is_over(
    tmp_path: Path, ending: str, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at some collection of garbage later: there may be room for one state only.

    A traceback may lead to what leads to its error: neither may keep the state.
    """
    memory = Memory(1000 if ending == "well, small" else 1_000_000)
    kept = weakref.ref(memory)
    engines = iter([FailingEngine, ThreadsEngine])
    monkeypatch.setattr(FailingEngine, "number", errno.EIO)
    if not ending.startswith("well"):
        monkeypatch.setattr(
            "fastserial.saving.extent_writer.create", lambda name, threads: next(engines)(threads)
        )
    if ending == "copy":

        def failing(data: object, crc: int = 0) -> int:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr("fastserial.saving.fill.crc32", failing)
    passes = ending == "passing error"
    monkeypatch.setattr(destination.Retries, "wait", lambda retries, error: passes)
    gc.disable()
    try:
        with fast(**({} if ending == "well, small" else BLOCKS)):
            state = {"x": torch.frombuffer(memory, dtype=torch.uint8), "y": torch.ones(3)}
            failed = False
            try:
                torch.save(state, tmp_path / "f", _use_new_zipfile_serialization=zipped)
            except WriteError:
                failed = True
        assert failed is (ending in ("device", "copy") or (passes and not zipped))
        del memory, state
        assert kept() is None
    finally:
        gc.enable()
