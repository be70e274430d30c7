"""Lightning's plugins, beside its own: the same files, errors and removals. `test_lightning_runs`
trains with them."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import aligned
from support.damage import flip
from support.limits import file_size_limit

import fastserial
from fastserial.files.destination import Replacement

pytest.importorskip("lightning", reason="Lightning is not installed: nox -s integrations")

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from fastserial.integrations.lightning import FastAsyncCheckpointIO, FastCheckpointIO

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of itself

OURS = [FastCheckpointIO, FastAsyncCheckpointIO]


def state(value: float = 1.0, numel: int = 300_000) -> dict[str, Any]:
    tensor = torch.full((numel,), value)
    return {"epoch": 3, "state_dict": {"w": tensor, "view": tensor[10:20]}, "hyper": ("a", 0.5)}


def weight(path: Path | str) -> float:
    value: float = torch.load(path, weights_only=True)["state_dict"]["w"][0].item()
    return value


@pytest.fixture(params=[TorchCheckpointIO, *OURS])
def any_io(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Lightning's own plugin, and ours."""
    io = request.param()
    yield io
    io.teardown()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves wait, with their bytes written, until the event is set."""
    go_on = threading.Event()
    sync = Replacement.sync

    def wait(new: Replacement) -> None:
        sync(new)
        go_on.wait(60)

    monkeypatch.setattr(Replacement, "sync", wait)
    yield go_on
    go_on.set()
    fastserial.wait_all()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may be larger than 256 KiB."""
    with file_size_limit(256 * 1024):
        yield


@pytest.mark.parametrize("numel", [100, 3_000_000], ids=["small", "large"])
@pytest.mark.parametrize("ours", OURS)
def test_files_are_lightnings(ours: Any, numel: int, tmp_path: Path) -> None:
    """Also where no folder is yet; and each loads what the other wrote."""
    io, stock = ours(), TorchCheckpointIO()
    for plugin, name in ((io, "ours"), (stock, "stock")):
        plugin.save_checkpoint(state(numel=numel), tmp_path / "a" / name / "epoch=0-step=1.ckpt")
        plugin.teardown()
    mine, theirs = sorted(tmp_path.glob("a/*/*"))
    assert mine.read_bytes() == theirs.read_bytes()
    for plugin, path in ((io, theirs), (stock, mine)):
        found = plugin.load_checkpoint(path, weights_only=True)
        assert found["hyper"] == ("a", 0.5)
        w, view = found["state_dict"].values()
        assert view.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
        assert torch.equal(found["state_dict"]["w"], state(numel=numel)["state_dict"]["w"])
    assert sorted(tmp_path.glob("a/ours/*")) == [mine]


def test_urls_are_lightnings(any_io: Any) -> None:
    url = "memory://bucket/epoch=0.ckpt"
    any_io.save_checkpoint(state(2.0), url)
    any_io.teardown()
    assert any_io.load_checkpoint(url)["state_dict"]["w"][0] == 2.0
    any_io.remove_checkpoint(url)
    with pytest.raises(FileNotFoundError, match="not found: memory"):
        any_io.load_checkpoint(url)


@pytest.mark.parametrize("leads_to", ["old/epoch=0.ckpt", "nowhere.ckpt"])
def test_a_link_is_replaced_not_what_it_leads_to(
    any_io: Any, tmp_path: Path, leads_to: str
) -> None:
    """`last.ckpt` of a run with `save_last="link"`: it stays until the new file is whole."""
    old, last = tmp_path / "old" / "epoch=0.ckpt", tmp_path / "last.ckpt"
    any_io.save_checkpoint(state(1.0), old)
    any_io.teardown()
    last.symlink_to(leads_to)
    with file_size_limit(1 << 20), pytest.raises(OSError, match="large"):
        any_io.save_checkpoint({"x": torch.zeros(4_000_000)}, last)
        any_io.teardown()
    assert os.readlink(last) == leads_to
    any_io.save_checkpoint(state(2.0), last)
    any_io.teardown()
    assert not last.is_symlink()
    assert (weight(old), weight(last)) == (1.0, 2.0)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "old"]


NOT_OURS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "open in this process": lambda path: open(path, "r+b"),  # noqa: SIM115
    "an alignment that does not fit": lambda path: aligned(1 << 16),
    "a link": contextlib.nullcontext,
}


@pytest.fixture(params=NOT_OURS)
def not_ours(request: pytest.FixtureRequest, any_io: Any, tmp_path: Path) -> Iterator[Path]:
    """The path of a checkpoint that fastserial leaves to others; `old.ckpt` holds the same."""
    path = tmp_path / "last.ckpt"
    any_io.save_checkpoint(state(1.0), tmp_path / "old.ckpt")
    any_io.teardown()
    if request.param == "a link":
        path.symlink_to("old.ckpt")
    else:
        path.write_bytes((tmp_path / "old.ckpt").read_bytes())
    with NOT_OURS[request.param](path):
        yield path


def test_a_file_that_is_not_ours_to_write(any_io: Any, not_ours: Path, tmp_path: Path) -> None:
    """It is whole or as it was, has torch's archive name, and a link does not lead there."""
    with pytest.raises((TypeError, pickle.PicklingError)):
        any_io.save_checkpoint({**state(), "lock": threading.Lock()}, not_ours)
        any_io.teardown()
    assert weight(not_ours) == 1.0
    any_io.save_checkpoint(state(2.0), not_ours)
    any_io.teardown()
    TorchCheckpointIO().save_checkpoint(state(2.0), tmp_path / "stock.ckpt")
    assert not_ours.read_bytes() == (tmp_path / "stock.ckpt").read_bytes()
    assert not not_ours.is_symlink()
    assert weight(tmp_path / "old.ckpt") == 1.0


