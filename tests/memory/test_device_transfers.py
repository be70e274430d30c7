"""Saves and loads of tensors on a device: through pinned buffers, or past the host by cuFile.

The device completes its copies late and out of order; `support.cufile` finds fault with parameters
and memory that change before their time. The bugs that are put in must be found.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.cufile import FakeCuFile, cufile_on
from support.damage import flip
from support.devices import FakeDevice, Fault, loaded_to, plugged_in
from support.identity import last_save, stock
from support.loading import attempt, last_report

import fastserial
from fastserial.errors import CorruptCheckpointError
from fastserial.loading import reader
from fastserial.memory import buffers as ring_module
from fastserial.memory import devices, storages
from fastserial.memory.buffers import Buffer, Ring
from fastserial.overlap import snapshot

BLOCK = 16384
SMALL: dict[str, Any] = {
    "block_size": BLOCK, "queue_depth": 3, "threads": 3, "small_file": 0, "durable": False,
    "cache": "drop",
}  # fmt: skip
WORDS = ("gds", "gpu_async", "gpu_batch")  # of a way past the host
ROUTES: dict[str, dict[str, Any]] = {
    "direct": {**SMALL, "direct": True},
    "cached": {**SMALL, "direct": False},
    "verified": {**SMALL, "verify_on_load": True},
    "one": {**SMALL, "queue_depth": 1, "threads": 1},
    **{word: {**SMALL, "direct": True, "transfer": word} for word in WORDS},
}
HERE = torch.device("cpu")  # what the device goes by
ON_HOST = 30_000  # bytes of the storage that is not on it
State = dict[str, torch.Tensor]


def on_host(storage: torch.UntypedStorage) -> bool:
    return storage.nbytes() in (0, ON_HOST)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A machine with a device, on which all storages are but one."""
    made = plugged_in(monkeypatch, FakeDevice())
    loaded_to(monkeypatch, made, on_host)
    for module in (storages, snapshot):
        monkeypatch.setattr(module, "is_on_host", on_host)
    monkeypatch.setattr(storages, "device_types", lambda storages: {"fake"})
    yield made
    fastserial.uninstall()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> Iterator[FakeCuFile]:
    """CuFile, with that device."""
    made = cufile_on(monkeypatch, device)
    yield made
    fastserial.uninstall()
    fastserial.free_pinned()
    assert not made.files, "a handle was not given back"
    assert not made.registered, "memory is still registered"


def begin(device: FakeDevice, seed: int = 1) -> FakeDevice:
    return device.renew(seed, haste=(seed % 10) / 10)


def state() -> State:
    sizes = {"large": 300_000, "small": 1_000, "host": ON_HOST, "empty": 0, "next": 5 * BLOCK}
    values = {name: noise(size) for name, size in sizes.items()}
    return {**values, "view": values["large"][5:50], "byte": torch.arange(7, dtype=torch.uint8)}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stocks(value: Any, path: Path, zipped: bool = True) -> bytes:
    with stock():
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path.read_bytes()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("route", ROUTES)
def test_stocks_bytes_and_values(
    tmp_path: Path, request: pytest.FixtureRequest, device: FakeDevice, route: str, zipped: bool
) -> None:
    """Most of them pass through the ring, or none of the host's memory."""
    fake = request.getfixturevalue("fake") if route in WORDS else None
    value, path = state(), tmp_path / "a.pt"
    wanted = stocks(value, path, zipped)
    fastserial.install(**ROUTES[route])
    for seed in range(5):
        begin(device, seed)
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
        assert path.read_bytes() == wanted, seed
        if zipped:
            assert same(torch.load(path, map_location=HERE), value), seed
            assert last_report().transfer == ("gds" if fake else "cpu_async_gpu")
            assert (last_report().fallback, last_report().verified) == (None, route == "verified")
        assert device.faults == []
        assert not any(stream.steps for stream in device._streams)
        saved = last_save()
        assert saved.transfer == ("gds" if fake else "cpu_async_gpu")
        if fake is None:
            assert device.copies >= 5 * (1 + zipped)
            assert "transfer=cpu_async_gpu (auto: " in str(saved)
        else:
            assert fake.moved >= 300_000 * (1 + zipped) * (seed + 1)
            assert saved.direct
            asked = "asked for" if route == "gds" else f"{route} is taken as gds"
            assert saved.transfer_why == f"{asked}: cuFile 1.17"


