"""`install(safetensors=True)`: `safetensors.torch.save_file` writes through fastserial.

The function that is replaced is below `save_file` and `save_model`, which may be bound to other
names by now. It gets the addresses of the tensors, checked and contiguous. Loads stay safetensors'
own: they map the file.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from fastserial.config import current
from fastserial.files.destination import StockWay
from fastserial.files.nodes import is_node, open_node
from fastserial.formats.extents import storage_extents
from fastserial.formats.safetensors import METADATA, TYPE_NAMES, header_bytes, torch_shape
from fastserial.formats.tensors import ITEM_BYTES
from fastserial.import_hook import when_imported
from fastserial.interrupts import ours
from fastserial.memory.storages import HostMemory, batch_of
from fastserial.patching import save_hooks
from fastserial.patching.patches import Swap
from fastserial.reasons import A_FILE, Reason
from fastserial.reports import SAVES
from fastserial.saving.writer import FastFileWriter

_MODULE = "safetensors.torch"
_FUNCTION = "serialize_file"
_log = logging.getLogger("fastserial")
_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_A_NODE = Reason("not a regular file", A_FILE)
_Prepared = tuple[bytes, Sequence[HostMemory]]
_wanted = False
_swap: Swap | None = None
_ranks: Mapping[str, int] = {}  # by dtype: in which order tensors are written


def switch_on() -> None:
    """Replace the function as soon as safetensors.torch is imported."""
    global _wanted
    if not _wanted:
        _wanted = True
        when_imported(_MODULE, _imported)


def switch_off() -> None:
    """Restore safetensors' own function, unless other code has replaced ours.

    A remaining reference to our function gets stock behaviour from it.
    """
    global _wanted
    _wanted = False
    if _swap is not None and _swap.in_force:
        _swap.namespace[_FUNCTION] = _swap.original


def _imported(module: ModuleType) -> None:
    global _swap, _ranks
    if not _wanted or (_swap is not None and _swap.in_force):
        return
    try:
        _ranks = _learn_order(importlib.import_module("safetensors"))
        stock = getattr(module, _FUNCTION)
    except ours(Exception) as error:  # must not break the import; older releases pass copies
        _log.warning("safetensors stays as it is; fastserial needs release 0.8 or later: %r", error)
        return
    replacement = functools.partial(_serialize_file, stock)
    _swap = Swap(vars(module), _FUNCTION, stock, replacement)
    setattr(module, _FUNCTION, replacement)


def _learn_order(package: Any) -> dict[str, int]:
    """Return the order in which this safetensors writes dtypes; its headers must equal ours.

    Raises:
        Exception: it has another interface, or writes other headers.
    """
    memory = (ctypes.c_char * 16)()
    address = ctypes.addressof(memory)
    specs = {}
    for dtype in TYPE_NAMES:
        nbytes = ITEM_BYTES[dtype]
        try:
            specs[dtype] = package.TensorSpec(
                dtype=dtype, shape=[1], data_ptr=address, data_len=nbytes
            )
        except ours(ValueError, package.SafetensorError):  # unknown to this release
            continue
    metadata = {"é\n\x01": '"'}
    theirs = bytes(package.serialize(specs, metadata=metadata))
    ordered = sorted(specs, key=lambda dtype: theirs.index(f'"{dtype}":'.encode()))
    made = header_bytes([(one, one, (1,), ITEM_BYTES[one]) for one in ordered], metadata)
    if not theirs.startswith(made):
        raise ValueError("it writes another header")
    return {dtype: rank for rank, dtype in enumerate(ordered)}


def _serialize_file(
    stock: Callable[..., None],
    tensor_dict: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write what safetensors' `serialize_file` writes, byte for byte.

    Of several entries in `metadata` safetensors itself writes some order; here it is the given one.
    A device is written to, not replaced.

    Raises:
        WriteError: the file cannot be written; the previous one is intact.
        Exception: whatever safetensors raises.
    """
    prepared, found = None, None
    if _wanted and isinstance(filename, str | os.PathLike) and current().safetensors:
        prepared = _prepare(tensor_dict, metadata)
        if is_node(filename):
            _write_through(filename, tensor_dict, metadata, prepared)
            return
    if prepared is not None:
        found = save_hooks.open_writer(filename, "safetensors", True)
    if isinstance(found, StockWay):
        SAVES.add_torchs(found.reason)
    if prepared is None or not isinstance(found, FastFileWriter):
        stock(tensor_dict, filename, metadata=metadata)
        return
    header, memories = prepared
    with found as writer:
        writer.write(header)
        extents = storage_extents(batch_of(memories), [b""] * len(memories))
        writer.write_layout(extents, sum(memory.nbytes for memory in memories))
        writer.release_sources()


def _write_through(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None,
    prepared: _Prepared | None,
) -> None:
    """Write to a device or a pipe, which safetensors' own function would replace."""
    SAVES.add_torchs(_A_NODE)
    if prepared is None:
        serialize = importlib.import_module("safetensors").serialize
        contents = [serialize(tensors, metadata=metadata)]
    else:
        header, memories = prepared
        contents = [header, *map(_bytes_of, memories)]
    with open_node(path) as node:
        node.writelines(contents)


def _bytes_of(memory: HostMemory) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * memory.nbytes).from_address(memory.address)


def _prepare(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> _Prepared | None:
    """Return the header and the tensors' memory in their order; None: safetensors has to write."""
    if metadata is not None and (not metadata or not _is_text(metadata)):
        return None
    if not all(type(key) is str and key != METADATA for key in tensors):  # JSON takes others, too
        return None
    rows = []
    for key, spec in tensors.items():
        name = str(spec.dtype)
        dtype, shape = _DTYPES.get(name, name), tuple(spec.shape)  # the format has names of its own
        held = torch_shape(dtype, shape) if dtype in _ranks else None
        if held is None or math.prod(held) * ITEM_BYTES[dtype] != spec.data_len:
            return None
        rows.append((_ranks[dtype], key, dtype, held, spec))
    rows.sort(key=lambda row: row[:2])
    try:
        header = header_bytes(
            [(key, dtype, shape, spec.data_len) for _, key, dtype, shape, spec in rows],
            metadata or {},
        )
    except UnicodeEncodeError:
        return None
    memories = [HostMemory(spec.data_ptr, spec.data_len, spec) for *_, spec in rows]
    return header, memories


def _is_text(metadata: Mapping[str, str]) -> bool:
    return isinstance(metadata, dict) and all(
        type(key) is str and type(value) is str for key, value in metadata.items()
    )
