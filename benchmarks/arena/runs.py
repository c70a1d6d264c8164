"""One run: a training, an arm, a seed."""

from __future__ import annotations

import math
import time

from arena import measure
from arena.arms import Arm, advance
from arena.rows import Row, where
from arena.training import Place, Training


def play(kind: type[Training], arm: Arm, place: Place, num_steps: int) -> Row:
    """Trains, measures every step, and validates."""
    start = time.perf_counter()
    place = place._replace(dtype=arm.dtype)
    training = kind(place, num_steps)
    stepper = arm.make(training)
    readings: list[measure.Reading] = []
    num_tensors, turns_per_step, value, second, note = 0, 1, math.nan, math.nan, ""
    try:
        for number in range(num_steps):
            tensors = 0
            before = len(readings)
            for turn in training.turns(number):
                readings.append(advance(stepper, turn, training.clip_norm, tensors))
                tensors += len(measure.parameters(turn.optimizer))
            num_tensors, turns_per_step = tensors, len(readings) - before
        value, second = training.validate(), training.validate_second()
    except (RuntimeError, ValueError) as error:
        note = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    steps = measure.read(readings)
    return Row(
        size=place.size,
        training=kind.name,
        arm=arm.name,
        seed=place.seed,
        steps=len(steps),
        metric=kind.metric,
        value=value,
        second_metric=kind.second_metric,
        second_value=second,
        calm_after=training.calm_after() * turns_per_step,
        history=measure.pack(measure.log2(step.scale) for step in steps),
        skips=" ".join(str(i) for i, s in enumerate(steps) if s.loss_finite and not s.applied),
        seconds=time.perf_counter() - start,
        note=note,
        tensors=num_tensors,
        **measure.summarise(steps, num_tensors)._asdict(),
        **where(place.device),
    )
