"""Saves and loads where a container's filter (seccomp) refuses a system call: `filtered.py FOLDER`.

Prints what went wrong, as JSON: nothing, if a refusal is never noticed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import sys
from pathlib import Path

import torch

import fastserial
from fastserial import engines

CALLS = {  # on x86-64
    "faccessat2": 439,
    "fallocate": 285,
    "preadv2": 327,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(names: list[str], number: int) -> None:
    """From now on, system calls fail with an error number in this process."""
    steps = [(_LOAD, 0, 0, 0)]
    for name in names:
        steps += [(_JUMP_IF_EQUAL, 0, 1, CALLS[name]), (_RETURN, 0, 0, _ERRNO | number)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter may be set")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter may be set")


def attempt(folder: Path) -> None:
    """Save a new file and over an old one; load what was saved."""
    state = {"a": torch.arange(500_000.0)}
    old = folder / "old.pt"
    for path in (folder / "new.pt", old):
        torch.save(state, path)
        report = fastserial.last_save_report()
        if report is None or not report.durable or report.fallback is not None:
            raise RuntimeError(f"{path.name}: {report}")
        if not torch.load(path)["a"].equal(state["a"]):
            raise RuntimeError(f"{path.name} is not what was saved")
    left = sorted(os.listdir(folder))
    if left != ["new.pt", "old.pt"]:
        raise RuntimeError(f"left: {left}")


def attempt_io_uring(folder: Path) -> None:
    """The engine says that it cannot run; the usual one saves."""
    try:
        fastserial.install(engine="io_uring")
    except fastserial.EngineUnavailableError as error:
        if "'io_uring' cannot run here" not in str(error):
            raise
    found = {status.name: status.missing for status in engines.survey()}
    if found["io_uring"] is None or found["threads"] is not None:
        raise RuntimeError(f"the survey says {found}")
    fastserial.install(small_file=0)
    attempt(folder)


def main() -> None:
    errors = {}
    calls = [name for name in CALLS if not name.startswith("io_uring")]
    cases = [([name], attempt) for name in calls] + [(calls, attempt)]
    cases += [([name], attempt_io_uring) for name in CALLS if name not in calls]
    for names, check in cases:
        for number in (errno.EPERM, errno.ENOSYS):
            case = f"{' '.join(names)}: {errno.errorcode[number]}"
            folder = Path(sys.argv[1], case)
            folder.mkdir()
            torch.save("old", folder / "old.pt")
            readable, writable = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    refuse(names, number)
                    if check is attempt:
                        fastserial.install(small_file=0, engine="threads")
                    check(folder)
                except BaseException as error:
                    os.write(writable, repr(error).encode()[:4000])
                os._exit(0)
            os.close(writable)
            said = os.read(readable, 4000).decode()
            os.close(readable)
            os.waitpid(child, 0)
            if said:
                errors[case] = said
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main()
