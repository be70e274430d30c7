"""`fastserial.load_into`: read a checkpoint into tensors that are already allocated.

Everything is compared before the first byte is read, so a mismatch changes nothing. No second copy
of the model is made: host tensors are read into in place or from staging buffers, device tensors
through staging buffers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from time import perf_counter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fastserial.checkpoints.own_loading import (
    Conversion,
    conversion_of,
    is_in_memory,
    is_scalar_for,
    load_by_module,
    why_not_filled,
)
from fastserial.checkpoints.tensor_read import (
    direct_extent,
    meta_of,
    open_readable,
    overlapping,
    read_tensor_into,
)
from fastserial.checkpoints.verify import refuse_damaged
from fastserial.config import Config, current
from fastserial.config.performance import FEW_BYTES
from fastserial.errors import LoadMismatchError, UnreadableTensorError
from fastserial.formats.container import Container
from fastserial.formats.source import DescriptorSource
from fastserial.formats.tensors import TensorEntry
from fastserial.interrupts import ours
from fastserial.loading.reader import FastFileReader, ReadExtent, report_load
from fastserial.loading.session import unverified_error
from fastserial.memory.held_settings import paused_collection
from fastserial.nests import walk
from fastserial.printable import BoundedRepr
from fastserial.reports import warn_unmet

_SHOWN = 20  # mismatches that an error lists


@dataclass(frozen=True, slots=True, repr=False)
class LoadedKeys(BoundedRepr):
    """What `load_into` did not fill, and what it did not use, with `strict=False`.

    Attributes:
        missing_keys: tensors that the checkpoint does not hold; they are unchanged.
        unexpected_keys: tensors of the checkpoint without a target.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class _Fill:
    """A tensor to fill.

    Attributes:
        key: of the target.
        target: what to fill.
        stored: the tensor in the file.
        base: offset of its first byte there.
    """

    key: str
    target: torch.Tensor
    stored: TensorEntry
    base: int


def load_into(
    target: torch.nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    key: str = "",
    strict: bool = True,
    verify: bool | None = None,
    config: Config | None = None,
) -> LoadedKeys:
    """Fill the tensors of a module or a state dict from a checkpoint.

        fastserial.load_into(model, "ckpt.pt", key="model")

    Keys must match as for `load_state_dict`; keys of nested dictionaries and lists are joined by
    dots. Values of a dictionary that are not tensors are not changed. The pickle is read, but not
    executed.

    Where more than memory has to be filled, a module's own `load_state_dict` gets the entries of
    the file, loaded with `weights_only=True` into a second copy. That is so if its `state_dict` has
    values of its own (extra states, copies), if its class or a hook of the user's changes what is
    loaded, or if torch's conversion of older files is needed (BatchNorm without
    `num_batches_tracked`, old names of weight_norm, lazy modules).

    Args:
        target: what to fill, in place.
        path: a zip, legacy or safetensors file.
        key: the part of the checkpoint to use, such as `model`; by default all of it.
        strict: every tensor of either side must have its partner.
        verify: check the whole file first, in a separate pass, so that damage changes nothing; an
            error if it has no checksums. By default as the option `verify_on_load`, which only
            warns of that.
        config: options; by default those in force.

    Returns:
        The keys without a partner.

    Raises:
        ConfigError: `verify`, and the file has no checksums; nothing was changed.
        LoadMismatchError: keys, dtypes or shapes differ, or two targets share a part of their
            memory; nothing was changed, but where a module's own `load_state_dict` was asked, what
            that has loaded before its error. A `RuntimeError`.
        CorruptCheckpointError: the file is damaged, or changed while it was read.
        OSError: it cannot be read.
    """
    config = config or current()
    began = perf_counter()
    state: Any = target
    if isinstance(target, torch.nn.Module):
        state = dict(target.state_dict())
    wanted = _tensors(state)
    with FastFileReader(path, config) as reader:
        unchecked: str | None = None
        is_checked = config.verify_on_load if verify is None else bool(verify)
        if is_checked:
            unchecked = _unchecked(reader, config, bool(verify))
        with paused_collection() as pause:
            container = open_readable(DescriptorSource(reader.fd), reader.name)
            match = _match(wanted, container, key, strict)
            if isinstance(target, torch.nn.Module) and _needs_own(target, state, match):
                pause.end()
                form = container.format
                return LoadedKeys(*load_by_module(target, path, form, key, strict, config))
            match.raise_problems(type(target).__name__)
            fills = _last_of_each(match.fills)
            if reader.size > len(fills) * FEW_BYTES:
                pause.end()  # reading may take long
            reader.attend([fill.target.untyped_storage() for fill in fills])
            _read(reader, fills)
        report_load(
            reader.blocks.counts,
            config,
            path=reader.name,
            container=container.format,
            seconds=perf_counter() - began,
            engine=reader.blocks.engine_name,
            verified=is_checked and unchecked is None,
            fallback=unchecked or reader.blocks.fallback,
            transfer=reader.transfer,
        )
    for fill in fills:
        if not fill.target.is_inference():
            torch.autograd.graph.increment_version(fill.target)
    return match.left


