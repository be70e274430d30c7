"""A training run whose state and events chance decides, and what stock would have left of it.

At each save a blocking `torch.save` of the same objects is made into memory. After a resume the
objects must be as that file says for the step that `resume` returned, or an error was raised.
"""

from __future__ import annotations

import copy
import io
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import fastserial
from fastserial import Checkpointer
from fastserial.errors import CheckpointFileError
from support.beside import Gate
from support.damage import DAMAGES, damage

KEEP = 2


class Wrong(AssertionError):
    """The state is silently another than the one that stock would have left."""


class Loader:
    """A data loader that knows where it is."""

    def __init__(self, seed: int) -> None:
        self.epoch, self.order = seed, torch.arange(seed % 7 + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "order": self.order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.order = state["epoch"], state["order"].clone()

    def read(self) -> None:
        self.epoch, self.order = self.epoch + 1, torch.arange(self.epoch % 9)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "multi": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4], gamma=0.5),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}
# What a state may hold besides, made of a seed, and how a program changes it.
ENTRIES: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
    "loader": (Loader, Loader.read),
    "counter": (lambda seed: Counter({seed: 1}), lambda x: x.update([1, "b"])),
    "history": (lambda seed: [], lambda x: x.append([1.5, torch.ones(3)])),
    "settings": (
        lambda seed: {"lr": seed / 3, f"only_{seed % 3}": None, "layers": (seed, "x")},
        lambda x: x.update(lr=torch.rand(()).item(), more={"x": [1, 2]}),
    ),
    "average": (lambda seed: torch.full((40_000,), float(seed)), lambda x: x.add_(1)),
    "tensors": (
        lambda seed: {"a": [torch.randn(20_000), torch.randn(3)], "n": torch.tensor(seed)},
        lambda x: x["a"][0].mul_(2).add_(1),
    ),
    "strided": (lambda seed: torch.randn(300, 200).t(), lambda x: x.add_(1)),
    "tied": (
        lambda seed: (lambda one: {"all": one, "part": one[5:10]})(torch.randn(50)),
        lambda x: x["part"].add_(1),
    ),
    "module": (lambda seed: nn.BatchNorm1d(9), lambda x: x.running_mean.add_(1)),
}
BOXES = ("", "", "dict", "list", "deep", "tuple")
BUDGETS = [None, None, 0, 100_000]


@dataclass(frozen=True)
class Spec:
    """What a state holds.

    Attributes:
        entries: names of ENTRIES, and in which container each is.
        boxed: the container of the model and its optimizers.
        inner: the model holds its own average, which the optimizer does not train.
        wide: the optimizer trains a second module and a loose tensor, too.
        loader: each rank has a data loader of its own.
        every, best: `keep_every`, and whether the checkpoint of the least loss is kept.
    """

    optimizer: str
    scheduler: str | None
    entries: tuple[tuple[str, str], ...]
    boxed: str
    inner: bool
    wide: bool
    loader: bool
    every: int | None
    best: bool
    width: int

    @classmethod
    def of(cls, dice: random.Random, width: int = 150) -> Spec:
        """Return any; a weight of the usual width has 88 KiB: more than is copied in any case."""
        names = dice.sample(sorted(ENTRIES), dice.randrange(6))
        return cls(
            dice.choice(sorted(OPTIMIZERS)),
            dice.choice([None, *SCHEDULERS]),
            tuple((name, dice.choice(BOXES)) for name in names),
            dice.choice(BOXES),
            dice.random() < 0.3,
            dice.random() < 0.3,
            dice.random() < 0.4,
            dice.choice([None, None, 3]),
            dice.random() < 0.3,
            width,
        )


def _boxed(kind: str, value: Any) -> Any:
    if kind == "dict":
        return {"it": value, "label": 1}
    if kind == "deep":
        return {"a": [{"it": value}], "label": 1}
    return [value, "label"] if kind == "list" else (value, "label")


def _unboxed(kind: str, box: Any) -> Any:
    if kind == "deep":
        return box["a"][0]["it"]
    return box["it" if kind == "dict" else 0]


