from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import torch_has
from cpu_graph import keep_in_tensors
from gradscale import CallOrderError, Headroom, SettingError
from gradscale.torch import Culprit, GradScaler
from tensors import Fails, parameter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FINITE = st.sampled_from([0.0, 1.0, -2.0, 2.0**-40, 3.0])


@given(slopes=st.lists(st.tuples(st.sampled_from([0, 1, "aux"]), FINITE), min_size=1, max_size=8))
def test_gradients_of_all_losses_add_up_exactly(slopes: list[tuple[int | str, float]]) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(0.0)
    scaler.load_state_dict(
        scaler.state_dict()
        | {
            "gradscale": scaler.state_dict()["gradscale"]
            | {
                "losses": [
                    ["aux", {"scale": 2.0**30, "good_steps": 0, "bad_steps": 0}],
                    [1, {"scale": 2.0**-3, "good_steps": 0, "bad_steps": 0}],
                ]
            }
        }
    )
    total = 0.0
    for loss_id, slope in slopes:
        scaler.backward((w * slope).sum(), loss_id=loss_id)
        total = float(torch.tensor(total * 4.0) + torch.tensor(slope * 4.0)) / 4.0
    assert scaler.apply(SGD([w], lr=1.0))
    assert w.item() == -total


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_lowers_the_scale_of_its_own_loss_alone(device: str, fused: bool) -> None:
    scaler = GradScaler(device, init_scale=8.0, growth_interval=2)
    w = parameter(0.0, device=device)
    optimizer = SGD([w], lr=1.0, fused=fused)

    def step(main: float, extra: float) -> bool:
        scaler.backward((w * main).sum())
        scaler.backward((w * extra).sum(), loss_id=1)
        return bool(scaler.apply(optimizer).applied)

    huge = 2.0**126
    assert step(1.0, 2.0)
    assert w.item() == -3.0
    assert not step(1.0, huge)
    assert [scaler.get_scale(), scaler.get_scale(loss_id=1)] == [16.0, 4.0]
    assert not step(huge, 1.0)
    assert [scaler.get_scale(), scaler.get_scale(1)] == [8.0, 4.0]
    assert not step(huge, huge)
    assert [scaler.get_scale(), scaler.get_scale(1)] == [4.0, 2.0]
    assert w.item() == -3.0
    assert step(1.0, 1.0)
    assert w.item() == -5.0


def test_a_loss_skips_only_the_optimizers_that_it_reaches() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    a, b = parameter(0.0), parameter(0.0)
    optimizers = [SGD([a], lr=1.0), SGD([b], lr=1.0)]
    scaler.backward(a.sum())
    scaler.backward((b * 2.0**126).sum(), loss_id=1)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [a.item(), b.item()] == [-1.0, 0.0]
    assert [bool(scaler.outcome(o).finite) for o in optimizers] == [True, False]
    for optimizer in optimizers:
        optimizer.zero_grad()
    for several in (optimizers, optimizers[::-1]):  # in one step all wait for each other
        scaler.backward(a.sum())
        scaler.backward((b * 2.0**127).sum(), loss_id=1)
        assert not scaler.apply(several)
        assert [a.item(), b.item()] == [-1.0, 0.0]


def test_a_loss_that_is_not_finite_leaves_its_scale_alone() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    scaler.backward(w.sum())
    scaler.backward((w * math.nan).sum(), loss_id=1)
    outcome = scaler.apply(SGD([w], lr=1.0))
    assert outcome.verdict() == "loss not finite"
    assert [scaler.get_scale(), scaler.get_scale(1)] == [8.0, 8.0]
    assert w.item() == 1.0


def test_a_float16_loss_of_its_own_is_capped() -> None:
    scaler, w = GradScaler("cpu", init_scale=2.0**16), parameter(1.0)
    with pytest.warns(UserWarning, match="float16") as warned:
        scaler.backward(w.half().sum(), loss_id=1)
    assert warned[0].filename == __file__
    assert scaler.apply(SGD([w], lr=1.0))
    assert w.item() == 0.0
    assert [scaler.get_scale(), scaler.get_scale(1)] == [2.0**16, 2.0**15]


