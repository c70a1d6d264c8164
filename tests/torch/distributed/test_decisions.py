"""Everything that decides about a step is known to all ranks, with real processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import gradscale as gs
from gradscale.errors import CallOrderError
from gradscale.torch import GradScaler
from ranks import everyone, on_ranks, run_check
from shared_models import (
    HOW,
    OPTIMIZERS,
    Shards,
    batch,
    ddp,
    fsdp1,
    fsdp2,
    given,
    loss_of,
    mixed_placements,
    net,
    pipeline,
    tensor_parallel,
)

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_tensor",
)


def count_collectives() -> list[str]:
    """A list to which every collective that is called from here on is added."""
    calls: list[str] = []
    for name in COLLECTIVES:
        plain = getattr(dist, name, None)
        if plain is not None:

            def counted(*args: Any, _name: str = name, _plain: Any = plain, **kwargs: Any) -> Any:
                calls.append(_name)
                return _plain(*args, **kwargs)

            setattr(dist, name, counted)
    return calls


def check_wire() -> None:
    """Raises if a step takes more than one collective, or clipping by value and norm a third."""
    calls = count_collectives()
    for make_setup in (fsdp2, given):
        parts = make_setup()
        optimizer = optim.AdamW(parts.params, fused=True)
        scaler = GradScaler("cpu", groups=parts.groups)
        scaler.name(parts.call)
        ways = {
            "apply": lambda s=scaler, o=optimizer: s.apply(o, clip_norm=1.0),
            "step": lambda s=scaler, o=optimizer: s.step(o),
            "clip": lambda s=scaler, o=optimizer: (s.clip_grad_norm_(o, 1.0), s.step(o)),
            "values": lambda s=scaler, o=optimizer: s.apply(o, clip_norm=1.0, clip_value=0.1),
        }
        for way, after in ways.items():
            for step in range(3):
                scaler.backward(loss_of(parts.call, batch(step)))
                if way == "apply":
                    scaler.backward(loss_of(parts.call, batch(step)) * 0.1, loss_id="other")
                calls.clear()
                after()
                if way in ("step", "clip"):
                    scaler.update()
                    optimizer.zero_grad()
                assert len(calls) == (2 if way == "values" else 1), (way, calls)
                assert scaler.outcome().applied


def check_losses() -> None:
    """Raises if losses with a scale of their own are judged by one rank alone."""
    rank = dist.get_rank()
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    policy = gs.Dynamic(init_scale=2.0**8, growth_interval=2)
    scaler = GradScaler("cpu", policy=policy, groups=dist.group.WORLD)
    for step in range(6):
        scaler.backward(loss_of(model, batch(step)))
        if step != 4 or rank == 0:  # in which the other rank has no second loss
            bad = math.inf if step in (1, 4) and rank == 0 else 1.0
            scaler.backward(_spiked(model, step, bad), loss_id="other")
        outcome = scaler.apply(optimizer)
        told = everyone((bool(outcome.applied), scaler.get_scale(), scaler.get_scale("other")))
        assert told[0] == told[1]
        assert told[0][0] == (step not in (1, 4))
    # Lowered, grown and lowered; the common one, which no overflow was of, has grown thrice.
    assert told[0][1:] == (2.0**11, 2.0**7)


def check_own_scales() -> None:
    """Raises if losses with a scale of their own are not what one process makes of them."""
    for make_setup in (ddp, fsdp2, fsdp1, tensor_parallel):
        parts = make_setup()
        model = net(parts.norm)
        optimizer, alone = (OPTIMIZERS["foreach"](p) for p in (parts.params, model.parameters()))
        scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
        scaler.name(parts.call)
        for step in range(4):
            x, rank, world = batch(step), dist.get_rank(), dist.get_world_size()
            mine = x if parts.shares == 1 else x.chunk(world)[rank]
            scaler.backward(loss_of(parts.call, mine))
            other = loss_of(parts.call, mine * 0.5)
            if step == 0:
                other.register_hook(lambda grad: grad * math.inf)
            scaler.backward(other * 1.0, loss_id="other")
            outcome = scaler.apply(optimizer)
            assert bool(outcome.applied) == (step > 0), (make_setup, step, outcome)
            if step:
                (loss_of(model, x) + loss_of(model, x * 0.5)).backward()
                alone.step()
                alone.zero_grad()
        assert (scaler.get_scale(), scaler.get_scale("other")) == (2.0**8, 2.0**7)
        # As in test_agree.py, with two sums, and gradients of up to 2 in place of CLIP.
        bound = 3 * HOW["lr"] * 2 * 2 * 32 * torch.finfo(torch.float32).eps * 2 / HOW["eps"]
        for param, whole in zip(parts.weights(), model.parameters(), strict=True):
            assert (param - whole).abs().max() <= bound, make_setup


def check_unnamed() -> None:
    """Raises if gradients that FSDP2 has put elsewhere are taken for none."""
    parts = fsdp2()
    scaler = GradScaler("cpu")
    with pytest.raises(CallOrderError, match=r"were written to tensors.*scaler.name\(model\)"):
        scaler.backward(loss_of(parts.call, batch(0)), loss_id="other")
    scaler = GradScaler("cpu")
    with pytest.raises(CallOrderError, match="loss with droppable=True were written to"):
        scaler.backward(loss_of(parts.call, batch(0)), droppable=True)


def _spiked(model: Any, step: int, factor: float) -> torch.Tensor:
    """A finite loss whose gradient is not, if the factor is not."""
    loss = loss_of(model, batch(step + 50))
    if factor != 1.0:
        loss.register_hook(lambda grad: grad * factor)
    return loss * 1.0


def check_own_alone() -> None:
    """Raises if a rank without data has the common scale grow, of which nobody had a loss."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    policy = gs.Dynamic(init_scale=2.0**8, growth_interval=1)
    scaler = GradScaler("cpu", policy=policy, groups=dist.group.WORLD)
    scaler.backward(loss_of(model, batch(0)) + 0.0, loss_id="other")
    scaler.apply(optimizer)
    for _ in range(3):
        if dist.get_rank() == 0:
            scaler.backward(loss_of(model, batch(0)), loss_id="other")
        scaler.apply(optimizer)
    assert everyone((scaler.get_scale(), scaler.get_scale("other"))) == [(2.0**8, 2.0**12)] * 2