class Objects:
    """The objects of a run, and the mapping that its Checkpointer gets."""

    def __init__(self, spec: Spec, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        self.spec, self.rank, width = spec, rank, spec.width
        self.net: Any = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        )
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.critic = nn.Linear(width, 3)
        self.alpha = torch.zeros((), requires_grad=True)
        trained: list[dict[str, Any]] = [{"params": list(self.net.parameters())}]
        if spec.wide:
            trained.append({"params": [*self.critic.parameters(), self.alpha], "lr": 0.05})
        self.optimizer = OPTIMIZERS[spec.optimizer](trained)
        self.scheduler = spec.scheduler and SCHEDULERS[spec.scheduler](self.optimizer)
        self.per_rank = {"stream": Loader(seed + rank)} if spec.loader else {}
        self.boxes: dict[str, str] = {}
        self.state: dict[str, Any] = {}
        self.held: dict[str, Any] = {}  # what the program itself holds: it must be filled in place
        model = nn.ModuleDict({"online": self.net, "target": self.average})
        self.put("model", model if spec.inner else self.net, spec.boxed)
        self.put("optimizer", self.optimizer, spec.boxed)
        if self.scheduler:
            self.put("scheduler", self.scheduler, spec.boxed)
        if not spec.inner:
            self.put("ema", self.average, "")
        if spec.wide:
            self.put("critic", self.critic, "")
            self.put("alpha", self.alpha, spec.boxed)
        self.put("epoch", seed, spec.boxed)
        for name, box in spec.entries:
            self.put(name, ENTRIES[name][0](seed), box)

    def put(self, name: str, value: Any, kind: str) -> None:
        self.boxes[name] = kind
        self.state[name] = _boxed(kind, value) if kind else value
        if hasattr(value, "load_state_dict") or isinstance(value, torch.Tensor):
            self.held[name] = value

    def get(self, name: str) -> Any:
        kind = self.boxes[name]
        return _unboxed(kind, self.state[name]) if kind else self.state[name]

    def check_held(self) -> None:
        """Make sure that what the program holds is what the mapping holds."""
        for name, value in self.held.items():
            found = self.get(name)
            live = hasattr(value, "load_state_dict")
            if (found is not value) if live else canonical(found) != canonical(value):
                raise Wrong(f"{name} in the state is not what the program holds")

    # -- what happens in training --------------------------------------------------------------

    def train(self) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(4, self.spec.width)
        loss = self.net(inputs).square().mean() + self.critic(inputs).square().mean()
        (loss * self.alpha.exp()).backward()
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()

    @torch.no_grad()
    def forward(self) -> None:
        """Change running statistics; each rank's own."""
        self.net(torch.randn(4, self.spec.width) + self.rank)

    @torch.no_grad()
    def follow(self) -> None:
        """A momentum encoder."""
        for mine, theirs in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(theirs, 0.5).add_(0.25)

    def follow_by_data(self) -> None:
        for mine, theirs in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mine.data = mine.data * 0.5 + theirs.data * 0.5 + 0.25

    def climb_by_numpy(self) -> None:
        """SAM's first step: parameters move outside of an optimizer's step."""
        array = self.net[0].weight.detach().numpy()
        array += 0.125

    def load(self) -> None:
        """The best weights come back, as for an evaluation."""
        self.net.load_state_dict({k: v * 0.5 for k, v in self.net.state_dict().items()})

    def settings(self) -> None:
        """Change all entries, and a setting of the optimizer."""
        for name, _ in self.spec.entries:
            ENTRIES[name][1](self.get(name))
        self.put("epoch", self.get("epoch") + 1, self.boxes["epoch"])
        for loader in self.per_rank.values():
            loader.read()
        self.optimizer.param_groups[0]["weight_decay"] = 0.25

    @torch.no_grad()
    def forget(self) -> None:
        """Change the optimizer's state outside of its step."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(0.5)


CHANGES = (
    *("train", "train", "forward", "follow", "load", "settings", "forget"),
    *("follow_by_data", "climb_by_numpy"),  # torch's version counters do not see these
)


# -- stock -----------------------------------------------------------------------------------------


def stock(value: Any) -> Any:
    """Return what users of torch.save write by hand: the state dicts of what has one."""
    if hasattr(value, "load_state_dict"):
        return value.state_dict()
    if type(value) is dict:
        return {key: stock(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(stock(one) for one in value)
    return value


def canonical(value: Any) -> dict[str, Any]:
    """Return what can be compared with ==, bit for bit: each leaf and container by its path."""
    return dict(_leaves(value, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "load_state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, (str(value.dtype), tuple(value.shape), raw)
    elif isinstance(value, (Mapping, list, tuple)):
        yield path, (type(value).__name__, len(value))
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in pairs:
            yield from _leaves(one, f"{path}[{key!r}]")
    else:
        yield path, (type(value).__name__, value.hex() if isinstance(value, float) else repr(value))


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Say where two canonical values differ."""
    paths = [path for path in {**expected, **found} if found.get(path) != expected.get(path)]
    return "; ".join(
        f"{path}: {found.get(path)!r:.90}, not {expected.get(path)!r:.90}" for path in paths[:5]
    )


