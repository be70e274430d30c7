"""Scenes of patching torch: `SCENE ARGUMENTS`, or `each SCENE...`."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import torch
from support.patched import both, functions, main, same
from torch import save

import fastserial
from fastserial.patching import install as patching


def threads_race_install_and_saves() -> None:
    stock = functions()
    fastserial.install(durable=False)
    stop, errors, saves, switches = threading.Event(), [], [0] * 4, [0] * 2

    def saver(number):
        while not stop.is_set():
            value = torch.full((1000 * (number + 1),), saves[number], dtype=torch.int64)
            path = f"{number}.pt"
            try:
                save([value], path, _use_new_zipfile_serialization=bool(number % 2))
                assert torch.equal(torch.load(path)[0], value)
            except BaseException as error:
                errors.append(repr(error))
                return
            saves[number] += 1

    def switcher(number):
        while not stop.is_set():
            fastserial.uninstall()
            fastserial.install()
            switches[number] += 1

    threads = [threading.Thread(target=saver, args=(n,)) for n in range(4)]
    threads += [threading.Thread(target=switcher, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    while not errors and (min(saves) < 15 or min(switches) < 40):
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors[:3]
    fastserial.uninstall()
    assert same(functions(), stock) and not both()


def fork() -> None:
    stock = functions()

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            status = 1
            signal.alarm(60)
            try:
                work()
                status = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def child(installed):
        assert both() is installed
        fastserial.install()
        assert both()
        torch.save([torch.ones(3)], "c.pt")
        assert torch.load("c.pt")[0].sum() == 3
        fastserial.uninstall()
        assert not both() and same(functions(), stock)

    in_child(lambda: child(False))
    fastserial.install()
    in_child(lambda: child(True))
    assert both()

    # another thread is inside install() or uninstall() while we fork
    inside, leave = threading.Event(), threading.Event()

    def hold():
        from fastserial.memory.held_settings import paused_collection

        with patching._lock, paused_collection():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()

    def child_collects():
        assert gc.isenabled()
        child(True)

    in_child(child_collects)
    leave.set()
    thread.join()
    assert both() and fastserial.uninstall()


if __name__ == "__main__":
    main(globals())
