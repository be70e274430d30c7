"""A rank of runs that chance decides, each against its model: `FOLDER SEED EXAMPLES [CONTROL]`.

Prints what was counted. CONTROL breaks the Checkpointer, so that a model must notice.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from support.beside import Gate
from support.lives import BUDGETS, CONTROLS, Life, Spec, by_chance, slowly
from support.ranks import join

from fastserial import Checkpointer

WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it


def main() -> None:
    rank, count = join()
    folder, seed, examples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    made = CONTROLS[sys.argv[4]] if len(sys.argv) > 4 else Checkpointer
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for number in range(examples):
        dice = random.Random(f"{seed} {number}")
        spec = Spec.of(dice, WIDTH)
        budget = dice.choice(BUDGETS)
        gate = Gate(0.03)
        with slowly(gate):
            life = Life(folder / str(number), spec, budget, rank, count, made)
            life.gate = gate
            try:
                by_chance(life, dice, 10)
            except BaseException:
                print(f"example {number}: {spec} {budget} {dict(life.counts)}", flush=True)
                raise
        counts += life.counts
    print(" ".join(f"{name.replace(' ', '_')}={counts[name]}" for name in sorted(counts)))


main()
