"""A rank that resumes from files that fit or do not: `FOLDER SEED ALONE SHARE`.

Prints what became of each pair, one a line: a digest of the state, or the class of the error. With
ALONE=1 the process has no process group. Of modules it takes a SHARE of the pairs.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from support import own_loading
from support.identity import digest
from support.ranks import alone, join
from torch import nn

from fastserial import Checkpointer
from fastserial.errors import LoadMismatchError

State = dict[str, Any]


def _dropped(state: State, dice: random.Random) -> None:
    state.pop(dice.choice(list(state)))


def _added(state: State, dice: random.Random) -> None:
    state["more"] = torch.ones(dice.randrange(3))


def _moved(state: State, dice: random.Random) -> None:
    key = dice.choice(list(state))
    state[f"{key}x"] = state.pop(key)


def _tensor_key(state: State, dice: random.Random) -> str:
    return dice.choice([key for key, value in state.items() if isinstance(value, torch.Tensor)])


def _reshaped(state: State, dice: random.Random) -> None:
    key = _tensor_key(state, dice)
    state[key] = dice.choice([state[key].reshape(-1)[:1], state[key].unsqueeze(0)]).clone()


def _cast(state: State, dice: random.Random) -> None:
    key = _tensor_key(state, dice)
    state[key] = state[key].to(dice.choice([torch.float64, torch.int32]))


def _plain(state: State, dice: random.Random) -> None:
    state[dice.choice(list(state))] = dice.choice([3, "text", None, [1.0]])


CHANGES: dict[str, Callable[[State, random.Random], None]] = {
    "as it is": lambda state, dice: None,
    "dropped": _dropped,
    "added": _added,
    "moved": _moved,
    "reshaped": _reshaped,
    "cast": _cast,
    "plain": _plain,
}


def _outcome(target: Any, resume: Callable[[], object]) -> str:
    try:
        resume()
    except Exception as error:
        for kind in (LoadMismatchError, KeyError, TypeError, AttributeError):
            if isinstance(error, kind):
                return kind.__name__
        return f"{type(error).__name__}: {error}"
    return digest(target.state_dict())


class Pairs:
    """Files and what is resumed from them."""

    def __init__(self, folder: Path, seed: str, first: Callable[[Callable[[], object]], None]):
        self._folder, self._seed, self._first = folder, seed, first

    def resumed(self, name: str, saved: State, state: State, target: Any, **options: Any) -> None:
        """Write a file, on rank 0, resume from it, and print what became of a target."""
        file = self._folder / "step-00000001.pt"
        value = {**saved, "checkpointer": {"version": 1, "step": 1}}
        self._first(lambda: torch.save(value, file))
        with Checkpointer(self._folder, state, timeout=60) as checkpointer:
            out = _outcome(target, lambda: checkpointer.resume(**options))
        print(f"{name}, {options}: {out}", flush=True)

    def modules(self, share: float) -> None:
        for name, (make, change) in own_loading.CASES.items():
            for kind, spoil in CHANGES.items():
                dice = random.Random(f"{self._seed} {name} {kind}")
                if dice.random() > share:
                    continue
                torch.manual_seed(1)
                made = change(make().state_dict())
                if not any(isinstance(one, torch.Tensor) for one in made.values()):
                    continue
                saved: Any = OrderedDict(made)
                if hasattr(made, "_metadata"):
                    saved._metadata = made._metadata
                spoil(saved, dice)
                for strict in (True, False):
                    torch.manual_seed(2)
                    module = own_loading.spoilt(make())
                    state = {"m": module}
                    self.resumed(f"{name}, {kind}", {"m": saved}, state, module, strict=strict)
                torch.manual_seed(2)
                module = own_loading.spoilt(make())
                file = {"m": saved, "of another program": torch.ones(2)}
                self.resumed(f"{name}, {kind}", file, {"n": module}, module, rename={"m": "n"})

    def optimizers(self) -> None:
        for name, make in own_loading.OPTIMIZERS.items():
            for saved, steps in product((0, 2), (0, 3)):
                only = None if saved == steps else ["o"]
                first, second = _trained(make, saved), _trained(make, steps)
                file = {key: one.state_dict() for key, one in first.items()}
                what = f"{name} after {saved} steps, into one after {steps}"
                self.resumed(what, file, second, second["o"], only=only)
            other = own_loading.OPTIMIZERS["sgd"] if name != "sgd" else own_loading.Asking
            file = {key: one.state_dict() for key, one in _trained(other, 2).items()}
            second = _trained(make, 1)
            self.resumed(f"{name}, from another", file, second, second["o"])


def _trained(make: Callable[[Any], Any], steps: int) -> State:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        for one in model.parameters():
            one.grad = None
    return {"m": model, "o": optimizer}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    is_alone = sys.argv[3] == "1"
    if not is_alone:
        join()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pairs = Pairs(folder, sys.argv[2], (lambda step: step()) if is_alone else alone)
    pairs.modules(float(sys.argv[4]))
    pairs.optimizers()


main()