# --- the order of copies and kernels ------------------------------------------------------------


def blank(wanted: State) -> tuple[State, list[str]]:
    """Return tensors to fill, and the names of those that are on the device."""
    made = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    return made, [name for name in made if not on_host(made[name].untyped_storage())]


def saves_what_will_be(device: FakeDevice, path: Path) -> bool:
    """Save what kernels are still to write when the save begins, and overwrite later."""
    wanted = state()
    value, names = blank(wanted)
    value["host"] = wanted["host"]
    for name in names:
        device.kernel(partial(value[name].copy_, wanted[name]))
    torch.save(value, path)
    for name in names:
        device.kernel(value[name].zero_)
    device.finish()
    return same(torch.load(path), wanted) and fastserial.verify(path).ok


def loads_after_kernels(device: FakeDevice, path: Path, verify: bool = False) -> bool:
    """Load into tensors that kernels are still to write: what is queued before comes before."""
    wanted = state()
    stocks(wanted, path)
    target, names = blank(wanted)
    for name in names:
        device.kernel(partial(target[name].fill_, 1))
    with fastserial.options(**SMALL):
        fastserial.load_into(target, path, verify=verify)
    at_once = same(target, wanted)
    device.finish()
    return at_once and same(target, wanted)


@pytest.fixture
def unsynchronized(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's streams are not waited for: what the ring does is enough."""
    monkeypatch.setattr(reader, "synchronize", lambda found: None)


@pytest.mark.usefixtures("unsynchronized")
def test_through_the_ring_after_the_programs_kernels(tmp_path: Path, device: FakeDevice) -> None:
    for seed in range(0, 10, 2):
        fastserial.install(**SMALL)
        assert saves_what_will_be(begin(device, seed), tmp_path / "a.pt"), seed
        assert loads_after_kernels(begin(device, seed), tmp_path / "a.pt", seed % 4 == 0), seed
        assert last_report().transfer == "cpu_async_gpu"


def test_past_the_host_after_the_programs_kernels(tmp_path: Path, fake: FakeCuFile) -> None:
    for seed in range(3):
        fastserial.install(**ROUTES["gds"])
        assert saves_what_will_be(begin(fake.device, seed), tmp_path / "a.pt"), seed
        with fastserial.options(transfer="gds", direct=True):
            assert loads_after_kernels(begin(fake.device, seed), tmp_path / "a.pt"), seed
        assert last_report().transfer == "gds"


def test_snapshots(tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied at the call is what the program's kernels will have made of it."""
    monkeypatch.setattr(snapshot, "is_on_host", lambda storage: False)
    monkeypatch.setattr(ring_module, "THROUGH_RING", 1)
    fastserial.install(**SMALL)
    wanted = state()
    for seed in range(5):
        begin(device, seed)
        value, _ = blank(wanted)
        for name, tensor in value.items():
            device.kernel(partial(tensor.copy_, wanted[name]))
        pending = fastserial.save_async(value, tmp_path / "a.pt")
        for tensor in value.values():
            device.kernel(tensor.zero_)
        pending.wait()
        device.finish()
        assert same(torch.load(tmp_path / "a.pt"), wanted)
        assert device.copies >= 5


def never_waits(ring: Ring, buffer: Buffer) -> None:
    ring._fences[buffer.index].clear()


def waits_once(ring: Ring, buffer: Buffer, arrive: Any = Ring.arrive) -> None:
    del ring._fences[buffer.index][1:]
    arrive(ring, buffer)


def never_follows(ring: Ring, places: object) -> bool:
    ring._streams[HERE] = devices.copy_stream(HERE)
    return True


@pytest.mark.usefixtures("unsynchronized")
@pytest.mark.parametrize(
    ("act", "method", "bug"),
    [
        (saves_what_will_be, "arrive", never_waits),
        (saves_what_will_be, "join", never_follows),
        (loads_after_kernels, "arrive", never_waits),
        (loads_after_kernels, "arrive", waits_once),
        (loads_after_kernels, "join", never_follows),
        (loads_after_kernels, "settle", lambda ring: None),
    ],
)
def test_bugs_that_are_put_in_are_found(
    tmp_path: Path,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    act: Any,
    method: str,
    bug: Any,
) -> None:
    """The negative control: buffers filled again too early, calls that return too early."""
    monkeypatch.setattr(Ring, method, bug)
    for seed in range(60):
        fastserial.install(**SMALL)
        try:
            if not act(begin(device, seed), tmp_path / "a.pt"):
                return
        except Fault:
            return
    pytest.fail("no seed shows the bug")


# --- which way ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "taken", "why"),
    [
        ({}, "cpu_async_gpu", "auto: "),
        ({"transfer": "cpu_async_gpu"}, "cpu_async_gpu", "asked for"),
        ({"transfer": "cpu_gpu"}, "cpu_gpu", "asked for"),
        ({"transfer": "cpu"}, "cpu_gpu", "asked for"),
        ({"transfer": "cpu_cached_gpu"}, "cpu_cached_gpu", "asked for"),
        ({"block_size": 32 << 20}, "cpu_gpu", "set a smaller block_size"),
        ({"small_file": 64 << 20}, "cpu_gpu", "a small file"),
    ],
)
def test_words(
    tmp_path: Path, device: FakeDevice, options: dict[str, Any], taken: str, why: str
) -> None:
    fastserial.install(**{**SMALL, "cache": "auto", **options})
    torch.save(state(), tmp_path / "a.pt")
    assert last_save().transfer == taken
    assert why in last_save().transfer_why
    assert bool(device.copies) == (taken != "cpu_gpu")
    if taken == "cpu_cached_gpu":
        assert not last_save().direct


def test_small_files_are_loaded_by_torch(tmp_path: Path, device: FakeDevice) -> None:
    """To a device larger ones than to the host: pinned memory and streams are made first."""
    path = tmp_path / "a.pt"
    torch.save({"a": noise(600_000)}, path)
    fastserial.install(**{**SMALL, "small_file": 100_000})
    fastserial.free_pinned()
    torch.load(path)
    assert last_report().fallback is None
    torch.load(path, map_location=HERE)
    assert "a small file" in last_report().fallback
    torch.save({"a": noise(600_000)}, path)
    torch.load(path, map_location=HERE)
    assert last_report().fallback is None


def test_a_file_without_tensors_asks_for_no_device(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask would begin a context, and fail in a forked child. The file is verified."""
    path = tmp_path / "a.pt"
    torch.save({"text": "x" * 100}, path)
    flip(path, path.read_bytes().index(b"xxx"))

    def current_device() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cpu, "current_device", current_device)
    fastserial.install(**SMALL, verify_on_load=True)
    with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
        torch.load(path, map_location=HERE)


@pytest.mark.parametrize("word", WORDS)
def test_without_cufile(
    tmp_path: Path, device: FakeDevice, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be had is said once, and the next best taken."""
    monkeypatch.setattr(ring_module, "_warned", set())
    fastserial.install(**SMALL, transfer=word)
    with pytest.warns(UserWarning, match=f"transfer '{word}': .*cuFile"):
        torch.save(state(), tmp_path / "a.pt")
    torch.save(state(), tmp_path / "a.pt")
    assert last_save().transfer == "cpu_async_gpu"
    assert last_save().transfer_why.startswith(f"{word}: ")


def test_without_pinned_memory(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(nbytes: int) -> None:
        raise RuntimeError("out of memory")

    fastserial.free_pinned()
    monkeypatch.setattr(devices, "pin", pin)
    fastserial.install(**SMALL)
    torch.save(state(), tmp_path / "a.pt")
    assert last_save().transfer == "cpu_gpu"
    assert last_save().transfer_why == "no pinned memory: out of memory"


@pytest.mark.parametrize(
    "place", [HERE, "cpu:0", None, b"cpu", lambda storage, place: storage, {"cpu": "cpu"}]
)
def test_places(tmp_path: Path, device: FakeDevice, place: Any) -> None:
    """Where the caller says; what the strange ones are is only torch's to know."""
    stocks(state(), path := tmp_path / "a.pt")

    def outcome() -> tuple[Any, ...]:
        value, _, *others = attempt(lambda: torch.load(path, map_location=place)).seen()
        return value, *others  # but for what may be resized: on a device, all of it may

    wanted = outcome()
    fastserial.install(**SMALL)
    assert outcome() == wanted
    assert place == "cpu:0" or bool(device.copies) == (place is HERE)


# --- what goes wrong with cuFile ----------------------------------------------------------------


@pytest.mark.parametrize("fault", ["short", "none", -1, -5008, -5044, 10**9])
def test_counts(tmp_path: Path, fake: FakeCuFile, fault: Any) -> None:
    """A short transfer continues; a failed block goes through the host, and the report says why."""
    value, path = state(), tmp_path / "a.pt"
    wanted = stocks(value, path)
    goes_on = fault == "short"
    fastserial.install(**ROUTES["gds"])
    for number in (1, 7):
        begin(fake.device, number)
        fake.renew()
        fake.faults[number] = fault
        with _warned(fault):
            torch.save(value, path)
        assert path.read_bytes() == wanted
        assert (last_save().transfer == "gds") == goes_on, last_save()
        fake.faults = {fake.transfers + number: fault}
        ring_module._warned.clear()
        with _warned(fault):
            found = torch.load(path, map_location=HERE)
        assert same(found, value)
        assert (last_report().transfer == "gds") == goes_on, last_report()
        if fault == -5008:
            assert "GDS is not supported on the current file (5008)" in last_report().transfer_why
        assert fake.device.faults == []


def _warned(fault: Any) -> Any:
    if fault == "short":
        return fastserial.options()
    return pytest.warns(UserWarning, match="transfer 'gds': cuFile.*from there on")


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        ("driver_open", 5001, r"cuFileDriverOpen: .*\(5001\)"),
        ("buf_register", 5009, r"cuFileBufRegister: .*\(5009\)"),
        ("handle_register", 5008, r"cuFileHandleRegister: GDS is not supported.*\(5008\)"),
        ("set_parameter_bool", 5022, r"cuFileDriverOpen: .*\(5022\)"),
    ],
)
def test_refused_at_the_start(
    tmp_path: Path, fake: FakeCuFile, call: str, status: int, said: str
) -> None:
    value, path = state(), tmp_path / "a.pt"
    wanted = stocks(value, path)
    fake.refusals[call] = status
    fastserial.install(**ROUTES["gpu_batch"])
    with pytest.warns(UserWarning, match=f"transfer 'gpu_batch': {said}"):
        torch.save(value, path)
    assert path.read_bytes() == wanted
    assert last_save().transfer == "cpu_async_gpu"
    assert same(torch.load(path, map_location=HERE), value)  # said once
    assert last_report().transfer == "cpu_async_gpu"
    assert fake.calls.count("set_parameter_bool") == 1, "a refusal of the driver is asked for again"
    assert not fake.moved


def test_names_of_new_files(tmp_path: Path, fake: FakeCuFile) -> None:
    """Only a file that cuFile may open has a name before it is whole: a kill leaves that there."""
    fastserial.install(**ROUTES["gds"])

    def named() -> bool:
        with fastserial.FastFileWriter(tmp_path / "a.pt") as writer:
            writer.write(b"x")
            return any(path.suffix == ".tmp" for path in tmp_path.iterdir())

    assert named()
    fake.refusals["driver_open"] = 5001
    with pytest.warns(UserWarning, match="5001"):
        torch.save(state(), tmp_path / "b.pt")
    assert not named()


@pytest.mark.parametrize("compat", [True, False])
def test_never_compat(tmp_path: Path, fake: FakeCuFile, compat: bool) -> None:
    """cuFile may not go through the host by itself; who opened it before may have allowed that."""
    fake.opened, fake.compat = True, compat
    fastserial.install(**ROUTES["gds"])
    if compat:
        with pytest.warns(UserWarning, match="CUFILE_ALLOW_COMPAT_MODE=false"):
            torch.save(state(), tmp_path / "a.pt")
    else:
        torch.save(state(), tmp_path / "a.pt")
    assert (last_save().transfer == "gds") == (not compat)
    assert bool(fake.moved) == (not compat)
    begin(fake.device)
    fake.renew()
    torch.save(state(), tmp_path / "a.pt")
    assert fake.compat is False  # it forbids it itself
