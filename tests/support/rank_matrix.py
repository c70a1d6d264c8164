"""Cells of a matrix: ways to share a model, optimizers, faults, and ways to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from gradscale.torch import GradScaler
from ranks import everyone
from shared_models import DEVICE, HOW, OPTIMIZERS, Setup, batch, loss_of, net, spoil, zero

CLIP = 0.3
FAULTS = ("none", "inf", "nan", "no gradient")
WAYS = ("apply", "step", "clip")


def train(
    setup: Setup, make: Callable[..., optim.Optimizer], fault: str, who: int, way: str
) -> tuple[list[bool], list[float], list[float]]:
    """Which steps were applied, the scales after them, and the norms."""
    optimizer = (setup.make or make)(setup.params)
    settings = {"init_scale": 2.0**8, "growth_interval": 3}
    if setup.scaler is None:
        scaler = GradScaler(DEVICE.type, **settings, groups=setup.groups)  # type: ignore[arg-type]
    else:
        scaler = setup.scaler(DEVICE.type, **settings)
    if setup.named is not None:
        scaler.name(setup.named)
    applied, scales, norms = [], [], []
    for step in range(6):
        setup.backward(scaler, batch(step))
        if step == 3 and torch.distributed.get_rank() == who:
            spoil(setup.params, fault)
        if way == "apply":
            outcome = scaler.apply(optimizer, clip_norm=CLIP)
            norms.append(float(outcome.grad_norm))
        elif way == "clip":
            norms.append(float(scaler.clip_grad_norm_(optimizer, CLIP)))
        else:
            norms.append(0.0)
        if way != "apply":
            scaler.step(optimizer)
            outcome = scaler.outcome(optimizer)
            scaler.update()
            optimizer.zero_grad()
        applied.append(bool(outcome.applied))
        scales.append(scaler.get_scale())
    return applied, scales, norms


def alone(
    make: Callable[..., optim.Optimizer], skip: set[int], way: str, norm: bool
) -> tuple[Any, list[float]]:
    """What one process makes of the same batches: its parameters, and the norms."""
    model = net(norm)
    optimizer = make(list(model.parameters()))
    norms = []
    for step in range(6):
        loss_of(model, batch(step)).backward()
        norms.append(
            float(nn.utils.clip_grad_norm_(model.parameters(), CLIP if way != "step" else math.inf))
        )
        if step not in skip:
            optimizer.step()
        optimizer.zero_grad()
    return model, norms


def compare(case: str, setup: Setup, results: list[Any], fault: str, way: str, make: Any) -> None:
    """Raises if ranks differ from one another, or from a process that is alone."""
    assert all(each[:2] == results[0][:2] for each in results), f"{case}: {results}"
    applied, _, norms = results[0]
    bad = {3} if fault in ("inf", "nan") else set()
    assert applied == [step not in bad for step in range(6)], f"{case}: {applied}"
    if fault == "no gradient":
        return  # what the others do then is not what one process does
    model, expected = alone(make, bad, way, setup.norm)
    # Sums over a batch of 8 and 16 columns, in another order, differ by at most 32 roundings of
    # gradients up to CLIP; each step divides them by eps at most.
    error = 32 * torch.finfo(torch.float32).eps * CLIP
    bound = 6 * HOW["lr"] * 2 * error / HOW["eps"]
    others = list(model.parameters()) if setup.own is None else setup.own(model)
    for param, other in zip(setup.weights(), others, strict=True):
        assert (param - other).abs().max() <= bound, case
    for step in set(range(6)) - bad if way != "step" else ():
        assert math.isclose(norms[step], expected[step], rel_tol=1e-5), (
            f"{case}: {norms[step]} {expected[step]}"
        )


def check_cells(
    setups: Any, faults: Any = FAULTS, ways: Any = WAYS, pairs_only: bool = False
) -> None:
    """Raises if one of the cells of the matrix is not right.

    Args:
        pairs_only: Leave out two cells of three. For every setup, each two of an optimizer, a fault
            and a way are together in one of those that are left.
    """
    world = torch.distributed.get_world_size()
    for make_setup in setups:
        for first, (kind, make) in enumerate(OPTIMIZERS.items()):
            if make_setup is zero and kind != "foreach":
                continue
            for second, fault in enumerate(faults):
                for third, way in enumerate(ways):
                    left_out = (first + second + third) % len(OPTIMIZERS) != 0
                    if pairs_only and left_out and make_setup is not zero:
                        continue
                    setup = make_setup()
                    told = everyone(train(setup, make, fault, world - 1, way))
                    compare(
                        f"{make_setup.__name__}, {kind}, {fault}, {way}",
                        setup,
                        told,
                        fault,
                        way,
                        make,
                    )
