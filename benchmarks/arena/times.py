"""How long a step takes: every arm alone on the machine, by turns, with nothing measured beside."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from arena.arms import Arm, take
from arena.rows import Time, where
from arena.training import Place, Training

WARM_UP = 30
ROUNDS, STEPS = 4, 25
"""The median over the rounds. Steps that spike come once in a round, or in every second one: then
it is the mean of one with a spike and one without."""


class _Run:
    """One arm of a training."""

    def __init__(self, kind: type[Training], arm: Arm, place: Place) -> None:
        self.arm = arm
        place = place._replace(dtype=arm.dtype)
        self.training = kind(place, place.pick(*kind.steps))
        self.stepper = arm.make(self.training)
        self.number, self.rounds = 0, list[float]()

    def go(self, count: int) -> None:
        """Takes so many steps; notes the milliseconds of one."""
        device = self.training.place.device
        _wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            for turn in self.training.turns(self.number):
                take(self.stepper, turn, self.training.clip_norm)
            self.number += 1
        _wait(device)
        self.rounds.append((time.perf_counter() - begin) * 1e3 / count)


def clock(
    kind: type[Training],
    arms: Sequence[Arm],
    place: Place,
    warm_up: int = WARM_UP,
    steps: int = STEPS,
) -> Iterator[Time]:
    """A time for every arm of a training; NaN for one that fails."""
    runs = [_Run(kind, arm, place) for arm in arms]
    failed = set[str]()
    for count in (warm_up, *[steps] * ROUNDS):
        for run in runs:
            if run.arm.name in failed:
                continue
            try:
                run.go(count)
            except (RuntimeError, ValueError) as error:
                print(f"{kind.name}, {run.arm.name}: {error}", flush=True)
                failed.add(run.arm.name)
    for run in runs:
        name = run.arm.name
        ms = math.nan if name in failed else statistics.median(run.rounds[1:])
        yield Time(size=place.size, training=kind.name, arm=name, ms=ms, **where(place.device))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