@pytest.mark.parametrize("ours", OURS)
def test_a_pipe_is_written_to_and_stays(ours: Any, tmp_path: Path) -> None:
    """Lightning itself renames a file over it, as root over `/dev/null`."""
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    io = ours()
    io.save_checkpoint({"x": torch.ones(3)}, path)
    io.teardown()
    reader.join(60)
    assert path.is_fifo()
    TorchCheckpointIO().save_checkpoint({"x": torch.ones(3)}, tmp_path / "stock")
    assert read == [(tmp_path / "stock").read_bytes()]


def test_what_lightning_refuses(any_io: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        any_io.save_checkpoint(state(), tmp_path / "x.ckpt", storage_options={"a": 1})
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*x\.ckpt"):
        any_io.load_checkpoint(tmp_path / "x.ckpt")
    any_io.save_checkpoint({**state(), "path": Path("/")}, tmp_path / "x.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        any_io.load_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert any_io.load_checkpoint(tmp_path / "x.ckpt", weights_only=False)["path"] == Path("/")


def test_remove(any_io: Any, tmp_path: Path) -> None:
    any_io.remove_checkpoint(tmp_path / "none.ckpt")
    any_io.save_checkpoint(state(), tmp_path / "folder" / "x.ckpt")
    any_io.teardown()
    any_io.remove_checkpoint(tmp_path / "folder")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ours", OURS)
def test_load_can_verify(ours: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    io = ours(verify=True)
    io.save_checkpoint(state(), path)
    assert io.load_checkpoint(path)["epoch"] == 3
    flip(path, path.stat().st_size // 2)
    assert TorchCheckpointIO().load_checkpoint(path)["epoch"] == 3  # stock does not notice
    with pytest.raises(fastserial.CorruptCheckpointError, match=r"x\.ckpt"):
        io.load_checkpoint(path)


def test_trainers_and_fabric_take_them(tmp_path: Path) -> None:
    import lightning
    import pytorch_lightning

    for ours in OURS:
        for package in (lightning, pytorch_lightning):
            io = ours()
            trainer = package.Trainer(plugins=[io], accelerator="cpu", logger=False)
            assert trainer.strategy.checkpoint_io is io
        io = ours()
        fabric = lightning.Fabric(plugins=[io], accelerator="cpu")
        model = torch.nn.Linear(3, 3)
        fabric.save(tmp_path / "f.ckpt", {"model": model, "step": 5})
        other = torch.nn.Linear(3, 3)
        found = fabric.load(tmp_path / "f.ckpt", {"model": other})
        assert found == {"step": 5}
        assert torch.equal(other.weight, model.weight)


# -- beside training -------------------------------------------------------------------------------


def test_a_load_waits_for_the_save(held: threading.Event, tmp_path: Path) -> None:
    """Lightning's learning rate finder saves, and loads at once."""
    io = FastAsyncCheckpointIO()
    io.save_checkpoint(state(4.0), tmp_path / "x.ckpt")
    threading.Timer(0.2, held.set).start()
    assert io.load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["w"][0] == 4.0


def test_an_old_checkpoint_goes_when_the_new_one_is_there(
    held: threading.Event, tmp_path: Path
) -> None:
    io = FastAsyncCheckpointIO()
    (tmp_path / "1.ckpt").touch()
    io.save_checkpoint(state(), tmp_path / "2.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert os.listdir(tmp_path) == ["1.ckpt"]
    held.set()
    io.teardown()
    assert os.listdir(tmp_path) == ["2.ckpt"]


def test_a_name_that_was_to_go_and_is_saved_again_stays(
    held: threading.Event, tmp_path: Path
) -> None:
    io = FastAsyncCheckpointIO()
    io.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "b.ckpt")
    io.save_checkpoint(state(2.0), tmp_path / "b.ckpt")
    held.set()
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_an_error_is_raised_once_and_the_old_checkpoint_stays(
    small_files: None, tmp_path: Path
) -> None:
    io = FastAsyncCheckpointIO()
    io.save_checkpoint(state(1.0, 10), tmp_path / "1.ckpt")
    io.save_checkpoint(state(2.0), tmp_path / "2.ckpt")  # too large
    io.remove_checkpoint(tmp_path / "1.ckpt")
    for save in io._saves:
        save.exception()  # waits, and tells nobody
    with pytest.raises(fastserial.WriteError, match=r"2\.ckpt"):
        io.save_checkpoint(state(3.0, 10), tmp_path / "3.ckpt")
    io.save_checkpoint(state(4.0, 10), tmp_path / "4.ckpt")
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "4.ckpt"]


@pytest.mark.parametrize("steps", [2, 4], ids=["at the end", "at the next save"])
def test_fit_raises_what_was_not_saved(small_files: None, steps: int, tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Large(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(300, 300)

    trainer = pl.Trainer(
        plugins=[FastAsyncCheckpointIO()],
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)],
        max_steps=steps,
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(fastserial.WriteError, match="step=2"):
        trainer.fit(Large())
    assert os.listdir(tmp_path) == []


def test_it_can_be_pickled(held: threading.Event, tmp_path: Path) -> None:
    """As spawned processes of a strategy get it; what is under way is the parent's."""
    io = FastAsyncCheckpointIO(snapshot_budget=1 << 30)
    io.save_checkpoint(state(1.0), tmp_path / "x.ckpt")
    pickle.loads(pickle.dumps(io)).teardown()
    assert not (tmp_path / "x.ckpt").exists()
    held.set()
    io.teardown()
    assert weight(tmp_path / "x.ckpt") == 1.0
