"""An optional progress bar for long saves."""

from __future__ import annotations

import logging
from typing import Any

from fastserial.printable import printable

__all__ = ["ProgressBar", "progress_bar"]

_log = logging.getLogger("fastserial")


class ProgressBar:
    """Counts bytes, on a tqdm bar if there is one.

    A bar that cannot be shown any more (its terminal is gone) is dropped: the save goes on.
    """

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar

    def expect(self, nbytes: int) -> None:
        """Tell how many bytes there will be in all."""
        if self._bar is not None:
            self._bar.total = nbytes
            self._show("refresh")

    def update(self, nbytes: int) -> None:
        """Count bytes that are done."""
        self._show("update", nbytes)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._show("close")

    def _show(self, action: str, *arguments: int) -> None:
        if self._bar is None:
            return
        try:
            getattr(self._bar, action)(*arguments)
        except Exception as error:
            self._bar = None
            _log.warning("the progress bar cannot be shown: %r", error)


def progress_bar(wanted: bool, name: str) -> ProgressBar:
    """Return a bar if it is wanted and tqdm is installed, else one that shows nothing."""
    if not wanted:
        return ProgressBar()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        _log.warning("progress=True needs tqdm: pip install 'fastserial[progress]'")
        return ProgressBar()
    try:
        bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc=printable(name))
    except Exception as error:
        _log.warning("the progress bar cannot be shown: %r", error)
        return ProgressBar()
    return ProgressBar(bar)
