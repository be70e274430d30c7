"""Telling what a folder of torch_checkpointing holds: every item, rank by rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from fastserial.checkpoints.inspection import Inspection
from fastserial.checkpoints.rank_folder import RANK_FOLDER, RankFolder, ranks_said

__all__ = ["inspect_rank_folder"]

_MOST_NOTES = 100


def inspect_rank_folder(
    path: str, found: RankFolder, look: Callable[[str], Inspection]
) -> Inspection:
    """Return what the files of a folder hold; keys begin with the item, kinds end with the rank.

    Args:
        path: the folder.
        found: what is in it.
        look: inspects a file.

    Raises:
        CorruptCheckpointError: a file is damaged; names it.
        PickleLimitError: a pickle is larger than the limits.
        OSError: a file cannot be read.
    """
    seen = [
        (item, rank, name, look(os.path.join(path, name)))
        for item, files in found.items.items()
        for rank, name in files.items()
    ]
    said = ranks_said(path, found)
    notes = list(found.notes)
    if said not in (None, found.ranks):
        notes.append(f"{found.metadata}: it was saved by {said} ranks")
    notes += [f"{name}: in no item" for name in found.others]
    notes += [f"{name}: {note}" for _, _, name, one in seen for note in one.notes]
    return Inspection(
        path=path,
        format=RANK_FOLDER,
        bytes=sum(one.bytes for _, _, _, one in seen),
        hints=(
            f"items: {', '.join(found.items)}",
            "1 rank" if found.ranks == 1 else f"ranks 0 to {found.ranks - 1}",
            *seen[0][3].hints,
        ),
        archive_name=None,
        records=tuple(
            (f"{name}: {record}", offset, nbytes)
            for _, _, name, one in seen
            for record, offset, nbytes in one.records
        ),
        tensors=tuple(
            replace(
                tensor,
                key=_under(item, tensor.key),
                storage=None if tensor.storage is None else f"{name}: {tensor.storage}",
                kind=f"{tensor.kind}, rank {rank}",
            )
            for item, rank, name, one in seen
            for tensor in one.tensors
        ),
        storages=tuple(
            replace(
                storage,
                key=f"{name}: {storage.key}",
                tensors=tuple(_under(item, key) for key in storage.tensors),
            )
            for item, _, name, one in seen
            for storage in one.storages
        ),
        imports=tuple(sorted({name for _, _, _, one in seen for name in one.imports})),
        values=sum(one.values for _, _, _, one in seen),
        notes=tuple(notes[:_MOST_NOTES]),
    )


def _under(item: str, key: str) -> str:
    return f"{item}.{key}" if key else item