def _unchecked(reader: FastFileReader, config: Config, required: bool) -> str | None:
    """Verify a file; return why not all of it has a checksum, or None.

    Raises:
        ConfigError: `required`, and not all has.
        CorruptCheckpointError: it is damaged.
    """
    report = refuse_damaged(reader.name, reader.fd, config)
    if report.fully_checked:
        return None
    why = "; ".join(report.notes) or report.status
    if required:
        raise unverified_error(reader.name, why)
    warn_unmet("verify_on_load", why)
    return f"not verified: {why}"


# -- modules that have to load by themselves ------------------------------------------------------


def _needs_own(module: torch.nn.Module, state: Mapping[str, Any], match: _Match) -> bool:
    """Return whether only the module's own `load_state_dict` can load a file."""
    if match.is_refused:
        return False
    conversion = conversion_of(module)
    if conversion is Conversion.USERS or not is_in_memory(module, state):
        return True
    if conversion is Conversion.TORCHS:
        return bool(match.problems or match.left.missing_keys or match.left.unexpected_keys)
    return bool(match.problems) and match.only_scalars


# -- what is to be filled ------------------------------------------------------------------------


def _tensors(target: Any) -> dict[str, torch.Tensor]:
    if not isinstance(target, Mapping):
        raise TypeError(f"load_into fills a module or a dictionary, not {type(target).__name__}")
    return {
        ".".join(map(str, path)): value if is_lazy(value) else value.detach()
        for path, value in walk(target)
        if isinstance(value, torch.Tensor)
    }


@dataclass(slots=True)
class _Match:
    """What is to be read, and what differs.

    Attributes:
        fills: tensors of the target and their partners in the file.
        left: the keys without a partner.
        problems: differences, as text.
        is_refused: one of them is not for `load_state_dict` to decide: the dtype, or no memory.
        only_scalars: all of them are of one element with and without a dimension.
    """

    fills: list[_Fill]
    left: LoadedKeys
    problems: list[str] = field(default_factory=list)
    is_refused: bool = False
    only_scalars: bool = True

    def raise_problems(self, name: str) -> None:
        """Raise what differs.

        Args:
            name: of the target's type.

        Raises:
            LoadMismatchError: something differs.
        """
        if not self.problems:
            return
        more = len(self.problems) - _SHOWN
        lines = "\n\t".join(self.problems[:_SHOWN])
        rest = f"\n\t... and {more} more" if more > 0 else ""
        raise LoadMismatchError(f"the checkpoint does not fit this {name}:\n\t{lines}{rest}")


