"""JSON in files that may be hostile: the header of safetensors, lists of files."""

from __future__ import annotations

import json
from typing import Any

from fastserial.errors import UnreadableCheckpointError

_LEAST_MEMORY = 128 * 1024 * 1024
_MEMORY_RATIO = 24  # a header of tensors takes some 10 bytes of memory for each of its own
_COSTS = ((b"{", 256), (b"[", 72), (b",", 48), (b":", 96))  # bytes of memory at most


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text, once it is clear that it takes no more than such texts do.

    Raises:
        ValueError, RecursionError: it is no JSON.
        UnreadableCheckpointError: it takes far more memory.
    """
    cost = len(text) + sum(cost * text.count(sign) for sign, cost in _COSTS)
    if cost > max(_LEAST_MEMORY, _MEMORY_RATIO * len(text)):
        raise UnreadableCheckpointError(f"its JSON takes up to {cost} bytes of memory")
    return json.loads(text)
