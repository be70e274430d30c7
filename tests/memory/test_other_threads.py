"""Whether other threads may resize what is saved."""

from __future__ import annotations

import os
import threading

from fastserial.memory.storages import other_threads


def test_a_forked_child_is_alone() -> None:
    """The threads of its parent are not there: nobody pays for what they might do."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert other_threads()
    pid = os.fork()
    if not pid:
        alone = not other_threads()
        own = threading.Thread(target=go_on.wait, daemon=True)
        own.start()
        os._exit(0 if alone and other_threads() else 1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