def check_penalty() -> None:
    """Raises if a penalty that is not finite on one rank moves the scale there alone."""
    rank = dist.get_rank()
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**8, groups=dist.group.WORLD)
    for step in range(3):
        x = batch(step).requires_grad_()
        if rank == 0:  # and makes no use of it, so that gradients stay finite
            scaler.grad(loss_of(model, x) * (math.inf if step == 1 else 1.0), [x])
        scaler.backward(loss_of(model, x))
        assert scaler.apply(optimizer).applied
        assert everyone(scaler.get_scale()) == [2.0**8 if step < 1 else 2.0**7] * 2


def check_droppable() -> None:
    """Raises if a pass is left out by one rank alone, whose shard is the one that is bad."""
    parts = fsdp2()
    optimizer = OPTIMIZERS["fused"](parts.params)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    scaler.name(parts.call)
    for step in range(3):
        for part in range(2):
            loss = loss_of(parts.call, batch(2 * step + part))
            bad = step == 1 and part == 0 and dist.get_rank() == 1
            hooks = [_spoil_after(param) for param in parts.params] if bad else []
            scaler.backward(loss / 2, droppable=True)
            for hook in hooks:
                hook.remove()
        outcome = scaler.apply(optimizer)
        told = everyone((bool(outcome.applied), int(outcome.dropped), scaler.get_scale()))
        assert told[0] == told[1] == (True, int(step == 1), 2.0**8 if step < 1 else 2.0**7)


def check_lacking() -> None:
    """Raises if only the rank whose shard was bad misses a loss of an earlier iteration."""
    parts = fsdp2()
    optimizer = OPTIMIZERS["foreach"](parts.params)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    scaler.name(parts.call)
    scaler.watch(optimizer)
    for step in range(3):
        bad = step == 1 and dist.get_rank() == 1
        hooks = [_spoil_after(param) for param in parts.params] if bad else []
        scaler.backward(loss_of(parts.call, batch(step)), loss_id="own")
        for hook in hooks:
            hook.remove()
        scaler.update(2.0**8)  # the gradients are left for the next iteration
        scaler.backward(loss_of(parts.call, batch(step)))
        assert everyone(bool(scaler.apply(optimizer))) == [step != 1] * 2


