"""What `fastserial bench deepspeed` measures, and what comes back; needs neither torch nor more."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["DeepSpeedBench", "RowResult"]


@dataclass(frozen=True, slots=True)
class DeepSpeedBench:
    """What to measure.

    Attributes:
        model: a name of `fastserial.bench.subjects.models`, or a folder with a transformers config.
        folder: where to write.
        zero_stage: ZeRO 0 to 3.
        world_size: processes on this machine.
        runs: rounds that count; one warm-up comes before.
        legacy: save in the legacy format.
        engine: a second engine of fastserial to measure, or None.
        pause: seconds of rest between two saves.
    """

    model: str
    folder: str
    zero_stage: int = 1
    world_size: int = 1
    runs: int = 3
    legacy: bool = False
    engine: str | None = None
    pause: float = 0.3


@dataclass(slots=True)
class RowResult:
    """One checkpoint engine.

    Attributes:
        name: the engine.
        seconds: of each round, from the barrier before to the barrier after.
        nbytes: of all files of all ranks.
        files: how many there are.
        identical: whether they are stock's, byte for byte; None if not compared.
        problem: why it could not be measured, or None.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0
    files: int = 0
    identical: bool | None = None
    problem: str | None = None
