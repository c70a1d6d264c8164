"""What there is to run: a task for every training, arm and seed, and which wait for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from arena import arms, rows, runs, table, texts
from arena.training import Place, Training
from arena.trainings import TRAININGS

SEARCH = "static"
"""The search for the best static scale, with the first seed."""
BEST = "best static"
"""The arm of the other seeds; which it is, is seen when the search is over."""
PRETRAINING = "pretraining"
START_STEPS = 20
"""Before the first spike."""


class Task(NamedTuple):
    """One run."""

    training: str
    arm: str
    seed: int
    place: Place
    num_steps: int

    @property
    def urgency(self) -> tuple[int, float]:
        """Tasks start in this order: what others wait for, then the long ones first."""
        kind = TRAININGS[self.training]
        if self.arm == PRETRAINING:
            stage = 0
        else:
            stage = 3 if self.arm == BEST else 2 if self.arm.startswith(SEARCH) else 1
        return stage, -kind.cost * self.num_steps

    def waits_for(self, other: Task) -> bool:
        """Whether it must not start before the other has ended."""
        if other.training != self.training:
            return False
        if other.arm == PRETRAINING:
            return self.arm != PRETRAINING and other.seed == self.seed
        return self.arm == BEST and other.arm.startswith(SEARCH)

    def run(self) -> rows.Row | None:
        """Trains; the row, or None of a pretraining."""
        if self.arm == PRETRAINING:
            texts.pretrained(self.place)
            return None
        kind = TRAININGS[self.training]
        return runs.play(kind, arms.named(self.arm), self.place, self.num_steps)


class Choice(NamedTuple):
    """Which of all tasks are wanted; a part of a name is enough."""

    trainings: Sequence[str] = ()
    arms: Sequence[str] = ()
    seeds: range = range(1)
    steps: int | None = None
    starts: bool = False
    """Short runs from many first scales instead."""


def plan(choice: Choice, device: str, size: str) -> list[Task]:
    """All tasks."""
    found = []
    for kind in chosen(choice):
        for seed in choice.seeds:
            place = Place(device, size=size, seed=seed)
            num_steps = choice.steps or place.pick(*kind.steps)
            if choice.starts:
                num_steps = min(num_steps, START_STEPS)
            names = list(_arms(kind, seed, choice))
            if names and kind is texts.FineTune:
                names = [PRETRAINING, *names]
            found += [Task(kind.name, name, seed, place, num_steps) for name in names]
    return found


def chosen(choice: Choice) -> list[type[Training]]:
    """The trainings that are wanted."""
    return [kind for name, kind in TRAININGS.items() if wanted(name, choice.trainings)]


def _arms(kind: type[Training], seed: int, choice: Choice) -> Iterator[str]:
    """The names of the arms of a training."""
    if choice.starts:
        every = [arm for start in arms.STARTS for arm in arms.start_arms(start)]
        yield from (arm.name for arm in every if wanted(arm.name, choice.arms))
        return
    for arm in arms.fixed_arms().values():
        if wanted(arm.name, choice.arms) and arm.suits(kind):
            yield arm.name
    if wanted(SEARCH, choice.arms):
        yield from map(arms.static_name, arms.STATIC_SCALES if seed == 0 else ())
        yield from () if seed == 0 else (BEST,)


def wanted(name: str, parts: Sequence[str]) -> bool:
    """Whether one of the parts is in the name, or there is none."""
    return not parts or any(part.lower() in name.lower() for part in parts)


def settled(task: Task, known: Iterable[rows.Row]) -> Task | None:
    """The task with the arm that it runs; None if the search has found no scale."""
    if task.arm != BEST:
        return task
    best = table.best_static([row for row in known if row.training == task.training])
    return None if best is None else task._replace(arm=arms.static_name(best))


def is_done(task: Task, known: Iterable[rows.Row]) -> bool:
    """Whether there is a row of it; one that ended with an error of the device does not count."""
    return any(
        (row.training, row.arm, row.seed) == (task.training, task.arm, task.seed)
        and (not row.note or row.note.startswith("ValueError"))
        for row in known
    )
