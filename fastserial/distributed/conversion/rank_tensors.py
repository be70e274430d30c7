"""What several ranks saved under one key, as one tensor: replicas once, shards put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from fastserial.checkpoints.mapped_source import MappedSource
from fastserial.checkpoints.streaming import elements_of
from fastserial.distributed.conversion.assembled import Assembled, ChunkedMemory, Filed
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.pieces import (
    Mesh,
    TensorSpec,
    as_dtensor,
    holding,
    in_place,
    views,
)
from fastserial.errors import FastserialError, LoadMismatchError
from fastserial.memory.storages import is_plain

__all__ = ["RankTensors"]

_BLOCK = 1024 * 1024  # bytes of two tensors that are compared at once

View = tuple[int, torch.Tensor]  # of which rank


class RankTensors:
    """Puts tensors together; all of them lie in mapped files."""

    def __init__(
        self,
        source: MappedSource,
        made: Assembled,
        ranks: Iterable[int],
        refuse: Callable[[str, str], Exception],
    ) -> None:
        """Put none together yet.

        Args:
            source: the files.
            made: makes the new tensors.
            ranks: that have a file.
            refuse: makes an error of a key and of what is wrong.
        """
        self._source = source
        self._made = made
        self._ranks = {rank: rank for rank in ranks}
        self._refuse = refuse
        self._grids: dict[int, list[int]] = {}  # the ranks of meshes, by their `id`
        self._meshes: dict[int, tuple[int, ...]] = {}  # those that have a file, -1 for others
        self._known: dict[Any, torch.Tensor] = {}  # by what they are made of

    def of(self, key: str, leaves: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return what the tensors of some ranks are together.

        Raises:
            Exception: what `refuse` makes: they do not go together.
        """
        sharded = {rank: as_dtensor(leaf) is not None for rank, leaf in leaves.items()}
        if not any(sharded.values()):
            first, *others = leaves.items()
            for other in others:
                self._compare(key, first, other)
            return first[1]
        for rank, is_sharded in sharded.items():
            if not is_sharded:
                raise self._refuse(key, f"it is a DTensor, but not on rank {rank}")
        return self._whole(key, leaves)

    # -- replicas ------------------------------------------------------------------------------

    def _compare(self, key: str, one: View, other: View) -> None:
        """Raise if two ranks have different tensors."""
        (rank, a), (other_rank, b) = one, other
        ranks = f"ranks {rank} and {other_rank}"
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise self._refuse(key, f"{ranks} have different tensors: {_words(a)} and {_words(b)}")
        if not self._is_plain(a) or not self._is_plain(b):
            raise self._refuse(key, f"it is no plain tensor, which {ranks} both have")
        if a.device.type == b.device.type == "meta":
            return
        if "meta" in (a.device.type, b.device.type) or not self._same_bytes(a, b):
            raise self._refuse(
                key, f"{ranks} have different values, and nothing says how they go together"
            )

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor) and not tensor.is_nested

    def _same_bytes(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        if not a.numel() or self._same_records(a, b):
            return True
        left, right = elements_of(a, self._source), elements_of(b, self._source)
        buffers = [torch.empty(_BLOCK, dtype=torch.uint8, device="cpu") for _ in range(2)]
        for start in range(0, left.nbytes, _BLOCK):
            count = min(_BLOCK, left.nbytes - start)
            for memory, buffer in zip((left, right), buffers, strict=True):
                memory.copy_to(buffer.data_ptr(), start, count)
            if not torch.equal(buffers[0][:count], buffers[1][:count]):
                return False
        return True

    def _same_records(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Return whether both are the same part of storages with one checksum."""
        ours, theirs = a.untyped_storage(), b.untyped_storage()
        if (ours.nbytes(), _place(a)) != (theirs.nbytes(), _place(b)):
            return False
        crc = self._source.crc_of(ours)
        return crc is not None and crc == self._source.crc_of(theirs)

    # -- shards --------------------------------------------------------------------------------

    def _whole(self, key: str, leaves: dict[int, Any]) -> torch.Tensor:
        locals_, specs = self._held(key, leaves)
        spec = next(iter(specs.values()))
        same = tuple((rank, *_memory(local)) for rank, local in locals_.items() if local.numel())
        tied = self._known.get((spec, same))
        if tied is not None:
            return tied.detach()
        shards: dict[Box, View] = {}
        for rank, local in locals_.items():
            try:
                parts = views(spec, rank, local, key)
            except LoadMismatchError as error:
                raise self._refuse(key, str(error).removeprefix(f"{key}: ")) from error
            for box, view in parts:
                if box in shards:
                    self._compare(key, shards[box], (rank, view))
                else:
                    shards[box] = rank, view
        if sum(box.numel for box in shards) != spec.numel:
            raise self._refuse(key, self._lacking(leaves))
        filed = [
            Filed(elements_of(view, self._source), _in_bytes(box, view))
            for box, (_, view) in shards.items()
            if view.numel()
        ]
        rows = ChunkedMemory((*spec.shape, spec.dtype.itemsize), filed)
        made = self._known[spec, same] = self._made.tensor(spec.shape, spec.dtype, rows)
        return made

    def _held(
        self, key: str, leaves: dict[int, Any]
    ) -> tuple[dict[int, torch.Tensor], dict[int, TensorSpec]]:
        """Return each rank's own tensor, and how it is placed: the same on all of them."""
        locals_: dict[int, torch.Tensor] = {}
        specs: dict[int, TensorSpec] = {}
        for rank, leaf in leaves.items():
            try:
                locals_[rank], specs[rank] = self._holding(key, rank, leaf)
            except (FastserialError, OSError, MemoryError):
                raise
            except Exception as error:  # what a made-up DTensor may raise
                what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise self._refuse(key, f"it is no DTensor that torch makes ({what})") from error
        first = min(specs)
        for rank, spec in specs.items():
            if _likeness(spec) != _likeness(specs[first]):
                raise self._refuse(key, f"ranks {first} and {rank} have it in different ways")
        grids = {grid: None for spec in specs.values() for grid in _mesh(spec).grids}
        one = _mesh(specs[first])._replace(grids=tuple(grids))
        return locals_, {rank: replace(spec, held=one) for rank, spec in specs.items()}

    def _holding(self, key: str, rank: int, leaf: Any) -> tuple[torch.Tensor, TensorSpec]:
        saver = getattr(leaf.device_mesh, "_rank", None)
        if saver not in (None, rank):
            raise self._refuse(key, f"the file of rank {rank} was saved by rank {saver}")
        shard = leaf._local_tensor
        if not self._is_plain(shard) or shard.device.type != "cpu":
            raise self._refuse(key, f"its shard on rank {rank} is no plain tensor")
        for entry in getattr(leaf._spec, "shard_order", None) or ():
            if list(entry.mesh_dims) != sorted(entry.mesh_dims):
                raise self._refuse(key, "its mesh dimensions shard it in an order of their own")
        self._know(leaf.device_mesh, rank)
        try:
            held = holding(leaf, key, rank, self._ranks, self._meshes)
        except LoadMismatchError as error:
            raise self._refuse(key, str(error).removeprefix(f"{key}: ")) from error
        return held.local, held.spec

    def _know(self, mesh: Any, rank: int) -> None:
        """Find out the ranks of a mesh, which torch tells of a part of one only in a job."""
        if id(mesh) in self._grids:
            return
        layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
        if layout is None or ranks is None:  # of an older torch: the mesh keeps them
            grid = mesh.mesh
        else:
            parts = layout.remap_to_tensor(ranks)
            grid = next((part for part in parts if rank in part), parts[0])
        self._grids[id(mesh)] = in_place(grid.tolist())
        self._meshes[id(mesh)] = tuple(self._ranks.get(one, -1) for one in self._grids[id(mesh)])

    def _lacking(self, leaves: dict[int, Any]) -> str:
        """Say which ranks' files would be needed."""
        needed = {rank for leaf in leaves.values() for rank in self._grids[id(leaf.device_mesh)]}
        lacking = sorted(needed - leaves.keys())
        if not lacking:
            return "the shards do not make it up"
        return f"shards are missing, those of rank {', '.join(map(str, lacking))}"


def _mesh(spec: TensorSpec) -> Mesh:
    held: Any = spec.held  # of a DTensor
    return held  # type: ignore[no-any-return]


def _likeness(spec: TensorSpec) -> tuple[Any, ...]:
    return spec.shape, spec.dtype, _mesh(spec).shape, _mesh(spec).splits


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _memory(local: torch.Tensor) -> tuple[Any, ...]:
    return local.untyped_storage().data_ptr(), *_place(local)


def _in_bytes(box: Box, view: torch.Tensor) -> Box:
    return Box((*box.offsets, 0), (*box.sizes, view.itemsize))


def _words(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
