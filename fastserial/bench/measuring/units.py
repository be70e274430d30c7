"""Sizes as people type them."""

from __future__ import annotations

from fastserial.config import parse_size
from fastserial.errors import ConfigError

__all__ = ["GB", "MB", "parse_bytes"]

MB = 1000**2
GB = 1000**3
_DECIMAL = {"kb": 1000, "mb": MB, "gb": GB, "tb": 1000 * GB}


def parse_bytes(text: str) -> int:
    """Return the bytes that `"3GiB"` (binary), `"3GB"` (decimal) or `"4096"` stand for.

    Raises:
        ConfigError: it is not a size, or not a positive one.
    """
    low = text.strip().lower()
    scale = _DECIMAL.get(low[-2:])
    if scale is None:
        nbytes = parse_size(text)
    else:
        try:
            nbytes = int(float(low[:-2]) * scale)
        except (ValueError, OverflowError):
            raise ConfigError(f"expected a size such as 3GiB or 3GB, not {text!r}") from None
    if nbytes <= 0:
        raise ConfigError(f"expected a size above 0, not {text!r}")
    return nbytes
