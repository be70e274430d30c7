"""`fastserial bench tensor` and `bench model`: one checkpoint, every writer there is, and fio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench.measuring.rotation import Plan
from fastserial.bench.measuring.rows import Row
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.studies.comparison import Comparison, compare
from fastserial.bench.subjects.contents import tensors_of, unshared
from fastserial.bench.subjects.model_state import ModelRecipe, check_gpu, model_state
from fastserial.bench.subjects.payload import mixed_state
from fastserial.bench.subjects.peers import engine_rows, peer_rows
from fastserial.bench.subjects.saving import Format, check_torch
from fastserial.bench.subjects.torch_rows import torch_rows
from fastserial.reports import format_bytes

__all__ = ["Method", "run_model", "run_tensor"]

_HEADROOM = 256 << 20


@dataclass(frozen=True, slots=True)
class Method:
    """How to measure.

    Attributes:
        folder: where to write.
        formats: torch's containers to save.
        runs: rounds that count; one warm-up comes before.
        loose: also save as users do who do not wait for the disk.
        peers: also other engines and packages, as far as they are installed.
        with_fio: compare with fio.
        pause: seconds of rest between two runs.
    """

    folder: Path
    formats: tuple[Format, ...] = ("zip", "legacy")
    runs: int = 5
    loose: bool = True
    peers: bool = True
    with_fio: bool = True
    pause: float = 0.3


def run_tensor(
    nbytes: int, gpu: bool, method: Method, say: Callable[[str], None] = lambda text: None
) -> Comparison:
    """Save a state dict of one tensor of about `nbytes` bytes, on the GPU if `gpu`.

    Raises:
        BenchError: no GPU, too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    if gpu:
        check_gpu(nbytes)
    say("making the tensor")
    state = mixed_state(nbytes, 1)
    if gpu:
        state = {name: tensor.cuda() for name, tensor in state.items()}
    return _compare(state, "one tensor" + _ON_GPU * gpu, method, say)


def run_model(
    recipe: ModelRecipe, method: Method, say: Callable[[str], None] = lambda text: None
) -> Comparison:
    """Save the checkpoint of a model; the rest as for `run_tensor`."""
    check_torch()
    say("making the model")
    state = model_state(recipe)
    words = [recipe.model, "float16 weights" if recipe.half else ""]
    words.append("Adam's states in float32" if recipe.optimizer else "")
    return _compare(state, ", ".join(filter(None, words)) + _ON_GPU * recipe.gpu, method, say)


_ON_GPU = " on the GPU"


def _compare(state: object, what: str, method: Method, say: Callable[[str], None]) -> Comparison:
    nbytes = sum(tensor.nbytes for tensor in unshared(state).values())
    count = len(tensors_of(state))
    others, missing = _others(state, method)
    with scratch(method.folder, nbytes + _HEADROOM) as folder:
        return compare(
            lambda small_pages: [
                *torch_rows(state, method.formats, loose=method.loose, small_pages=small_pages),
                *others,
            ],
            f"{what}: {count:,} tensors, {format_bytes(nbytes)}",
            nbytes,
            folder,
            Plan(method.runs, pause=method.pause),
            with_fio=method.with_fio,
            missing=missing,
            say=say,
        )


def _others(state: object, method: Method) -> tuple[list[Row], dict[str, str]]:
    if not method.peers:
        return [], {"other engines and packages": "switched off (--no-peers)"}
    engines, missing = engine_rows(state, method.formats)
    peers, absent = peer_rows(state, method.formats, method.loose)
    return [*engines, *peers], {**missing, **absent}
