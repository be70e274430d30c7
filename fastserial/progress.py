"""An optional progress bar for long saves."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["ProgressBar", "progress_bar"]

_log = logging.getLogger("fastserial")


class ProgressBar:
    """Counts bytes, on a tqdm bar if there is one."""

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar

    def expect(self, nbytes: int) -> None:
        """Tell how many bytes there will be in all."""
        if self._bar is not None:
            self._bar.total = nbytes
            self._bar.refresh()

    def update(self, nbytes: int) -> None:
        """Count bytes that are done."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def progress_bar(wanted: bool, name: str) -> ProgressBar:
    """Return a bar if it is wanted and tqdm is installed, else one that shows nothing."""
    if not wanted:
        return ProgressBar()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        _log.warning("progress=True needs tqdm: pip install 'fastserial[progress]'")
        return ProgressBar()
    return ProgressBar(tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc=name))
