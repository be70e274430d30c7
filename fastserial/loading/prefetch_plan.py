"""Which records of a zip checkpoint are read together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastserial.config.performance import (
    LARGE_RECORD,
    MOST_PIECES,
    NEAR_RECORDS,
    SCATTERED_UNIT,
)
from fastserial.formats.zip.directory import RecordEntry
from fastserial.loading.units import AsItLies, CopiedOut, Scattered, Unit

__all__ = ["plan_aligned", "plan_scattered"]

_DIGITS = 20  # of a key that is looked at


def plan_aligned(
    records: Sequence[RecordEntry], alignment: int, most: int, file_size: int
) -> list[Unit]:
    """Group records into units of which each is read as an aligned range, in reading order.

    Args:
        records: stored, not empty.
        alignment: of direct reads (bytes).
        most: bytes that can be read at once.
        file_size: bytes of the file.
    """

    def span(first: RecordEntry, last: RecordEntry) -> tuple[int, int]:
        offset = first.header_offset - first.header_offset % alignment
        stop = min(file_size, last.data_end + -last.data_end % alignment)
        return offset, stop - offset

    def is_alone(record: RecordEntry) -> bool:
        return record.size >= LARGE_RECORD or span(record, record)[1] > most

    def fits(group: Sequence[RecordEntry], record: RecordEntry) -> bool:
        return _is_near(group, record) and span(group[0], record)[1] <= most

    def unit(group: Sequence[RecordEntry], order: int) -> Unit:
        offset, length = span(group[0], group[-1])
        if is_alone(group[0]):
            return AsItLies(group, order, offset, length, alignment)
        return CopiedOut(group, order, offset, length)

    return _grouped(records, is_alone, fits, unit)


def plan_scattered(records: Sequence[RecordEntry]) -> list[Unit]:
    """Group records into units whose bytes go straight to their places, in reading order."""

    def is_alone(record: RecordEntry) -> bool:
        return record.size >= SCATTERED_UNIT

    def fits(group: Sequence[RecordEntry], record: RecordEntry) -> bool:
        return (
            _is_near(group, record)
            and record.data_end - group[0].header_offset <= SCATTERED_UNIT
            and 2 * (len(group) + 1) <= MOST_PIECES
        )

    def unit(group: Sequence[RecordEntry], order: int) -> Unit:
        offset = group[0].header_offset
        return Scattered(group, order, offset, group[-1].data_end - offset)

    return _grouped(records, is_alone, fits, unit)


def _is_near(group: Sequence[RecordEntry], record: RecordEntry) -> bool:
    return 0 <= record.header_offset - group[-1].data_end <= NEAR_RECORDS


def _grouped(
    records: Sequence[RecordEntry],
    is_alone: Callable[[RecordEntry], bool],
    fits: Callable[[Sequence[RecordEntry], RecordEntry], bool],
    unit: Callable[[Sequence[RecordEntry], int], Unit],
) -> list[Unit]:
    """Return units of neighbours, in the order of reading.

    That is the order of their keys, in which pickles ask for them, and in files of torch 2.7 and
    later the order of the file.
    """
    keyed = sorted(
        ((_order(record, index), record) for index, record in enumerate(records)),
        key=lambda item: item[1].header_offset,
    )
    units: list[Unit] = []
    group: list[RecordEntry] = []
    orders: list[int] = []
    alone = False
    for order, record in keyed:
        is_now = is_alone(record)
        if group and (alone or is_now or not fits(group, record)):
            units.append(unit(group, min(orders)))
            group, orders = [], []
        group.append(record)
        orders.append(order)
        alone = is_now
    if group:
        units.append(unit(group, min(orders)))
    return sorted(units, key=lambda unit: unit.order)


def _order(record: RecordEntry, index: int) -> int:
    try:
        return int(record.name[len("data/") :][:_DIGITS])
    except ValueError:
        return index
