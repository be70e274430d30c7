"""From samples to what is shown: medians, and ratios of runs of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.rotation import Measured
from fastserial.bench.measuring.rows import DURABLE, OVERWRITE
from fastserial.bench.measuring.units import GB
from fastserial.reports import Latency

__all__ = ["Line", "Spread", "line_of", "paired", "summarize", "unsteadiness"]

_STEADY = 2.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its least and greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])


@dataclass(frozen=True, slots=True)
class Line:
    """One row's result.

    Attributes:
        nbytes: of the file.
        seconds, bandwidth: wall clock, and bytes per second.
        to_fio: bandwidth over that of fio's best row, round by round; None without fio and for
            rows that promise less than fio's (its final fsync).
        to_stock: the same over the row of stock torch that gives the same promise (1 for itself).
        cpu_per_gb: processor seconds per 10⁹ bytes.
        extra_bytes: highest peak of extra memory; None where unknown.
        identical: whether its bytes are stock's; None if not compared.
        equal: whether what was read back is what was written; None if not read back.
        latency: of the single writes in the round with the median time, where known.
        fallback: why a run did not go the fastest way, if any did not.
    """

    name: str
    group: str
    nbytes: int
    samples: tuple[Sample, ...]
    seconds: Spread
    bandwidth: Spread
    to_fio: Spread | None
    to_stock: Spread | None
    cpu_per_gb: Spread
    extra_bytes: int | None
    latency: Latency | None
    fallback: str | None
    identical: bool | None = None
    equal: bool | None = None

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found in what it wrote."""
        return self.identical is not False and self.equal is not False


def paired(samples: Sequence[Sample], base: Sequence[Sample]) -> Spread:
    """Return the ratio of bandwidths, each run over the base's run of the same round."""
    pairs = zip(samples, base, strict=True)
    return Spread.of(mine.bandwidth / theirs.bandwidth for mine, theirs in pairs)


def summarize(measured: Sequence[Measured], fio: Sequence[str] = ()) -> list[Line]:
    """Return a line for each row; `fio` names its rows, of which the faster is the yardstick."""
    by_name = {one.row.name: one.samples for one in measured}
    bases = {one.row.stock for one in measured}
    yardstick = max((by_name[name] for name in fio), key=_median_bandwidth, default=None)
    lines = []
    for one in measured:
        base = one.row.name if one.row.name in bases else one.row.stock
        synced = one.row.group in (DURABLE, OVERWRITE)
        stock, fio_samples = by_name.get(base or ""), yardstick if synced else None
        row = one.row
        line = line_of(row.name, row.group, one.samples, stock, fio_samples, one.equal)
        lines.append(replace(line, identical=one.identical))
    return lines


def unsteadiness(lines: Sequence[Line]) -> float | None:
    """Return by what factor the durable rows varied, each from its slowest run to its fastest.

    The median of the rows: a single row says little. None if they are steady
    enough for their ratios to be quoted.
    """
    spreads = [line.bandwidth for line in lines if line.group == DURABLE]
    factor = statistics.median([spread.high / spread.low for spread in spreads] or [1.0])
    return factor if factor > _STEADY else None


def line_of(
    name: str,
    group: str,
    samples: Sequence[Sample],
    stock: Sequence[Sample] | None = None,
    fio: Sequence[Sample] | None = None,
    equal: bool | None = None,
) -> Line:
    """Return a row's result, compared with what stock torch and fio did in the same rounds."""
    peaks = [sample.extra_bytes for sample in samples if sample.extra_bytes is not None]
    middle = sorted(samples, key=lambda sample: sample.seconds)[len(samples) // 2]
    return Line(
        name=name,
        group=group,
        nbytes=samples[-1].nbytes,
        samples=tuple(samples),
        seconds=Spread.of(sample.seconds for sample in samples),
        bandwidth=Spread.of(sample.bandwidth for sample in samples),
        to_fio=paired(samples, fio) if fio else None,
        to_stock=paired(samples, stock) if stock else None,
        cpu_per_gb=Spread.of(s.cpu_seconds / s.nbytes * GB for s in samples),
        extra_bytes=max(peaks, default=None),
        latency=middle.latency,
        fallback=next((sample.fallback for sample in samples if sample.fallback), None),
        equal=equal,
    )


def _median_bandwidth(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.bandwidth for sample in samples)
