"""A run that saves and mirrors all the time, until it is killed: `mirrored.py FOLDER URL SPOILED`.

Prints each step whose file is in the mirror. SPOILED=1: the manifest is written before the file.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import fastserial
from fastserial.training.mirror import Mirror


def main() -> None:
    folder, url, spoiled = sys.argv[1:]
    if spoiled == "1":
        write = Mirror._write_manifest

        def whole_at_once(self: Mirror, step: int, manifest: Any) -> None:
            spoiled = {"nbytes": 0, "crc32": 0, "written": 0, "metrics": {}}
            write(self, step, {**spoiled, **manifest})

        Mirror._write_manifest = whole_at_once  # type: ignore[method-assign]
    weight = torch.zeros(300_000)
    with fastserial.Checkpointer(
        folder,
        {"weight": weight},
        keep=2,
        mirror=url,
        mirror_bandwidth=12e6,  # an upload takes a tenth of a second: kills hit it
    ) as checkpointer:
        step = checkpointer.resume()
        assert weight[0] == step, (weight[0], step)
        print("start", step, flush=True)
        while True:
            step += 1
            weight.fill_(step)
            checkpointer.save(step)
            checkpointer.wait()
            mirror = checkpointer._mirror
            assert mirror is not None
            if mirror._newest is not None:
                print(mirror._newest, flush=True)


main()