def test_gradients_keep_their_tensor_and_other_losses_theirs() -> None:
    scaler, w, v = GradScaler("cpu", init_scale=2.0), parameter(1.0), parameter(1.0)
    scaler.backward(w.sum() + v.sum())
    mine = w.grad
    scaler.backward([w.sum(), (3.0 * w).sum()], loss_id=1)
    assert w.grad is mine
    assert [mine.item(), v.grad.item()] == [10.0, 2.0]


def test_inputs_and_sparse_gradients() -> None:
    scaler = GradScaler("cpu", init_scale=2.0)
    table = torch.nn.Embedding(4, 1, sparse=True)
    dense = parameter(1.0)
    for _ in range(2):
        scaler.backward(table(torch.tensor([1, 1])).sum() * dense.sum(), loss_id=1)
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 8.0, 0.0, 0.0]
    before = dense.grad.item()
    scaler.backward(table(torch.tensor([2])).sum() * dense.sum(), loss_id=1, inputs=[table.weight])
    assert table.weight.grad.to_dense().flatten().tolist() == [0.0, 8.0, 2.0, 0.0]
    assert dense.grad.item() == before


def test_gradients_in_ddps_buckets_add_up(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        for views in (False, True):
            model = torch.nn.Linear(3, 1, bias=False)
            ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
            scaler = GradScaler("cpu", init_scale=4.0)
            scaler.backward(ddp(torch.tensor([[1.0, 2.0, 3.0]])).sum())
            scaler.backward(ddp(torch.tensor([[10.0, 20.0, 30.0]])).sum(), loss_id=1)
            scaler.unscale_(SGD(model.parameters(), lr=1.0))
            assert model.weight.grad.tolist() == [[11.0, 22.0, 33.0]]
    finally:
        torch.distributed.barrier()  # else gloo's thread may want the GIL while it is joined
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parameters_are_reached_or_refused(reentrant: bool) -> None:
    model, w = torch.nn.Linear(2, 2), parameter(1.0, 1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    x = torch.ones(1, 2, requires_grad=True)
    loss = (checkpoint(model, x, use_reentrant=reentrant) * w).sum()
    if reentrant:
        with pytest.raises(CallOrderError, match="use_reentrant=False"):
            scaler.backward(loss, loss_id=1)
    else:
        scaler.backward(loss, loss_id=1)
        assert model.bias.grad.tolist() == [4.0, 4.0]


def test_a_step_with_a_closure_is_undone_when_a_loss_of_its_own_overflows() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter(1.0)
    optimizer = SGD([w], lr=0.5, weight_decay=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w * 2.0**126).sum()
        scaler.backward(loss, loss_id=1)
        return loss

    assert not scaler.apply(optimizer, closure=closure)
    assert w.item() == 1.0
    assert scaler.get_scale(1) == 4.0


def test_the_common_scale_grows_only_with_loss_0_and_falls_when_it_is_too_high() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0, growth_interval=1), parameter(0.0)
    optimizer = SGD([w], lr=0.0)
    for _ in range(5):
        scaler.backward(w.sum(), loss_id="g")
        assert scaler.apply(optimizer)
    assert [scaler.get_scale(), scaler.get_scale("g")] == [8.0, 256.0]
    for _ in range(12):
        scaler.backward((w * 2.0**126).sum(), loss_id="g")
        scaler.apply(optimizer)
    assert scaler.get_scale() < 8.0  # what fits at a scale of 1 must also fit where it is stored


def test_culprits_of_a_loss_of_its_own_are_named_and_its_floor_is_its_own() -> None:
    torch_has.named_parameters()
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter(0.0, 0.0)
    optimizer = SGD([("w", w)], lr=1.0)
    loss = (w * torch.tensor([2.0**126, 1.0])).sum()
    scaler.backward(w.sum())
    scaler.backward(loss, loss_id=1, retain_graph=True)
    outcome = scaler.apply(optimizer)
    assert outcome.culprits() == [Culprit("w", 0, 1, 0)]
    assert outcome.verdict() == "scale too high"
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=8.0)
    scaler.backward(loss, loss_id=1)
    assert scaler.apply(optimizer).verdict() == "stuck at the floor"


