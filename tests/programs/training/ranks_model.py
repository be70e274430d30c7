"""A rank of runs that chance decides, each against its model: `FOLDER SEED EXAMPLES [CONTROL]`.

Prints what was counted. CONTROL breaks the Checkpointer, so that a model must notice.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from support.lives import CONTROLS, Held, Life, Spec, by_chance, slowly
from support.ranks import join

from fastserial import Checkpointer

WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it
KINDS = [(None, None), (None, None), ("copy", 0)]


def main() -> None:
    rank, count = join()
    folder, seed, examples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    made = CONTROLS[sys.argv[4]] if len(sys.argv) > 4 else Checkpointer
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for number in range(examples):
        dice = random.Random(f"{seed} {number}")
        spec = Spec.of(dice, WIDTH, ["", "", "each", "state_dict"])
        if made is not Checkpointer:  # what is refused is refused later
            left = tuple(pair for pair in spec.entries if pair[0] != "sparse")
            spec = replace(spec, entries=left, named="")
        kind = dice.choice(KINDS)
        held = Held()
        with slowly(held):
            life = Life(folder / str(number), spec, *kind, rank, count, made)
            life.held = held
            try:
                by_chance(life, dice, 10)
            except BaseException:
                print(f"example {number}: {spec} {kind} {dict(life.counts)}", flush=True)
                raise
        counts += life.counts
    print(" ".join(f"{name.replace(' ', '_')}={counts[name]}" for name in sorted(counts)))


main()
