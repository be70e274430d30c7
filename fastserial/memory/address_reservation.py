"""Memory that is never touched: an address for each byte of a state that exists nowhere as a whole.

torch pickles a tensor without looking at its bytes. So tensors over such memory make torch lay out
the file of the full state, at no cost.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from fastserial.memory.storages import new_storage

_ALIGN = 64
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class AddressReservation:
    """An address range without memory, from which storages are made."""

    def __init__(self, nbytes: int, count: int) -> None:
        """Reserve addresses for `count` storages of `nbytes` bytes together.

        Raises:
            OSError: there are not as many.
        """
        self._nbytes = nbytes + (count + 1) * _ALIGN
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # counts for nothing: it is not writable
        address = _libc.mmap(None, self._nbytes, _PROT_NONE, flags, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address: int | None = address
        self._next = address

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage, whose bytes must not be read."""
        if not nbytes:
            return new_storage(0)
        array = (ctypes.c_uint8 * nbytes).from_address(self._next)
        self._next += nbytes + -nbytes % _ALIGN
        return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor."""
        storage = self.storage(torch.Size(shape).numel() * dtype.itemsize)
        stride = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)

    def close(self) -> None:
        """Give the addresses back; no tensor of them may be in use any more. Idempotent."""
        if self._address is not None:
            _libc.munmap(self._address, self._nbytes)
            self._address = None