def _match(wanted: dict[str, torch.Tensor], index: Container, prefix: str, strict: bool) -> _Match:
    """Return what to read, having compared everything.

    Args:
        wanted: what to fill.
        index: the tensors of the checkpoint.
        prefix: key of the part that is used.
        strict: every tensor of either side must have its partner.

    Raises:
        LoadMismatchError: the checkpoint does not have that part.
    """
    start = f"{prefix}." if prefix else ""
    if prefix and wanted and not any(key == prefix or key.startswith(start) for key in index):
        raise LoadMismatchError(f"there is no tensor under key={prefix!r}{_near(prefix, index)}")
    there = {key[len(start) :] for key in index if key.startswith(start)}
    missing = [key for key in wanted if key not in there]
    unexpected = [key for key in index if key.startswith(start)]
    unexpected = [key[len(start) :] for key in unexpected if key[len(start) :] not in wanted]
    match = _Match([], LoadedKeys(missing, unexpected))
    if strict and missing:
        match.problems.append(f"not in the checkpoint: {_listed(missing)}")
    if strict and unexpected:
        match.problems.append(f"only in the checkpoint: {_listed(unexpected)}")
    match.only_scalars = not match.problems
    for key, target in wanted.items():
        if key not in there:
            continue
        try:
            stored = index.tensor(start + key)
        except ours(UnreadableTensorError) as error:
            match.problems.append(str(error))
            match.only_scalars = False
            continue
        objection = _objection(target, stored)
        if objection is not None:
            match.problems.append(f"{key}: {objection}")
            match.is_refused |= _is_refused(target, stored)
            match.only_scalars &= is_scalar_for(target, stored.shape)
        match.fills.append(_Fill(key, target, stored, index.offset_of(stored)))
    return match


def _is_refused(target: torch.Tensor, stored: TensorEntry) -> bool:
    """Return whether a tensor is not filled by any means."""
    dtype = str(target.dtype).removeprefix("torch.")
    no_memory = target.device.type == "meta" and not is_lazy(target)
    return no_memory or (dtype != stored.dtype and not is_lazy(target))


def _near(prefix: str, index: Container) -> str:
    """List the keys at the depth of one that does not exist, similar ones first."""
    depth = prefix.count(".") + 1
    names = list(dict.fromkeys(".".join(key.split(".")[:depth]) for key in index))
    like = get_close_matches(prefix, names, cutoff=0.5)
    return f"; there are: {_listed([*like, *(name for name in names if name not in like)])}"


def _listed(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown


def _objection(target: torch.Tensor, stored: TensorEntry) -> str | None:
    if is_lazy(target):
        return "it has no shape yet (a lazy module)"
    dtype = str(target.dtype).removeprefix("torch.")
    if type(target) is not torch.Tensor and type(target) is not torch.nn.Parameter:
        return f"a {type(target).__name__} cannot be filled in place"
    if (why := why_not_filled(target)) is not None:
        return why
    if dtype != stored.dtype:
        return f"its dtype is {dtype}, in the checkpoint {stored.dtype}"
    if tuple(target.shape) != stored.shape:
        return f"its shape is {tuple(target.shape)}, in the checkpoint {stored.shape}"
    if target.is_conj() or target.is_neg():
        return "it is conjugated or negated: resolve_conj() and resolve_neg() it first"
    return None


# -- reading -------------------------------------------------------------------------------------


def _last_of_each(fills: Sequence[_Fill]) -> list[_Fill]:
    """Return the last of those that fill the same memory (tied weights): its values would remain.

    Raises:
        LoadMismatchError: two targets share memory otherwise.
    """
    unique: dict[tuple[Any, ...], _Fill] = {}
    for fill in fills:
        view = fill.target
        if view.numel():
            spot = (view.device, view.data_ptr(), view.shape, view.stride(), view.dtype)
            unique.pop(spot, None)
            unique[spot] = fill
    pair = overlapping((fill.key, fill.target) for fill in unique.values())
    if pair is not None:
        raise LoadMismatchError(
            f"{pair[0]!r} and {pair[1]!r} of what is to be filled share a part of their memory: "
            "clone() one of them first"
        )
    return list(unique.values())


def _read(reader: FastFileReader, fills: Sequence[_Fill]) -> None:
    """Fill the targets."""
    plain: list[ReadExtent] = []
    others: list[_Fill] = []
    for fill in fills:
        extent = direct_extent(fill.base, meta_of(fill.stored), fill.target, reader.ring)
        if extent is None:
            others.append(fill)
        else:
            plain.append(extent)
    reader.read_into(plain)
    for fill in others:
        read_tensor_into(reader, fill.base, meta_of(fill.stored), fill.target)
