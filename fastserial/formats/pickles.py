"""Reading a pickle without executing it.

`decode` runs the pickle's opcodes on symbols: nothing is imported and nothing is called. What a
real unpickler would import becomes a `Global`, what it would call a `Call`, what it would ask
`persistent_load` for a `Persistent`. Memory, time and the length of what is kept have hard limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastserial.errors import CheckpointFileError, CorruptCheckpointError, PickleLimitError
from fastserial.formats.pickles.machine import (
    MOST_NESTED_TUPLES,
    Call,
    Elided,
    Global,
    Limits,
    Machine,
    Mapping,
    Persistent,
)
from fastserial.formats.pickles.opcodes import TABLE
from fastserial.formats.source import BytesSource, ByteStream

__all__ = [
    "Call",
    "Decoded",
    "Elided",
    "Global",
    "Limits",
    "Mapping",
    "Persistent",
    "decode",
    "refuse_nested",
]

_TUPLES = (b"t", b"\x85", b"\x86", b"\x87")  # the opcodes that make one


@dataclass(frozen=True, slots=True)
class Decoded:
    """A pickle that was read.

    Attributes:
        value: what it holds.
        globals: the names it would import.
        persistents: what `persistent_load` would be asked for, in order.
        end: where it ends in the stream (bytes).
    """

    value: Any
    globals: frozenset[Global]
    persistents: list[Persistent]
    end: int


def decode(stream: ByteStream, limits: Limits | None = None) -> Decoded:
    """Read one pickle, of protocol 1 to 5, from where the stream stands.

    Raises:
        CorruptCheckpointError: it is no whole pickle.
        UnreadableCheckpointError: it has opcodes that are not read, such as those of protocol 0.
        PickleLimitError: reading it takes more than the limits allow.
        OSError: the stream cannot be read.
    """
    machine = Machine(stream, limits or Limits())
    try:
        value = machine.run(TABLE)
    except (CheckpointFileError, PickleLimitError, OSError):
        raise
    except (IndexError, ValueError, KeyError, TypeError, OverflowError, Warning) as error:
        raise CorruptCheckpointError(
            f"damaged pickle ({type(error).__name__}: {error})", offset=stream.tell()
        ) from error
    return Decoded(value, frozenset(machine.globals), machine.persistents, stream.tell())


def refuse_nested(data: bytes) -> None:
    """Refuse a pickle whose tuples are nested so deep that hashing one would end the process.

    To be called before a real unpickler, which uses what it made as keys, gets an untrusted pickle.

    Raises:
        CheckpointFileError, PickleLimitError: it does, or `decode` cannot read it.
    """
    if sum(map(data.count, _TUPLES)) > MOST_NESTED_TUPLES:  # a limit from above, quickly found
        stream = ByteStream(BytesSource(data))
        decode(stream, Limits(memory=max(1 << 30, 512 * len(data)), seconds=600.0, kept=len(data)))
