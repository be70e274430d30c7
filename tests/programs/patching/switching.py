"""Scenes of patching torch: `SCENE ARGUMENTS`, or `each SCENE...`."""

from __future__ import annotations

import inspect
import io
import linecache
import os
import pickle
import signal
import threading
import traceback

import pytest
import torch
from support.patched import NAMES, both, functions, main, same
from torch import save

import fastserial
from fastserial.patching import install as patching


def on_and_off_give_back_the_same_objects() -> None:
    stock = functions()
    aliases = dict(stock)
    assert fastserial.uninstall() is False
    assert patching.get_original("_save") is stock["_save"]
    for _ in range(3):
        assert fastserial.install() is True
        mine = functions()
        assert not any(mine[name] is stock[name] for name in NAMES)
        assert fastserial.install() is True
        assert same(functions(), mine)
        assert patching.get_original("_save") is stock["_save"]
        assert patching.get_original("load") is torch.load
        assert both() and both(save)
        assert fastserial.uninstall() is True
        assert fastserial.uninstall() is False
        assert same(functions(), stock) and same(aliases, stock)
        assert not both() and not both(save)
    # a name of ours that somebody kept behaves as stock
    for name in NAMES:
        assert mine[name].__code__ is stock[name].__code__
    with pytest.raises(AttributeError):
        patching.get_original("nothing")


def the_copies_look_like_the_originals() -> None:
    stock = functions()
    fastserial.install()
    linecache.checkcache()
    for name, mine in functions().items():
        old = stock[name]
        assert inspect.signature(mine) == inspect.signature(old)
        assert mine.__annotations__ == old.__annotations__
        assert mine.__defaults__ == old.__defaults__
        assert mine.__kwdefaults__ == old.__kwdefaults__
        assert (mine.__module__, mine.__qualname__) == (old.__module__, old.__qualname__)
        assert mine.__globals__ is old.__globals__
        assert pickle.loads(pickle.dumps(mine)) is mine
        source = inspect.getsource(mine)
        assert source.startswith(f"def {name}(") and "import save_hooks" in source
        before, after = inspect.getsource(old).splitlines(), source.splitlines()
        assert [line for line in after if line in before] and before[-1] == after[-1]

    class Bad:
        def __reduce__(self):
            raise ValueError("cannot")

    for legacy in (False, True):
        with pytest.raises(ValueError) as error:
            torch.save(Bad(), io.BytesIO(), _use_new_zipfile_serialization=not legacy)
        frames = traceback.extract_tb(error.tb)
        frame = [f for f in frames if f.name == ("_legacy_save" if legacy else "_save")][-1]
        assert "serialization.fastserial-v" in frame.filename
        assert frame.line == "pickler.dump(obj)", frame


def a_fork_while_another_thread_installs() -> None:
    stock = functions()
    fastserial.install()
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with patching._lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        assert both() and fastserial.install() and fastserial.uninstall()
        os._exit(not same(functions(), stock))
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0 and both()


if __name__ == "__main__":
    main(globals())
