"""Dynamic, wrong in one way each: the tests of the rules show that they find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gradscale.policy import Dynamic, DynamicState, GradStats, Policy, scalars

step = Dynamic.update


def fault(name: str, update: Callable[..., DynamicState]) -> type[Dynamic]:
    """Dynamic with another update(policy, state, stats, xp)."""

    def told(self: Dynamic, state: Any, stats: GradStats, xp: Any = scalars) -> DynamicState:
        return update(self, state, stats, xp)

    return type(name, (Dynamic,), {"update": told})


def late(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    return step(replace(p, growth_interval=p.growth_interval + 1), s, g, xp)


def equals(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    beyond = g.finite and g.loss_finite and s.good_steps >= p.growth_interval
    return DynamicState(s.scale, s.good_steps + 1, 0) if beyond else step(p, s, g, xp)


def grudging(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved = step(p, s, g, xp)
    return moved._replace(bad_steps=xp.maximum(moved.bad_steps, s.bad_steps))


def forgiving(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved = step(p, s, g, xp)
    return moved._replace(bad_steps=0) if moved.bad_steps >= p.hysteresis else moved


def bottomless(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved, lower = step(p, s, g, xp), g.loss_finite and not g.finite
    return moved._replace(scale=s.scale * p.backoff_factor) if lower else moved


def soaring(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved, grow = step(p, s, g, xp), g.loss_finite and g.finite
    return moved._replace(scale=s.scale * p.growth_factor) if grow else moved


def remembering(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    p.__dict__["calls"] = p.__dict__.get("calls", 0) + 1
    return step(p, s, g, xp)._replace(good_steps=p.__dict__["calls"])


def in_place(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved = step(p, s, g, xp)
    s.scale[...] = moved.scale
    return moved


def reading(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    return step(p, s, g, xp) if s.scale > 0 else s


def spoiled(field: str, spoil: Callable[[Any], Any]) -> Callable[..., DynamicState]:
    """An update that spoils one field of its result."""

    def update(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
        moved = step(p, s, g, xp)
        return moved._replace(**{field: np.asarray(spoil(getattr(moved, field)))})

    return update


Late = fault("Late", late)  # as Flax does
Eager = fault("Eager", lambda p, s, g, xp: step(replace(p, growth_interval=1), s, g, xp))
Equals = fault("Equals", equals)  # counts by ==, as torch does
Impatient = fault("Impatient", lambda p, s, g, xp: step(replace(p, hysteresis=1), s, g, xp))
Grudging = fault("Grudging", grudging)  # a finite step forgives nothing, as in Megatron
Forgiving = fault("Forgiving", forgiving)  # counts anew after it lowered the scale
Backward = fault("Backward", lambda p, s, g, xp: step(p, s, g._replace(finite=not g.finite), xp))
Blaming = fault(
    "Blaming", lambda p, s, g, xp: step(p, s, GradStats(finite=g.finite & g.loss_finite), xp)
)
Fitting = fault("Fitting", lambda p, s, g, xp: step(p, s, g._replace(finite=g.finite & g.fits), xp))
Bottomless = fault("Bottomless", bottomless)
Soaring = fault("Soaring", soaring)
Remembering = fault("Remembering", remembering)
InPlace = fault("InPlace", in_place)
Reading = fault("Reading", reading)  # brings a value back to the host
Wide = fault("Wide", spoiled("scale", np.float64))
Long = fault("Long", spoiled("bad_steps", np.int64))
Shaped = fault("Shaped", spoiled("scale", np.atleast_1d))
Sloppy = fault("Sloppy", spoiled("scale", lambda v: np.nextafter(v, np.float32(0))))


def as_fault(policy: Policy, wrong: type[Policy]) -> Policy:
    """The same settings under another rule."""
    return wrong(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})