def test_update_with_a_number_judges_the_other_losses() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter(0.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward((w * 2.0**126).sum(), loss_id=1)
    scaler.step(optimizer)
    scaler.update(1024.0)
    assert [scaler.get_scale(), scaler.get_scale(1)] == [1024.0, 4.0]


def test_gradients_left_over_are_added_to() -> None:
    scaler, a, b = GradScaler("cpu", init_scale=8.0), parameter(0.0), parameter(0.0)
    optimizers = [SGD([a], lr=1.0), SGD([b], lr=1.0)]
    for step in range(4):
        scaler.backward(a.sum() + b.sum(), loss_id=1)
        for optimizer in optimizers[: 1 + step % 2]:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert [a.item(), b.item()] == [-4.0, -4.0]
    for step in range(2):  # the common scale moves in between
        scaler.backward(a.sum() + b.sum(), loss_id=1)
        scaler.step(optimizers[0])
        optimizers[0].zero_grad()
        if step:
            scaler.step(optimizers[1])
        scaler.update(1024.0)
    assert [a.item(), b.item()] == [-6.0, -6.0]


def test_a_generator_of_inputs_sparse_beside_dense_and_no_graph_of_gradients() -> None:
    scaler = GradScaler("cpu", init_scale=2.0)
    table = torch.nn.Embedding(3, 2, sparse=True)
    scaler.backward(table(torch.tensor([1])).sum())
    scaler.backward(table.weight.sum(), loss_id=1, inputs=table.parameters())
    assert table.weight.grad.tolist() == [[2.0, 2.0], [4.0, 4.0], [2.0, 2.0]]
    with pytest.raises(SettingError, match="create_graph"):
        scaler.backward(table.weight.sum(), loss_id=1, create_graph=True)


def test_a_backward_pass_that_fails_leaves_the_gradients_as_they_were() -> None:
    scaler, w = GradScaler("cpu", init_scale=2.0), parameter(1.0)
    scaler.backward(w.sum())
    with pytest.raises(MemoryError, match="planted"):
        scaler.backward(Fails.apply(w).sum(), loss_id=1)
    assert w.grad.tolist() == [2.0]
    assert scaler.apply(SGD([w], lr=1.0))
    assert scaler.state_dict()["gradscale"]["losses"][0][1]["good_steps"] == 0


def test_unscaled_gradients_are_not_added_to() -> None:
    scaler, w = GradScaler("cpu", init_scale=2.0), parameter(1.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match="zero_grad"):
        scaler.backward(w.sum(), loss_id=1)
    assert w.grad.tolist() == [1.0]


def test_scales_of_losses_survive_a_checkpoint_and_a_copy() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0, growth_interval=3), parameter(0.0)
    optimizer = SGD([w], lr=1.0)
    for slope in (2.0**126, 1.0):
        scaler.backward(w.sum())
        scaler.backward((w * slope).sum(), loss_id="aux")
        scaler.apply(optimizer)
    state = scaler.state_dict()
    for other in (GradScaler("cpu"), copy.deepcopy(scaler)):
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.get_scale("aux") == 4.0
        assert other.state_dict() == state
        other.backward(w.sum())
        assert other.get_scale("aux") == 4.0
    used = GradScaler("cpu")
    used.backward(w.sum(), loss_id="old")
    used.load_state_dict(state)
    assert used.state_dict() == state
    with pytest.raises(SettingError, match="'old'"):
        used.get_scale("old")


def test_apex_losses_become_losses_of_ours() -> None:
    scaler = GradScaler("cpu")
    scaler.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7},
            "loss_scaler1": {"loss_scale": 64.0, "unskipped": 3},
        }
    )
    assert [scaler.get_scale(), scaler.get_scale(1)] == [1024.0, 64.0]
    assert scaler._get_growth_tracker() == 7