# -- files -----------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    """Return the names of checkpoints in a folder; none before the first save has made it."""
    there = os.listdir(folder) if folder.exists() else []
    return sorted(name for name in there if not name.startswith(".fastserial."))


class Life:
    """A run, its folder, and which steps stock would have left there.

    Among several ranks each makes the same calls; `checkpointer` makes what is tested.
    """

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        budget: int | None = None,
        rank: int = 0,
        count: int = 1,
        checkpointer: Callable[..., Checkpointer] = Checkpointer,
    ) -> None:
        self.folder, self.spec, self.rank, self.count = folder, spec, rank, count
        self.arguments: dict[str, Any] = {"keep": KEEP, "keep_every": spec.every}
        if spec.best:
            self.arguments["keep_best"] = ("loss", "min")
        if budget is not None:
            self.arguments["snapshot_budget"] = budget
        self.make = checkpointer
        self.gate = Gate(0.03)
        # What each file holds: of those that are whole for sure, and of those that may be.
        self.whole: dict[int, Any] = {}
        self.maybe: dict[int, list[Any]] = {}
        self.pending: tuple[int, Any] | None = None
        self.step = 0
        self.counts: Counter[str] = Counter()
        self.objects, self.checkpointer = self._begin(1)

    # -- ranks ---------------------------------------------------------------------------------

    def _all(self, mine: Any) -> list[Any]:
        found: list[Any] = [mine] * self.count
        if self.count > 1:
            dist.all_gather_object(found, mine)
        return found

    def _try(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result, or the error; all ranks have one, or none has."""
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            error = raised
        names = self._all(error and f"{type(error).__name__}: {error}")
        if any(names) and not all(names):
            raise Wrong(f"an error on some ranks only: {names}") from error
        return result, error

    def _now(self) -> Any:
        """Return what a blocking torch.save of rank 0 would have left; generators are each's."""
        file = io.BytesIO()
        torch.save(stock(self.objects.state), file)
        file.seek(0)
        found = canonical(torch.load(file, weights_only=False))
        return self._all(found)[0], self._mine(self.objects)

    @staticmethod
    def _mine(objects: Objects) -> Any:
        """Return what this rank has for itself."""
        _, keys, position, *_ = np.random.get_state()
        generators = random.getstate(), keys.tobytes(), position, torch.get_rng_state().tolist()
        return generators, canonical(stock(objects.per_rank))

    # -- events --------------------------------------------------------------------------------

    def _begin(self, seed: int) -> tuple[Objects, Checkpointer]:
        objects = Objects(self.spec, seed, self.rank)
        return objects, self._made(objects, **self.arguments)

    def _made(self, objects: Objects, **arguments: Any) -> Checkpointer:
        return self.make(self.folder, objects.state, per_rank=objects.per_rank, **arguments)

    def change(self, name: str, seed: int) -> None:
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed)
        getattr(self.objects, name)()

    def save(self, gap: int) -> None:
        expected, step = self._now(), self.step + gap
        metrics = {"loss": _loss(step)}
        saving, error = self._try(lambda: self.checkpointer.save(step, metrics=metrics))
        if error is not None:
            raise error
        assert saving is not None
        if self.pending is not None:
            self._written(another=True)
        self.step, self.pending = step, (step, expected)
        self.counts["saves"] += 1

    def wait(self, close: bool = False) -> None:
        self.gate.open.set()
        _, error = self._try(self.checkpointer.close if close else self.checkpointer.wait)
        if error is None and self.pending is not None:
            self._written()
        elif error is not None:
            raise error

    def _steps(self) -> list[int]:
        self._all(None)
        found = sorted(int(path.stem[5:]) for path in self.folder.glob("step-*.pt"))
        self._all(None)
        return found

    def _written(self, another: bool = False) -> None:
        """The save that was pending is in place: older ones but `KEEP` may be gone, no others.

        Args:
            another: one is under way that may be in place, too: the folder is looked at later.
        """
        assert self.pending is not None
        step, expected = self.pending
        self.pending = None
        self.maybe.pop(step, None)
        self.whole[step] = expected
        if another:
            return
        before = sorted({*self.whole, *self.maybe})
        there = self._steps()
        mine = [one for one in before if one <= step]
        kept = {step, *mine[-KEEP:]}
        if self.spec.every is not None:
            kept.update(one for one in mine if one % self.spec.every == 0)
        if self.spec.best:
            kept.add(min(mine, key=lambda one: (_loss(one), -one)))
        required = kept & self.whole.keys()
        if lost := required - set(there):
            raise Wrong(f"after step {step} was written, {sorted(lost)} are gone: {there}")
        if set(there) - set(before):
            raise Wrong(f"files that nobody wrote: {there}, not {before}")
        if len(set(there) - kept) > 2 * len(self.maybe) + sum(one > step for one in there):
            raise Wrong(f"nothing is pruned: {there}")
        self.whole = {one: state for one, state in self.whole.items() if one in there}
        self.maybe = {one: states for one, states in self.maybe.items() if one in there}

    def damage(self, how: str, dice: random.Random) -> None:
        """Damage a file while nothing is saved."""
        self.wait()
        there = self._steps()
        if not there:
            return
        step = there[-1] if dice.random() < 0.7 else dice.choice(there)
        if self.rank == 0:
            damage(self.folder / f"step-{step:08d}.pt", how, dice)
        self._all(None)
        self.counts[f"damaged {how}"] += 1
        states = self.maybe.pop(step, [])
        if step in self.whole:
            states = [self.whole.pop(step)]
        if how != "gone":  # a bit that is nobody's leaves the file whole
            self.maybe[step] = states

    def crash(self, delay: float, seed: int) -> None:
        """Let another process save the same objects, and kill it in the middle."""
        assert self.count == 1
        self.wait(close=True)
        expected, step = self._now(), self.step + 1
        path = self.folder / f"step-{step:08d}.pt"
        old = path.stat() if path.exists() else None  # a damaged one, which was passed over
        torch.set_num_threads(1)
        python = random.getstate()
        pid = os.fork()
        if pid == 0:
            try:  # what is pruned is not known
                random.setstate(python)  # a fork seeds it anew
                made = self._made(self.objects, **{**self.arguments, "keep": KEEP + 1})
                made.save(step, metrics={"loss": _loss(step)})
                self.objects.climb_by_numpy()
                self.gate.open.set()
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(9)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code == -signal.SIGKILL, f"the process that was to be killed ended with {code}"
        there = self._steps()
        made_it = step in there and (old is None or not os.path.samestat(old, path.stat()))
        self.counts["crashes"] += 1
        self.counts["crashes in time"] += not made_it
        if made_it:  # then it is whole: it was put in place at once
            self.whole[step] = expected
            self.maybe.pop(step, None)
            self.step = step
        self.whole = {one: state for one, state in self.whole.items() if one in there}
        self.resume(seed, closed=True)

    def resume(self, seed: int, closed: bool = False) -> None:
        """Start anew in the folder: new objects, other weights, `resume`."""
        if not closed:
            self.wait(close=True)
        self.counts["resumes"] += 1
        self.objects, self.checkpointer = self._begin(1000 + seed)
        before = canonical(stock(self.objects.state)), canonical(stock(self.objects.per_rank))
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            step, error = self._try(self.checkpointer.resume)
        newest = max(self.whole, default=0)
        if error is not None:
            if newest or not self.maybe or not isinstance(error, CheckpointFileError):
                raise Wrong(f"{self._steps()} cannot be resumed: {error!r}") from error
            self._restart(seed)
            return
        self._check(step, newest, before)

    def _restart(self, seed: int) -> None:
        """All files are damaged, and the user moves them away."""
        self.counts["all damaged"] += 1
        self.wait(close=True)
        self._all(None)
        if self.rank == 0:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        self._all(None)
        self.maybe, self.step = {}, 0
        self.objects, self.checkpointer = self._begin(1000 + seed)

    def _check(self, step: int, newest: int, before: Any) -> None:
        found, mine = canonical(stock(self.objects.state)), self._mine(self.objects)
        if step == newest == 0:
            if (found, mine[1]) != before:
                raise Wrong("there was no checkpoint, and yet the objects changed")
        else:
            allowed = [self.whole[step]] if step in self.whole else self.maybe.get(step, [])
            if step < newest or not allowed:
                raise Wrong(f"resumed from {step}; there are {sorted(self.whole)}")
            if (found, mine) not in allowed:
                expected, theirs = allowed[0]
                other = "the rank's own" if mine[1] != theirs[1] else "random generators"
                raise Wrong(f"step {step}: {differences(found, expected) or other}")
        self.objects.check_held()
        self.step = step
        self.counts["checked"] += step > 0

    def end(self) -> None:
        self.resume(77)
        self.wait(close=True)


