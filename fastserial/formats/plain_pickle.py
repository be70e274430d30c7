"""Recognizing plain pickles, such as those of state dicts of tensors, numbers and strings.

A plain pickle can only build containers, import the names found here, call them, give state to
objects (BUILD), and call `persistent_load`. The check takes a few steps for each tensor, not one
for each opcode: a regular expression skips everything between two strings.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

# Opcodes of fixed length: containers, marks, None, True, False, REDUCE, BINPERSID; short
# puts and gets, ints, floats. Runs are short, since the expression keeps a record of each step.
_FIXED = rb"[(t\x85-\x87)\]}N\x88\x89aesuRQ]|[qhK].|M..|J.{4}|j.{4}|G.{8}"
_RUN = 256

_PROTOCOL_2 = b"\x80\x02"
_STRING, _LONG, _GLOBAL, _BUILD, _STOP = b"X"[0], b"\x8a"[0], b"c"[0], b"b"[0], b"."[0]


class PlainPickle(NamedTuple):
    """A plain pickle.

    Attributes:
        names: what it imports, as `module.name`.
        builds: where its BUILD opcodes are (bytes).
        end: where it ends (bytes).
    """

    names: frozenset[str]
    builds: list[int]
    end: int


def plain_pickle(data: bytes) -> PlainPickle | None:
    """Return what a plain pickle imports, and where it gives state; None if it is not plain.

    Args:
        data: a pickle of protocol 2, and perhaps more after it. It may be hostile: running it
            takes time and memory in proportion to its length, except for the functions it calls.
    """
    if data[:2] != _PROTOCOL_2:
        return None
    names: set[str] = set()
    builds: list[int] = []
    run = _run(len(data) >> 17)
    at, end = 2, len(data)
    while True:
        match = run.match(data, at)
        at = match.end() if match else at
        if at >= end:
            return None
        opcode = data[at]
        if opcode == _STRING:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif opcode == _GLOBAL:
            module, _, rest = data[at + 1 : at + 257].partition(b"\n")
            name, newline, _ = rest.partition(b"\n")
            if not newline or not (module + name).isascii():
                return None
            names.add(f"{module.decode()}.{name.decode()}")
            at += len(module) + len(name) + 3
        elif opcode == _LONG:
            at += 2 + data[at + 1] if at + 1 < end else 2
        elif opcode == _STOP:
            return PlainPickle(frozenset(names), builds, at + 1)
        elif opcode == _BUILD:
            builds.append(at)
            at += 1
        elif not match or match.end() == match.start():
            return None


@cache
def _run(highest: int) -> re.Pattern[bytes]:
    """Match opcodes of fixed length; a long put has an index below (highest + 1) << 16.

    The unpickler makes room for the highest index, and a pickle puts at most every second byte.
    """
    index = rb"r..[\x00-%b]\x00" % re.escape(bytes((min(highest, 255),)))
    return re.compile(rb"(?:%b|%b){0,%d}" % (_FIXED, index, _RUN), re.DOTALL)
