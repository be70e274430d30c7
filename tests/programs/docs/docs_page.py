"""Run the code of a page: docs_page.py PAGE [BEFORE]; BEFORE makes what the page takes as given.

On several ranks (torchrun), commands and files are the first one's.
"""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
import sys
from pathlib import Path

from support.blocks import blocks_of


def _alone() -> dict[str, str]:
    """The environment without what the test, or torchrun, put there."""
    mine = "PYTHONPATH RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ TORCHELASTIC_".split()
    return {name: value for name, value in os.environ.items() if not name.startswith(tuple(mine))}


def main(page: Path, before: Path | None) -> None:
    first = int(os.environ.get("RANK", "0")) == 0
    names = runpy.run_path(str(before)) if before is not None else {}
    names["__name__"] = "__main__"
    for block in blocks_of(page):
        if not block.runs:
            continue
        if missing := block.missing():
            print(f"{page.name}:{block.line}: not run, needs {', '.join(missing)}")
        elif block.title is not None:
            if first:
                Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            if first:
                print(f"{page.name}:{block.line}: {block.text}", flush=True)
                subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block.text], check=True, env=_alone()
                )
        else:
            text = "\n" * (block.line - 1) + block.text  # tracebacks show the page's lines
            exec(compile(text, str(page), "exec"), names)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()  # else gloo's threads may end the process by SIGABRT
        gc.collect()  # what holds the group in a circle, too


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
