"""What rank 0 does once every rank has written its part: checksums, sync, rename."""

from __future__ import annotations

import contextlib
import os
import struct

from fastserial.distributed.onefile.laid_out import Container, LaidOut
from fastserial.distributed.onefile.shard_writer import ShardWriter
from fastserial.distributed.onefile.shared_file import NewFile
from fastserial.formats.extents import Trailer
from fastserial.saving.fill import write_all

__all__ = ["finish_file"]

_CRC = struct.Struct("<I")
_CRC_AT = 4  # in a data descriptor


def finish_file(
    new: NewFile,
    laid_out: LaidOut,
    container: Container,
    writer: ShardWriter,
    checksums: bool,
) -> None:
    """Write what needs the checksums of all ranks, sync, and make the file the target.

    Raises:
        OSError: a write, the sync or the rename failed.
    """
    plan = laid_out.plan
    ledger = writer.ledger
    if checksums:
        patches = [
            (record, offset + nbytes + _CRC_AT)
            for record, _, offset, nbytes in laid_out.places.records
            if record not in writer.sealed
        ]
        for _, at in patches:  # else each write waits until the rest of its page is read
            with contextlib.suppress(OSError):
                os.posix_fadvise(new.fd, at, _CRC.size, os.POSIX_FADV_WILLNEED)
        for record, at in patches:
            os.pwrite(new.fd, _CRC.pack(ledger.wait(record)), at)
    if container.trailer is not None and isinstance(container.trailer.source, Trailer):
        sizes = {record for record, _, _, _ in laid_out.places.records}
        crcs = [
            ledger.wait(record) if record in sizes and crc is None else crc or 0
            for record, crc in enumerate(plan.crcs)
        ]
        trailer = container.trailer.source.make(crcs)
        write_all(new.fd, memoryview(trailer), container.trailer.offset)
    new.sync()
    new.commit()
