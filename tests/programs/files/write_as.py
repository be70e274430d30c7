"""Save "new" with `torch.save` as somebody else, and tell how it went as one line of JSON.

    python write_as.py '{"path": "x.pt", "user": 1234}'

`user` and `group` (numbers), `groups` (more of them); `strangers`: in a user namespace that knows
nobody of this machine, as its root. `by_torch`: why torch wrote the file itself, or null.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from typing import Any

import torch

import fastserial
from fastserial.errors import WriteError

_CLONE_NEWUSER = 0x10000000
_FIRST, _COUNT = 100_000, 65_536


def become_stranger() -> None:
    """Go over to a user namespace whose users 0 to 65535 are nobody outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    ready, mapped = os.pipe(), os.pipe()
    inside = os.getpid()
    if os.fork() == 0:  # the maps must be written from outside
        os.read(ready[0], 1)
        for kind in ("uid", "gid"):
            with open(f"/proc/{inside}/{kind}_map", "w", encoding="ascii") as file:
                file.write(f"0 {_FIRST} {_COUNT}")
        os.write(mapped[1], b"x")
        os._exit(0)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "no user namespace")
    os.write(ready[1], b"x")
    os.read(mapped[0], 1)
    os.wait()
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def write(job: dict[str, Any]) -> dict[str, Any]:
    fastserial.install()
    with tempfile.TemporaryDirectory() as folder:  # imports what this user may read
        torch.save("new", os.path.join(folder, "x.pt"))
    fastserial.summary()
    if job.get("strangers"):
        become_stranger()
    if "user" in job:
        os.setgroups(job.get("groups", []))
        os.setgid(job.get("group", job["user"]))
        os.setuid(job["user"])
    try:
        torch.save("new", job["path"])
    except WriteError as error:
        return {"error": str(error), "errno": error.errno}
    except OSError as error:
        return {"error": str(error), "errno": error.errno}
    reasons = [way.reason for way in fastserial.summary().saves.why_torch]
    return {"by_torch": reasons[0] if reasons else None}


if __name__ == "__main__":
    print(json.dumps(write(json.loads(sys.argv[1]))))
