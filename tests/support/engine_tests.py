"""The conformance suite of I/O engines: a subclass of `EngineTests` with a fixture `engine`."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastserial.engines import Capabilities, Engine, Op, Request
from fastserial.errors import CorruptCheckpointError
from fastserial.memory.buffers import BufferPool
from support.transfers import (
    BLOCK,
    DEPTH,
    FLAGS,
    Opener,
    drive,
    into,
    no_buffer,
    noise,
    read,
    wait_for,
    write,
)


class EngineTests:
    """What fastserial expects of every engine. Subclasses give the fixture `engine`."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        """A new engine, closed at the end."""
        raise NotImplementedError("a subclass of EngineTests must define the fixture `engine`")

    @pytest.fixture
    def capabilities(self, engine: Engine) -> Capabilities:
        return type(engine).capabilities

    @pytest.fixture
    def pool(self, engine: Engine) -> Iterator[BufferPool]:
        """Buffers of the engine's, with the engine opened on them and closed before they go."""
        pool = engine.allocate(DEPTH, BLOCK)
        engine.open(pool.buffers, len(pool.buffers))
        yield pool
        engine.close()
        pool.close()

    @pytest.fixture(params=FLAGS)
    def opener(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
        """Open files in a folder, buffered and with direct I/O."""
        opener = Opener(tmp_path, request.param)
        yield opener
        opener.close()

    @pytest.fixture
    def fd(self, opener: Opener) -> int:
        """An empty file, open for reading and writing."""
        return opener("file")

    @staticmethod
    def needs(capability: bool, name: str) -> None:
        """Skip a test of something the engine does not claim to do."""
        if not capability:
            pytest.skip(f"the engine does not claim `{name}`")

    # -- what it says of itself ----------------------------------------------------------------

    def test_describes_itself(self, engine: Engine) -> None:
        assert engine.name
        assert isinstance(engine.capabilities, Capabilities)
        assert type(engine).unavailable() is None

    def test_buffers(self, engine: Engine, pool: BufferPool) -> None:
        """As many as asked for or fewer, aligned, writable, apart."""
        assert 1 <= len(pool.buffers) <= DEPTH
        assert pool.free == len(pool.buffers)
        places = sorted(buffer.address for buffer in pool.buffers)
        assert all(b - a >= BLOCK for a, b in itertools.pairwise(places))
        for buffer in pool.buffers:
            assert (buffer.nbytes, buffer.address % 4096) == (BLOCK, 0)
            buffer.view[0] = buffer.view[-1] = 1

    # -- moving bytes --------------------------------------------------------------------------

    def test_writes(self, engine: Engine, pool: BufferPool, opener: Opener, fd: int) -> None:
        """Many blocks, several rounds of the pool."""
        data = noise(11 * BLOCK)
        requests = [write(fd, at, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        finished = drive(engine, pool, requests)
        assert {id(c.request) for c in finished} == {id(r) for r in requests}
        assert len(finished) == len(requests)
        for completion in finished:
            assert (completion.error, completion.transferred) == (None, BLOCK)
            assert completion.request.moved
        assert opener.content("file") == data

    def test_what_moves_itself(
        self, engine: Engine, pool: BufferPool, opener: Opener, fd: int, capabilities: Capabilities
    ) -> None:
        """`Request.move`, in place of the engine: its count, or its error."""
        self.needs(capabilities.device_memory, "device_memory")
        requests = [write(fd, at, noise(BLOCK)) for at in range(0, 3 * BLOCK, BLOCK)]
        prepared: list[Request] = []
        for request in requests[:2]:
            request.move = lambda same: prepared.append(same) or BLOCK  # type: ignore[func-returns-value]
        planted = OSError(errno.EIO, "planted")

        def fail(request: Request) -> int:
            raise planted

        requests[2].move = fail
        finished = {c.request.offset: c for c in drive(engine, pool, requests)}
        assert [finished[at].transferred for at in (0, BLOCK)] == [BLOCK, BLOCK]
        assert finished[2 * BLOCK].error is planted
        assert all(a is b for a, b in zip(requests, prepared, strict=False))
        assert len(prepared) == 2
        assert opener.content("file") == b""

    def test_any_length(self, engine: Engine, pool: BufferPool, tmp_path: Path) -> None:
        """Any offset and length, through the page cache."""
        rng = random.Random(2)
        opener = Opener(tmp_path, "buffered")
        fd = opener("file")
        expected = bytearray()
        requests = []
        for _ in range(50):
            data = rng.randbytes(rng.choice((1, 7, 511, 512, 4095, 4097, BLOCK - 1)))
            requests.append(write(fd, len(expected), data))
            expected += data
        for completion in drive(engine, pool, requests):
            assert (completion.error, completion.transferred) == (None, completion.request.length)
        assert opener.content("file") == bytes(expected)
        opener.close()

    def test_reads(self, engine: Engine, pool: BufferPool, opener: Opener) -> None:
        """Many blocks; at the end of the file a read is short, past it empty: no error."""
        data = noise(9 * BLOCK + 4096 + 100)
        opener.create("file", data)
        fd = opener("file", os.O_RDONLY)
        places = list(range(0, len(data) + BLOCK, BLOCK))
        random.Random(3).shuffle(places)
        for completion in drive(engine, pool, [read(fd, at, BLOCK) for at in places]):
            at = completion.request.offset
            assert completion.error is None
            assert completion.request.tag == data[at : at + BLOCK]

    def test_reads_into_pieces(
        self, engine: Engine, opener: Opener, capabilities: Capabilities
    ) -> None:
        """Bytes go to pieces of memory one after the other, up to the end of the file."""
        self.needs(capabilities.any_memory, "any_memory")
        data = noise(BLOCK)
        opener.create("file", data)
        fd = opener.buffered("file")
        for length in (BLOCK, BLOCK + 5000):
            pieces = [memoryview(bytearray(size)) for size in (1, 4099, length - 4100)]
            request = Request(Op.READ, fd, 0, length, no_buffer(), pieces=pieces)
            engine.submit([request])
            (completion,) = wait_for(engine, 1)
            assert (completion.error, completion.transferred) == (None, BLOCK)
            assert b"".join(pieces)[:BLOCK] == data

    # -- preparing -----------------------------------------------------------------------------

    def test_prepares_once_in_order(self, engine: Engine, pool: BufferPool, fd: int) -> None:
        """Each write is prepared once; a later one may wait for an earlier one."""
        count = len(pool.buffers)
        begun = [threading.Event() for _ in range(count)]
        calls: list[int] = []

        def prepare(request: Request) -> None:
            index = request.offset // BLOCK
            calls.append(index)
            begun[index].set()
            if index:
                assert begun[index - 1].wait(30)

        requests = [
            Request(Op.WRITE, fd, i * BLOCK, BLOCK, pool.take(), prepare) for i in range(count)
        ]
        engine.submit(requests)
        finished = wait_for(engine, count)
        assert [c.error for c in finished] == [None] * count
        assert sorted(calls) == list(range(count))

    def test_failed_prepare(self, engine: Engine, pool: BufferPool, fd: int) -> None:
        """An error while preparing comes back; the other requests are moved."""
        planted = ValueError("planted")

        def prepare(request: Request) -> None:
            raise planted

        bad = Request(Op.WRITE, fd, 0, BLOCK, no_buffer(), prepare)
        finished = drive(engine, pool, [bad, write(fd, BLOCK, noise(BLOCK))])
        errors = {c.request.offset: c.error for c in finished}
        assert errors == {0: planted, BLOCK: None}

    def test_finishes_reads(self, engine: Engine, pool: BufferPool, opener: Opener) -> None:
        """`finish` is called once per request; an error in it comes back."""
        data = noise(5 * BLOCK + 100)
        opener.create("file", data)
        fd = opener("file", os.O_RDONLY)
        seen: dict[int, tuple[int, bytes]] = {}
        planted = CorruptCheckpointError("planted")

        def finish(request: Request, moved: int) -> None:
            if request.offset == 2 * BLOCK:
                raise planted
            seen[request.offset] = moved, bytes(request.view[:moved])

        requests = [read(fd, at, BLOCK) for at in range(0, len(data), BLOCK)]
        for request in requests:
            request.finish = finish
        errors = {c.request.offset: c.error for c in drive(engine, pool, requests)}
        assert {at: error for at, error in errors.items() if error} == {2 * BLOCK: planted}
        assert seen == {
            at: (len(data[at : at + BLOCK]), data[at : at + BLOCK])
            for at in range(0, len(data), BLOCK)
            if at != 2 * BLOCK
        }

    # -- waiting -------------------------------------------------------------------------------

    def test_wait_for_nothing(self, engine: Engine, pool: BufferPool) -> None:
        """With nothing in flight, `wait` returns at once."""
        assert engine.wait(0) == []
        assert engine.wait(1) == []

    def test_wait_for_some(self, engine: Engine, pool: BufferPool, fd: int) -> None:
        """`wait` returns at least as many as asked for, and in the end each once."""
        count = len(pool.buffers)
        engine.submit([into(pool.take(), write(fd, i * BLOCK, bytes(BLOCK))) for i in range(count)])
        finished = engine.wait(count)
        assert len(finished) == count
        assert engine.wait(1) == []

    # -- trouble -------------------------------------------------------------------------------

    def test_bad_descriptor(self, engine: Engine, pool: BufferPool, fd: int) -> None:
        """An error of the system call comes back as an OSError."""
        closed = os.dup(fd)
        os.close(closed)
        (completion,) = drive(engine, pool, [write(closed, 0, bytes(BLOCK))])
        assert isinstance(completion.error, OSError)
        assert completion.error.errno == errno.EBADF

    def test_no_room(self, engine: Engine, pool: BufferPool, opener: Opener, fd: int) -> None:
        """A write that the file system refuses or cuts short is never reported as whole."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        data = noise(8 * BLOCK)
        requests = [write(fd, at, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        limit = 3 * BLOCK + 8192
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            finished = drive(engine, pool, requests)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for completion in finished:
            whole = completion.error is None and completion.transferred == BLOCK
            assert whole == (completion.request.offset + BLOCK <= limit)
            if completion.error is not None:
                assert isinstance(completion.error, OSError)
                assert completion.error.errno == errno.EFBIG
        assert opener.content("file")[: 3 * BLOCK] == data[: 3 * BLOCK]

    # -- its life ------------------------------------------------------------------------------

    def test_close_twice(self, engine: Engine) -> None:
        engine.close()
        engine.close()

    def test_close_in_flight(self, engine: Engine, opener: Opener, fd: int) -> None:
        """After `close` nothing uses the buffers or the file any more."""
        pool = engine.allocate(DEPTH, BLOCK)
        count = len(pool.buffers)
        engine.open(pool.buffers, count)
        before = threading.active_count()
        engine.submit([into(pool.take(), write(fd, i * BLOCK, b"a" * BLOCK)) for i in range(count)])
        engine.close()
        pool.close()  # unmaps: a straggler would crash
        assert threading.active_count() <= before
        os.ftruncate(opener.buffered("file"), 0)
        assert opener.content("file") == b""