def slowly(gate: Gate) -> Any:
    """Options under which saves of little states take several blocks."""
    return fastserial.options(
        engine=gate.engine, small_file=0, block_size=65536, queue_depth=1, durable=False
    )


def _loss(step: int) -> float:
    """Return a step's loss: for some steps the same."""
    return step * 7 % 5 / 5


class Late(Checkpointer):
    """A control: what is saved is what the objects hold when somebody waits for the save."""

    _due: tuple[int, Any] | None = None

    def save(self, step: int, **more: Any) -> Any:
        self.wait()
        self._due = step, more
        return self

    def wait(self) -> None:
        due, self._due = self._due, None
        if due is not None:
            super().save(due[0], **due[1])
        super().wait()


class Careless(Checkpointer):
    """A control: checkpoints go that a rule keeps."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "keep_every": None, "keep_best": None})


class Forgetful(Checkpointer):
    """A control: what a rank has for itself is not restored."""

    def resume(self, step: int | None = None, **more: Any) -> int:
        before = copy.deepcopy(stock(self._per_rank))
        found = super().resume(step, **more)
        for name, state in before.items():
            self._per_rank[name].load_state_dict(state)
        return found


CONTROLS = {"late": Late, "careless": Careless, "forgetful": Forgetful}
EVENTS = ("change", "save", "save", "save and change", "wait", "damage", "resume")


def by_chance(life: Life, dice: random.Random, events: int) -> None:
    """Let chance choose what happens; no process is killed."""
    for _ in range(events):
        seed, event = dice.randrange(1000), dice.choice(EVENTS)
        if event.startswith("save"):
            life.save(dice.randrange(1, 3))
        if event.endswith("change"):
            life.change(dice.choice(CHANGES), seed)
        elif event == "damage":
            life.damage(dice.choice(DAMAGES), random.Random(seed))
        elif event == "wait":
            life.wait()
        elif event == "resume":
            life.resume(seed)
    life.end()
