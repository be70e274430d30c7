"""Which storages of a zip checkpoint are read to devices, where torch would move them.

torch then finds each on its device, and has nothing to move.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from fastserial.errors import FastserialError
from fastserial.formats.pickles import decode
from fastserial.formats.source import DescriptorSource
from fastserial.formats.tensors import storage_table
from fastserial.formats.zip_format import PICKLE, record_stream, storage_records
from fastserial.memory.devices import has_streams

if TYPE_CHECKING:
    from fastserial.formats.zip_format import Directory


_HOST = "cpu"  # the location that torch leaves as it is


def places_of(
    map_location: Any, stock: Any, fd: int, directory: Directory
) -> dict[str, torch.device] | None:
    """Return the devices to read storages to, by the names of their records.

    The others stay on the host. None: all stay there, or only torch can decide.

    Args:
        map_location: of `torch.load`.
        stock: torch's reader of the file.
        fd: of the file.
        directory: of the file.
    """
    found: dict[str, torch.device] | None = None
    if isinstance(map_location, str | torch.device):
        device = _device(str(map_location))
        if device is not None:
            found = {record.name: device for record in storage_records(directory)}
    elif map_location is None or type(map_location) is dict:
        found = _devices_in_pickle(map_location or {}, fd, directory)
    if found and _in_our_order(stock) and _only_torchs_own():
        return found
    return None


def _devices_in_pickle(
    mapped: dict[Any, Any], fd: int, directory: Directory
) -> dict[str, torch.device] | None:
    """Return the devices that the file names."""
    pickle = directory.find(PICKLE)
    if pickle is None:
        return None
    try:
        table = storage_table(decode(record_stream(DescriptorSource(fd), pickle)).persistents)
    except (FastserialError, OSError):  # torch will say what it is
        return None
    devices: dict[Any, torch.device | None] = {}
    found: dict[str, torch.device] = {}
    for key, entry in table.items():
        location = mapped.get(entry.location, entry.location)
        if location == _HOST:
            continue
        if location not in devices:
            devices[location] = _device(location)
        device = devices[location]
        if device is None:
            return None
        found[f"data/{key}"] = device
    return found


def _device(location: Any) -> torch.device | None:
    """Return the device that torch takes a location for, None if that is not clear."""
    if type(location) is not str:
        return None
    try:
        device = torch.device(location)
    except RuntimeError:  # torch will say so
        return None
    if not has_streams(device):
        return None
    module: Any = getattr(torch, device.type)
    if not module.is_available():
        return None
    index = module.current_device() if device.index is None else device.index
    return torch.device(device.type, index) if index < module.device_count() else None


def _in_our_order(stock: Any) -> bool:
    """Return whether the bytes have our order; torch swaps them on the host."""
    name = "byteorder"
    return bool(stock.has_record(name) and stock.get_record(name) == sys.byteorder.encode())


def _only_torchs_own() -> bool:
    """Return whether only torch's own functions move storages to devices."""
    serialization: Any = torch.serialization
    return all(
        getattr(restore, "func", restore).__module__ == serialization.__name__
        for _, _, restore in serialization._package_registry
    )
