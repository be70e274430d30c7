"""A save by NVRx's persistent worker, a spawned process. Argument: the file to write.

Prints, as JSON, what the worker found: the engine of its save, and whether torch's function that
saves is the patched one. NVRx's wrapper (`TorchAsyncCheckpoint`) puts this call together once it
has copied tensors from the GPU; what is called, and by whom, is the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest


def save(state: dict[str, Any], path: str) -> None:
    """Run in the worker."""
    torch.save(state, path)
    package = sys.modules.get("fastserial")
    report = package.last_save_report() if package is not None else None
    found = {
        "pid": os.getpid(),
        "engine": report.engine if report is not None else None,
        "patched": torch.serialization._save.__code__.co_filename != torch.serialization.__file__,
    }
    Path(f"{path}.json").write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    path = sys.argv[1]
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.manual_seed(0)
    queue = AsyncCallsQueue(persistent=True)
    request = AsyncRequest(save, ({"weights": torch.randn(4, 1 << 20)}, path), [], {})
    queue.schedule_async_request(request)
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    queue.close()
    torch.distributed.destroy_process_group()
    found = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps({**found, "own": found.pop("pid") == os.getpid()}))


if __name__ == "__main__":
    main()