def test_a_bad_loss_id_is_an_error() -> None:
    scaler, w = GradScaler("cpu"), parameter(0.0)
    for wrong in (1.5, True, False, None, (1,)):
        with pytest.raises(SettingError, match="loss_id"):
            scaler.backward(w.sum(), loss_id=wrong)  # type: ignore[arg-type]
    assert w.grad is None


def test_a_disabled_scaler_takes_loss_ids() -> None:
    scaler, w = GradScaler("cpu", enabled=False), parameter(0.0)
    scaler.backward(w.sum(), loss_id=1)
    assert w.grad.tolist() == [1.0]
    assert scaler.get_scale(1) == 1.0


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("after", [0, "other", "same"])
def test_clearing_the_gradients_of_a_bad_loss_takes_its_mark_away(
    tensors: bool, after: int | str
) -> None:
    if tensors and after == "same":
        pytest.skip("on a device, one flag says whether all passes of a loss were finite")
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter(0.0)
    if tensors:
        keep_in_tensors(scaler)
    optimizer = SGD([w], lr=1.0)
    scaler.watch(optimizer)
    scaler.backward((w * 2.0**126).sum(), loss_id="same")
    optimizer.zero_grad()
    scaler.backward(w.sum(), loss_id=after)
    assert scaler.apply(optimizer)
    assert w.item() == -1.0
    # What is not cleared is held back, and a step of an earlier iteration is no longer to blame.
    scaler.backward((w * 2.0**127).sum(), loss_id="other")
    scaler.backward(w.sum())
    assert not scaler.apply(optimizer)
    scaler.backward(w.sum())
    assert scaler.apply(optimizer)
    assert w.item() == -2.0


def test_a_bad_pass_of_a_loss_holds_back_only_what_that_pass_reached() -> None:
    scaler, a, b = GradScaler("cpu", init_scale=8.0), parameter(0.0), parameter(0.0)
    one, other = SGD([a], lr=1.0), SGD([b], lr=1.0)
    for optimizer in (one, other):
        scaler.watch(optimizer)
    scaler.backward((a * 2.0**126).sum(), loss_id=1)
    scaler.backward((a + b).sum(), loss_id=1)
    for optimizer in (one, other):
        scaler.step(optimizer)
    scaler.update()
    assert (a.item(), b.item()) == (0.0, -1.0)
    assert scaler.get_scale(1) == 4.0


@pytest.mark.parametrize("earlier", [False, True])
def test_a_bad_loss_holds_back_gradients_that_a_later_pass_puts_aside(earlier: bool) -> None:
    # A sparse gradient is not there while a pass is measured on its own.
    scaler = GradScaler("cpu", policy=Headroom(init_scale=8.0))
    table = torch.nn.Embedding(4, 1, sparse=True)
    optimizer = SGD(table.parameters(), lr=1.0)
    scaler.watch(optimizer)
    before = table.weight.detach().clone()
    scaler.backward((table(torch.tensor([1])) * 2.0**126).sum(), loss_id=1)
    if earlier:
        scaler.update(8.0)
    scaler.backward(table(torch.tensor([1])).sum())
    assert not scaler.apply(optimizer)
    assert torch.equal(table.weight, before)


def test_a_bad_loss_whose_gradients_were_cleared_does_not_hold_back_other_optimizers() -> None:
    scaler, a, b = GradScaler("cpu", init_scale=8.0), parameter(0.0), parameter(0.0)
    one, other = SGD([a], lr=1.0), SGD([b], lr=1.0)
    for optimizer in (one, other):
        scaler.watch(optimizer)
    scaler.backward(b.sum())
    scaler.backward((a * 2.0**126).sum(), loss_id=1)
    one.zero_grad()
    assert scaler.apply([one, other])
    assert (a.item(), b.item()) == (0.0, -1.0)
