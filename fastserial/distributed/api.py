"""The public calls: one file of torch's, or a folder of safetensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from fastserial.distributed.load.session import load_file
from fastserial.distributed.save.safetensors import save_folder
from fastserial.distributed.save.session import TIMEOUT, Writers, save_file
from fastserial.errors import ConfigError
from fastserial.reports import LoadReport, SaveReport

if TYPE_CHECKING:
    import torch.distributed as dist


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    writers: Writers = "all",
    timeout: float = TIMEOUT,
    merge: Literal["union"] | None = None,
    base: str | os.PathLike[str] | None = None,
    format: Literal["torch", "safetensors"] = "torch",
    shard_nbytes: int = 50_000_000_000,
) -> SaveReport:
    """Write what `torch.save` of the whole state would write, from all ranks. Collective.

        distributed.save({"model": model, "step": 7}, "ckpt.pt")  # on every rank

    The file is an ordinary torch file: byte for byte the one that `torch.save` on rank 0 would
    write, had it gathered the full state on the host.

    Args:
        obj: a nest of dicts, lists and tuples of whatever `torch.save` takes, with plain tensors,
            DTensors, FlatShards, modules and optimizers (these with their modules). What is no
            tensor, the buffers of modules, and plain tensors of less than 1 MiB, count as rank 0
            has them; larger plain tensors, those of an optimizer, its parameter groups, and
            integers under a key such as "step" have to be equal on all ranks (option `compare`).
            No rank may have a key that rank 0 does not have.
        path: on a file system that all ranks see. As rank 0 gives it.
        group: the ranks that save; by default all.
        writers: which ranks write: all, one of each node, or a number of them.
        timeout: seconds after which a rank that is not heard from counts as lost.
        merge: "union": ranks may have different keys, as the stages of a pipeline do; the file has
            all of them, in the order of the ranks.
        base: an earlier checkpoint, as rank 0 gives it: what a rank has as it is there is not
            written but cloned, where the file system has reflinks; as `fastserial.save`.
        format: "safetensors": `path` is a folder, which becomes what Hugging Face's
            `save_pretrained` makes of a model's weights; `obj` is the module, or a dictionary of
            tensors by their names. Of tied weights the first stays.
        shard_nbytes: most bytes of tensors in a file of that folder, by default as transformers 5.

    Returns:
        What this rank knows of the save; on rank 0 with a line for each rank.

    Raises:
        DistributedError: any rank failed, all raise it; the previous file is intact, unless a
            rank was lost after the new one took its place. Also if large plain tensors differ
            between ranks, if a rank has a key that the file would lack, or if a tensor is sparse,
            quantized or otherwise none that `load` could fill.
        MismatchedCallError: a rank makes another call, for another path or of another step. One
            that skipped a call meets the others again in the next one.
        ConfigError: several processes were launched together, without `init_process_group`.
        Exception: an object cannot be pickled, or a `state_dict()` failed, on this rank.
    """
    if format == "torch":
        return save_file(obj, path, group, writers, timeout, merge, base)
    if format != "safetensors" or merge is not None or base is not None:
        raise ConfigError(
            'format must be "torch" or "safetensors", the latter without merge and base, not '
            f"{format!r}"
        )
    return save_folder(obj, path, group, writers, timeout, shard_nbytes)


def load(
    path: str | os.PathLike[str],
    into: Any,
    *,
    group: dist.ProcessGroup | None = None,
    broadcast: bool = True,
    strict: bool = True,
    cast: bool = False,
    timeout: float = TIMEOUT,
) -> LoadReport:
    """Fill what the ranks hold, in place, from one file of `torch.save`. Collective.

        target = {"model": model, "step": 0}
        distributed.load("ckpt.pt", target)  # on every rank

    The file is any that `torch.load` reads with `weights_only=True`: of stock torch or of `save`,
    zip or legacy, saved from any placement; or a folder with the safetensors files of a model; or
    one of torch.distributed.checkpoint. Only the bytes that some rank needs are read, each by one
    rank, which sends it on.

    Args:
        path: the file; every rank must see it, or a copy of it.
        into: containers as in the file, whose leaves are tensors, DTensors or FlatShards, which
            are filled; modules and optimizers, new ones included; and other values, which are
            replaced by the file's. Ranks may hold different keys.
        group: its ranks take part; by default all. Without torch.distributed a process is alone.
        broadcast: False: every rank reads what it needs, and sends nothing.
        strict: what a rank wants must be in the file, and what is in the file some rank must want.
        cast: convert what has another dtype in the file.
        timeout: seconds after which a rank that is not heard from counts as lost.

    Returns:
        What happened, with a line for each rank; also `fastserial.last_load_report()`.

    Raises:
        LoadMismatchError: keys, dtypes or shapes differ on some rank. Nothing was changed.
        CorruptCheckpointError: a checksum is wrong (option `verify_on_load`). The bytes are in
            the tensors by then.
        DistributedError: a rank failed, died or was silent; it names the rank and the cause. It is
            a `FileNotFoundError` or `ConfigError`, too, if that is what the rank failed with. The
            group can be used on, unless its rank is dead.
        Exception: code of the user's failed on this rank, such as a module's load hook.
        RuntimeError: the process group has no store (MPI).
    """
    return load_file(path, into, group, broadcast, strict, cast, timeout)
