"""The search behind `fastserial tune`: which settings to try, and whether to believe them.

Nothing here does I/O: what a save with given settings takes is asked of a function.

The search goes along one option after the other, from the defaults on. All values of an option
race in interleaved rounds with the defaults, and the slower half leaves after each round. What it
finds is only a candidate: of many noisy values the best one is often just the luckiest. So the
candidate and the defaults are measured anew, in pairs, and the candidate must win there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastserial.tuning.store import Settings

__all__ = ["LEAST_PAIRS", "MAX_MEMORY", "Space", "Verdict", "compare", "judge", "search"]

LEAST_PAIRS = 7
MAX_MEMORY = 64 << 20  # bytes of staging that settings may take
_GAIN = 0.03  # less is not worth other settings
_LOSS = 0.03
_CHANCE = 0.05  # that equal settings win as many pairs
_BETTER = 1.02  # over the best so far, to go on from there
_ROUNDS = 3
_PASSES = 2
_AXES = ("block_size", "parallel", "queue_depth", "threads", "engine")

MeasureSave = Callable[[Settings], float]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Space:
    """The values to try. Sizes are bytes."""

    engines: tuple[str, ...] = ("threads",)
    block_sizes: tuple[int, ...] = tuple((1 << 19) << i for i in range(6))  # 512 KiB to 16 MiB
    queue_depths: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 32)
    threads: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)

    def along(self, base: Settings, axis: str) -> Iterator[Settings]:
        """Yield settings that differ from `base` along one axis and make sense.

        The axis `parallel` is as many blocks in flight as threads.
        """
        if axis == "block_size":
            found = [replace(base, block_size=size) for size in self.block_sizes]
        elif axis == "parallel":
            found = [replace(base, queue_depth=n, threads=n) for n in self.threads]
        elif axis == "queue_depth":
            found = [replace(base, queue_depth=n) for n in self.queue_depths]
        elif axis == "threads":
            found = [replace(base, threads=n) for n in self.threads]
        else:
            found = [replace(base, engine=name) for name in self.engines]
        for one in found:
            fits = one.block_size * one.queue_depth <= MAX_MEMORY
            # threads without a block of their own are never started
            if one != base and fits and one.threads <= one.queue_depth:
                yield one


def search(
    measure: MeasureSave,
    default: Settings,
    space: Space,
    stop: Stop = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> Settings:
    """Return the settings that looked best; they may be the defaults.

    Args:
        measure: makes one save and returns its seconds; infinity if it cannot be made.
        default: where to start, and what every round compares with.
        space: what to try.
        stop: asked after each save; once true, the search ends with what it has.
        say: receives what is being tried.
    """
    best, tried = default, {default}
    for _ in range(_PASSES):
        before = best
        for axis in _AXES:
            rivals = [one for one in space.along(best, axis) if one not in tried]
            tried.update(rivals)
            if stop():
                return best
            if rivals:
                best = _race(measure, default, best, rivals, stop, say)
        if best == before:
            break
    return best


def _race(
    measure: MeasureSave,
    default: Settings,
    best: Settings,
    rivals: Sequence[Settings],
    stop: Stop,
    say: Callable[[str], None],
) -> Settings:
    """Return the fastest of the rivals if it beats the best so far, else that."""
    ratios: dict[Settings, list[float]] = {one: [] for one in rivals}
    incumbent: list[float] = []
    alive = list(rivals)
    for turn in range(_ROUNDS):
        say(f"{_differences(alive, best)} (round {turn + 1})")
        base = measure(default)
        if best != default:
            incumbent.append(base / measure(best))
        for one in alive if turn % 2 == 0 else alive[::-1]:
            ratios[one].append(base / measure(one))
            if stop():
                break
        alive = [one for one in alive if ratios[one]]  # out of time: those that were measured
        alive.sort(key=lambda one: statistics.median(ratios[one]), reverse=True)
        if stop():
            break
        if turn < _ROUNDS - 1:
            alive = alive[: max(1, -(-len(alive) // 2))]
    winner = alive[0]
    mark = statistics.median(incumbent) if incumbent else 1.0
    return winner if statistics.median(ratios[winner]) > mark * _BETTER else best


def _differences(rivals: Sequence[Settings], base: Settings) -> str:
    """Return what the rivals change, such as `block_size 1, 4 MiB`."""
    shown = []
    for name, values in (
        ("block_size", [f"{one.block_size // 1024}KiB" for one in rivals]),
        ("queue_depth", [str(one.queue_depth) for one in rivals]),
        ("threads", [str(one.threads) for one in rivals]),
        ("engine", [one.engine for one in rivals]),
    ):
        if any(getattr(one, name) != getattr(base, name) for one in rivals):
            shown.append(f"{name} {', '.join(values)}")
    return "; ".join(shown)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a candidate replaces the defaults.

    Attributes:
        ratios: of each pair, speed of the candidate over that of the defaults.
        accepted: it does.
        reason: why.
    """

    ratios: tuple[float, ...]
    accepted: bool
    reason: str

    @property
    def gain(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)


def compare(
    measure: MeasureSave,
    default: Settings,
    candidate: Settings,
    pairs: int,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Measure candidate and defaults anew, in pairs, and judge.

    Raises:
        ValueError: fewer pairs than a verdict needs.
    """
    if pairs < LEAST_PAIRS:
        raise ValueError(f"a verdict takes at least {LEAST_PAIRS} pairs, not {pairs}")
    ratios = []
    for turn in range(pairs):
        say(f"pair {turn + 1} of {pairs}: {candidate}")
        # what comes second may find the device warm, or busy
        if turn % 2 == 0:
            theirs, mine = measure(default), measure(candidate)
        else:
            mine, theirs = measure(candidate), measure(default)
        ratios.append(theirs / mine)
    return judge(ratios)


def judge(ratios: Sequence[float]) -> Verdict:
    """Return whether a candidate with these ratios (speed over the defaults') replaces them."""
    median = statistics.median(ratios)
    wins = sum(ratio > 1 for ratio in ratios)
    told = f"{median:.2f} × as fast (median of {len(ratios)} pairs)"
    if median < 1 - _LOSS:
        return Verdict(tuple(ratios), False, f"slower: {told}")
    if median < 1 + _GAIN:
        return Verdict(tuple(ratios), False, f"no real gain: {told}")
    if _by_chance(wins, len(ratios)) > _CHANCE:
        return Verdict(
            tuple(ratios), False, f"no steady gain: {told}, faster in {wins} of {len(ratios)}"
        )
    return Verdict(tuple(ratios), True, f"{told}, faster in {wins} of {len(ratios)}")


def _by_chance(wins: int, pairs: int) -> float:
    """Return the probability that one of two equals wins at least `wins` pairs (sign test)."""
    return float(sum(math.comb(pairs, n) for n in range(wins, pairs + 1)) / 2**pairs)
