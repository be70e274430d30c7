"""Which records of a zip checkpoint are read together, and the memory they go to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastserial.config.performance import LARGE_RECORD, NEAR_RECORDS
from fastserial.formats.zip.directory import RecordEntry
from fastserial.formats.zip.structs import LOCAL, LOCAL_LENGTHS, LOCAL_SIGNATURE
from fastserial.memory.storages import new_storage

__all__ = ["Unit", "has_header", "plan_units"]

_DIGITS = 20  # of a key that is looked at

_Keyed = tuple[int, RecordEntry]


class Unit:
    """Records that are read together: one large one, or small neighbours.

    Attributes:
        records: in file order.
        order: its place in the order of reading.
        is_large: it is one record that is read straight into memory of its own.
        offset, length: the aligned range of the file that is read (bytes).
        memory: one storage, or one for each small record; none before `allocate`, nor once they
            were handed on.
        base: address of byte `offset` of the file in a large record's memory.
        arrived: bytes of a large record's range that are there.
        provided: `allocate` was called.
        started: its reading was started.
    """

    __slots__ = (
        "arrived", "base", "is_large", "length", "memory", "offset", "order", "provided",
        "records", "started",
    )  # fmt: skip

    def __init__(self, records: Sequence[_Keyed], alignment: int, is_large: bool) -> None:
        self.records = [record for _, record in records]
        self.order = min(key for key, _ in records)
        self.is_large = is_large
        self.offset, self.length = _span(self.records[0], self.records[-1], alignment)
        self.memory: list[torch.UntypedStorage] = []
        self.base = 0
        self.arrived = 0
        self.provided = False
        self.started = False

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return sum(record.size for record in self.records)

    def allocate(self, alignment: int) -> None:
        """Allocate the memory of its records.

        Raises:
            RuntimeError: there is none.
        """
        if self.is_large:
            whole = new_storage(self.length + alignment)
            start = whole.data_ptr()
            self.base = start + -start % alignment
            self.memory = [whole]
        else:
            self.memory = [new_storage(record.size) for record in self.records]
        self.provided = True


def plan_units(records: Sequence[RecordEntry], alignment: int, most: int) -> list[Unit]:
    """Group records into units, in the order of reading.

    That is the order of their keys, in which pickles ask for them, and in files of torch 2.7 and
    later the order of the file.

    Args:
        records: stored, not empty.
        alignment: of direct reads (bytes).
        most: bytes that can be read at once.
    """
    keyed = sorted(
        ((_order(record, index), record) for index, record in enumerate(records)),
        key=lambda item: item[1].header_offset,
    )
    units: list[Unit] = []
    group: list[_Keyed] = []

    def close() -> None:
        if group:
            units.append(Unit(group, alignment, False))
            group.clear()

    for item in keyed:
        record = item[1]
        if record.size >= LARGE_RECORD or _span(record, record, alignment)[1] > most:
            close()
            units.append(Unit([item], alignment, True))
            continue
        if group and (
            record.header_offset - group[-1][1].data_end > NEAR_RECORDS
            or _span(group[0][1], record, alignment)[1] > most
        ):
            close()
        group.append(item)
    close()
    return sorted(units, key=lambda unit: unit.order)


def _span(first: RecordEntry, last: RecordEntry, alignment: int) -> tuple[int, int]:
    """Return offset and length (bytes) of the aligned range that holds records and headers."""
    offset = first.header_offset - first.header_offset % alignment
    return offset, last.data_end + -last.data_end % alignment - offset


def _order(record: RecordEntry, index: int) -> int:
    try:
        return int(record.name[len("data/") :][:_DIGITS])
    except ValueError:
        return index


def has_header(view: memoryview, at: int, record: RecordEntry) -> bool:
    """Tell whether a record's local header lies at `at`, and ends where its data starts."""
    signature, name_length, extra_length = LOCAL_LENGTHS.unpack_from(view, at)
    stop = at + LOCAL.size + name_length
    return (
        signature == LOCAL_SIGNATURE
        and stop + extra_length - at == record.data_offset - record.header_offset
        and view[at + LOCAL.size : stop] == record.full_name
    )
