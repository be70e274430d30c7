"""Small archives, which torch's own writer fills: in C++ a record takes it a few microseconds.

It opens a path by itself, and takes the archive's name from it. Here the path is that of an open
descriptor, whose file may have no name; the archive's name stands behind a NUL and a backslash:
`open` ends at the NUL, and torch takes what follows the backslash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from fastserial.formats.zip_format import END, END64, END64_SIGNATURE, LOCATOR
from fastserial.interrupts import ours, suppress
from fastserial.saving.archive import new_writer

_ENDING = END64.size + LOCATOR.size + END.size

# Name, data, bytes. Data of None: zeros without a checksum, to be written later.
SmallRecord = tuple[str, str | bytes | int | torch.UntypedStorage | None, int]


def fill_by_torch(
    fd: int, archive: str, alignment: int, checksums: bool, records: Iterable[SmallRecord]
) -> bool:
    """Let torch's own writer fill an empty file.

    Args:
        fd: of the file; stays at its position.
        archive: the name before the records' names.
        alignment: of the records' data (bytes).
        checksums: compute CRC-32s.
        records: what is written.

    Returns:
        False: it could not, for a reason that it does not tell, and the file is empty.

    Raises:
        OSError: the file cannot be emptied.
    """
    try:
        if _is_filled(fd, archive, alignment, checksums, records):
            return True
    except ours(RuntimeError):
        pass
    os.ftruncate(fd, 0)
    return False


def _is_filled(
    fd: int, archive: str, alignment: int, checksums: bool, records: Iterable[SmallRecord]
) -> bool:
    writer = new_writer(f"/proc/self/fd/{fd}\0\\{archive}.pt", alignment, checksums)
    try:
        is_named = writer.archive_name() == archive
        for name, data, nbytes in records if is_named else ():
            if data is None:
                writer.write_record_metadata(name, nbytes)
            else:
                writer.write_record(name, data, nbytes)
        writer.write_end_of_file()
    except BaseException:
        with suppress(RuntimeError):  # dropped after a failed write without this, it aborts
            writer.write_end_of_file()
        raise
    finally:
        del writer  # which has the file open, and perhaps bytes to write: none may come later
    return is_named and _is_whole(fd)


def _is_whole(fd: int) -> bool:
    """Return whether an archive of torch's ends where its end record says.

    torch 2.6 reports success, too, if its last bytes did not reach the file.
    """
    size = os.fstat(fd).st_size
    ending = os.pread(fd, _ENDING, max(0, size - _ENDING))
    if len(ending) < _ENDING:
        return False
    signature, *_, nbytes, offset = END64.unpack_from(ending)
    return bool(signature == END64_SIGNATURE and offset + nbytes + _ENDING == size)