def check_unused() -> None:
    """Raises if parameters that a pass does not reach lose what another has left in a bucket."""
    for views in (False, True):
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        call = _Chosen(model)
        wrapped = nn.parallel.DistributedDataParallel(
            call, find_unused_parameters=True, gradient_as_bucket_view=views
        )
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        scaler = GradScaler("cpu", init_scale=2.0**8)
        scaler.name(wrapped)
        for how in ({"droppable": True}, {"loss_id": "own"}):
            before = [layer.weight.item() for layer in model]
            for chosen in ([0, 1], [1], [0], [1]):
                scaler.backward(wrapped(chosen), **how)
            assert scaler.apply(optimizer).applied
            moved = [w - layer.weight.item() for w, layer in zip(before, model, strict=True)]
            assert moved == [2.0, 3.0]


class _Chosen(nn.Module):
    """The sum of the weights of chosen layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        for layer in layers:
            nn.init.zeros_(layer.weight)

    def forward(self, chosen: list[int]) -> torch.Tensor:
        return sum(self.layers[i](torch.ones(1)).sum() for i in chosen)


def check_flags() -> None:
    """Raises if torch's flags after unscale_() are those of one rank's shards."""
    parts = fsdp2()
    optimizer = OPTIMIZERS["foreach"](parts.params)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        scaler.backward(loss_of(parts.call, batch(step)))
        if step == 1 and dist.get_rank() == 1:
            parts.params[0].grad.to_local().fill_(math.inf)
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert {str(device): float(flag) for device, flag in found.items()} == {"cpu": step == 1}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.outcome().applied == (step != 1)


def check_unscaled_norms() -> None:
    """Raises if gradients that are unscaled already have another norm, or are clipped otherwise."""
    for make_setup in (fsdp2, mixed_placements, tensor_parallel, fsdp1, given, pipeline):
        norms = []
        for first in ("nothing", "unscale", "clip"):
            parts = make_setup()
            optimizer = OPTIMIZERS["foreach"](parts.params)
            scaler = GradScaler("cpu", init_scale=2.0**8, groups=parts.groups)
            if parts.named is not None:
                scaler.name(parts.named)
            parts.backward(scaler, batch(0))
            if first == "unscale":
                scaler.unscale_(optimizer)
            if first == "clip":
                scaler.clip_grad_norm_(optimizer, 1e-2)
            norms.append(float(scaler.apply(optimizer, clip_norm=1e-3).grad_norm))
        # Scales are powers of two, so nothing is rounded otherwise; clipping rounds each element.
        assert norms[0] == norms[1], (make_setup, norms)
        assert math.isclose(norms[2], 1e-2, rel_tol=2**-13), (make_setup, norms)  # by 1e-6 / norm
        assert len(set(everyone(norms[0]))) == 1


def check_two_norms() -> None:
    """Raises if two stages that clip unscaled gradients count one another's twice or not at all."""
    rank, world = dist.get_rank(), Shards(dist.group.WORLD)
    param = nn.Parameter(torch.zeros(1))
    optimizer = optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**8, groups=world)
    for way in ("apply", "unscale"):
        scaler.backward((param * (3.0 + rank)).sum())
        if way == "unscale":
            scaler.unscale_(optimizer)
        assert scaler.apply(optimizer, clip_norm=2.5).grad_norm == 5.0
    # By half, twice; 1e-6 is added to the norm.
    assert math.isclose(param.item(), -(3.0 + rank), rel_tol=2**-20)


def _spoil_after(param: nn.Parameter) -> Any:
    """Makes this rank's part of a gradient infinite as soon as it is there."""

    def spoil(owner: Any) -> None:
        owner.grad.to_local().fill_(math.inf)

    return param.register_post_accumulate_grad_hook(spoil)


@pytest.mark.parametrize(
    ("check", "world"),
    on_ranks(
        2,
        "wire losses own_alone penalty own_scales unnamed droppable lacking unused flags "
        "unscaled_norms two_norms",
    ),
)
def test_all_ranks_decide_by_the_same(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
