"""Faults that earlier versions of the engine had, each as a user meets it."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import gradscale as gs
import gradscale.torch.optim
from cpu_graph import keep_in_tensors
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.distributed.fsdp_scaler import ShardedGradScaler
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.telemetry.transport import Layout
from programs import run_python
from tensors import Fails


def weight(value: float = 0.0, **options: Any) -> Tensor:
    return torch.full((1,), value, requires_grad=True, **options)


def _precision(**settings: Any) -> MixedPrecision:
    model = torch.nn.Linear(1, 1)
    return MixedPrecision(model, SGD(model.parameters(), lr=1.0), "fp16", **settings)


@pytest.mark.parametrize("tensors", [False, True])
def test_a_droppable_pass_keeps_the_scale_of_gradients_left_for_another(tensors: bool) -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    if tensors:
        keep_in_tensors(scaler)
    a, b = weight(), weight()
    often, seldom = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.watch(seldom)
    for step in range(2):
        scaler.backward((a + b).sum(), droppable=True)
        scaler.backward((a + 2.0 * b).sum(), droppable=True)
        scaler.step(often)
        often.zero_grad()
        if step:
            scaler.step(seldom)
        scaler.update()
    assert (a.item(), b.item()) == (-4.0, -6.0)


@pytest.mark.parametrize("tensors", [False, True])
def test_passes_that_were_dropped_are_made_up_for_once(tensors: bool) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    if tensors:
        keep_in_tensors(scaler)
    w = weight()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum(), droppable=True)
    scaler.backward((w * math.inf).sum(), droppable=True)
    scaler.unscale_(optimizer)
    w.grad = w.grad.clone()  # as a user who reduces or clips by hand
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == -2.0
    assert int(scaler.outcome(optimizer).dropped) == 1


@pytest.mark.parametrize("tensors", [False, True])
def test_dropped_passes_whose_gradients_were_cleared_are_not_made_up_for(tensors: bool) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    if tensors:
        keep_in_tensors(scaler)
    w = weight()
    optimizer = SGD([w], lr=1.0)
    for known in range(2):
        scaler.backward(w.sum(), droppable=True)
        scaler.backward(((w - w.detach()) * 3e38).sum(), droppable=True)
        optimizer.zero_grad()  # this window is given up
        scaler.backward(w.sum(), droppable=True)
        scaler.backward(w.sum(), droppable=True)
        outcome = scaler.apply(optimizer)
        assert outcome.dropped is None or int(outcome.dropped) == 0
        assert w.item() == -2.0 * (known + 1)
    assert scaler.get_scale() == 1.0  # the overflows count all the same
    scaler.backward(w.sum(), droppable=True)
    optimizer.zero_grad()
    scaler.backward(w.sum())  # nothing of a droppable pass is left in its step
    scaler.apply(optimizer)
    assert w.item() == -5.0


def test_a_droppable_pass_of_one_optimizer_does_not_count_for_another() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    a, b = weight(), weight()
    often, seldom = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.watch(seldom)
    scaler.backward((a + b).sum(), droppable=True)
    scaler.apply(often)
    scaler.backward(a.sum(), droppable=True)  # reaches the first alone
    scaler.apply(often)
    scaler.apply(seldom)
    assert (a.item(), b.item()) == (-2.0, -1.0)


def test_a_pass_of_one_optimizer_need_not_be_droppable_as_those_of_another_are() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    a, b = weight(), weight()
    plain, dropping = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.watch(plain)
    scaler.watch(dropping)
    for _ in range(2):
        scaler.backward(a.sum())
        scaler.apply(plain)
        for factor in (3.0, math.inf):
            scaler.backward((b * factor).sum(), droppable=True)
        assert scaler.apply(dropping).dropped == 1
    assert (a.item(), b.item()) == (-2.0, -12.0)
    for factors in ((False, True), (True, False)):  # one that reaches it counts, before or after
        for droppable in factors:
            scaler.backward(b.sum(), droppable=droppable)
        with pytest.raises(gs.CallOrderError, match=r"1 of \d losses had droppable=True"):
            scaler.apply(dropping)
        dropping.zero_grad()
        scaler.abandon()


@pytest.mark.parametrize("tensors", [False, True])
def test_what_is_made_up_for_is_clipped_too_and_counted_for_each_optimizer(tensors: bool) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    if tensors:
        keep_in_tensors(scaler)
    a, b = weight(), weight()
    optimizers = [SGD([a], lr=1.0), SGD([b], lr=1.0)]
    scaler.backward((3.0 * a).sum(), droppable=True)
    scaler.backward((a * math.inf).sum(), droppable=True)
    scaler.backward((8.0 * b).sum(), droppable=True)  # of two for the first, and one for this
    outcome = scaler.apply(optimizers, clip_norm=5.0)
    assert float(outcome.grad_norm) == pytest.approx(10.0)  # type: ignore[arg-type]
    assert [a.item(), b.item()] == pytest.approx([-3.0, -4.0])
    assert int(outcome.dropped) == 1
    scaler.backward((3.0 * a).sum(), droppable=True)
    scaler.backward((a * math.inf).sum(), droppable=True)
    norm = scaler.clip_grad_norm_(optimizers[0], 3.0)
    scaler.step(optimizers[0])
    assert (norm.item(), a.item()) == (pytest.approx(6.0), pytest.approx(-6.0))


@pytest.mark.parametrize("tensors", [False, True])
def test_gradients_unscaled_after_an_update_are_not_added_to(tensors: bool) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**10)
    if tensors:
        keep_in_tensors(scaler)
    a, b = weight(), weight()
    often, seldom = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.watch(seldom)
    scaler.scale((a + b).sum()).backward()
    scaler.step(often)
    scaler.update()
    scaler.unscale_(seldom)  # of the iteration before
    scaler.scale(b.sum()).backward()
    with pytest.raises(gs.CallOrderError, match="added scaled gradients"):
        scaler.step(seldom)
    assert b.item() == 0.0


@pytest.mark.parametrize("tensors", [False, True])
def test_gradients_that_lack_a_bad_loss_are_not_stepped_later_either(tensors: bool) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    if tensors:
        keep_in_tensors(scaler)
    a, b = weight(), weight()
    often, seldom = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.watch(seldom)
    scaler.backward((a + b).sum())
    scaler.backward((b * math.inf).sum(), loss_id=1)
    scaler.apply(often)
    for applied in (False, True):
        scaler.backward((a + b).sum())
        scaler.apply([seldom])
        assert scaler.outcome(seldom).applied == applied
    assert b.item() == -1.0
    scaler.backward(b.sum())
    scaler.backward((b * math.inf).sum(), loss_id=1)
    scaler.apply(often)
    seldom.zero_grad()  # what lacks the loss is gone
    scaler.backward(b.sum())
    assert scaler.apply(seldom).applied


@pytest.mark.parametrize("tensors", [False, True])
def test_a_bad_pass_after_the_step_does_not_spoil_the_means_of_a_policy(tensors: bool) -> None:
    scaler = GradScaler("cpu", policy=gs.LogMax())
    if tensors:
        keep_in_tensors(scaler)
    w = weight()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum(), loss_id=1)
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.backward(((w - w.detach()) * 3e38).sum())  # the next batch, before update()
    scaler.update()
    assert scaler.get_scale() == gs.LogMax().init_scale
    assert math.isfinite(scaler.state_dict()["gradscale"]["state"]["mean"])


@pytest.mark.parametrize("tensors", [False, True])
def test_what_a_skipped_step_left_is_cleared_before_a_pass_is_set_apart(tensors: bool) -> None:
    scaler = GradScaler("cpu", policy=gs.Headroom())
    if tensors:
        keep_in_tensors(scaler)
    w = weight()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum(), loss_id=1)  # from here on, passes of loss 0 are set apart, too
    scaler.apply(optimizer)
    scaler.backward(w.sum())
    w.grad = torch.full_like(w, math.inf)
    scaler.step(optimizer)
    scaler.backward(w.sum())  # the next batch, before update() and without zero_grad()
    scaler.update()
    scaler.step(optimizer)
    assert w.item() == -2.0


@pytest.mark.parametrize("updated", [False, True])
def test_a_closure_is_not_held_back_by_gradients_that_are_gone(updated: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), weight()
    optimizer = SGD([w], lr=1.0)
    scaler.backward((w * math.nan).sum())
    scaler.unscale_(optimizer)
    if updated:
        scaler.update()
    optimizer.zero_grad()  # given up

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.sum()
        scaler.backward(loss)
        return loss

    scaler.step(optimizer, closure)
    assert w.item() == -1.0
    assert scaler.outcome().applied


@pytest.mark.parametrize("policy", [gs.Headroom, gs.LogMax, gs.Histogram])
def test_a_large_loss_with_its_own_scale_leaves_the_common_scale_alone(policy: Any) -> None:
    def scales(large: bool) -> list[float]:
        scaler, w = GradScaler("cpu", policy=policy(init_scale=2.0**4)), weight()
        optimizer, found = SGD([w], lr=0.0), []
        for _ in range(6):
            scaler.backward(w.sum())
            if large:
                scaler.backward(w.sum() * 2.0**14, loss_id="large")
            scaler.apply(optimizer)
            found.append(scaler.get_scale())
        return found

    assert scales(True)[1:] == scales(False)[1:]


@pytest.mark.parametrize("fused", [False, True])
def test_an_apply_in_which_one_of_two_raises_steps_each_once(fused: bool) -> None:
    scaler, a, b = GradScaler("cpu", init_scale=8.0), weight(), weight()
    optimizers = [SGD([w], lr=1.0, fused=fused) for w in (a, b)]
    failures: list[type[Exception]] = [MemoryError]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    optimizers[1].register_step_pre_hook(fail)
    scaler.backward((a + b).sum())
    with pytest.raises(MemoryError):
        scaler.apply(optimizers)
    assert scaler.apply(optimizers)
    assert (a.item(), b.item()) == (-1.0, -1.0)


def test_an_optimizer_follows_nobody() -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(gs.SettingError, match=r"follow\(\) takes .* got the optimizer SGD"):
        scaler.follow(SGD([weight()], lr=1.0))


@pytest.mark.parametrize("policy", [gs.Headroom, gs.LogMax, gs.Histogram, gs.Static])
def test_torchs_scaler_goes_on_from_a_checkpoint_of_any_policy(policy: Any) -> None:
    ours, w = GradScaler("cpu", policy=policy(init_scale=2.0**6)), weight()
    optimizer = SGD([w], lr=1.0)
    ours.backward(w.sum())
    ours.apply(optimizer)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == ours.get_scale()
    for gradient in (1.0, math.inf):
        theirs.scale(w.sum()).backward()
        w.grad.mul_(gradient)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
    assert w.item() == -2.0
    assert 0.0 < theirs.get_scale() <= ours.get_scale()


def test_a_scheduler_that_follows_and_is_stepped_by_hand_moves_once() -> None:
    scaler, w = GradScaler("cpu"), weight()
    optimizer = SGD([w], lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    scaler.follow(scheduler)
    with pytest.warns(UserWarning, match=r"step\(\) was called manually") as caught:  # noqa: PT031
        for _ in range(3):
            scaler.backward(w.sum())
            scaler.apply(optimizer)
            scheduler.step()
        scaler.flush()
    assert scheduler.last_epoch == 3
    assert len([each for each in caught if "manually" in str(each.message)]) == 1


def by_load(scaler: GradScaler) -> GradScaler:
    other = GradScaler("cpu", on_stuck="raise", stuck_after=8)
    other.load_state_dict(scaler.state_dict())
    return other


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(
    "restart", [by_load, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]
)
def test_a_job_that_is_restarted_every_five_bad_steps_is_stuck(
    restart: Callable[[GradScaler], GradScaler], tensors: bool
) -> None:
    scaler = GradScaler("cpu", on_stuck="raise", stuck_after=8)
    steps = 0
    with pytest.raises(gs.StuckError):  # noqa: PT012
        for _ in range(4):
            if tensors and scaler._scale is None:
                keep_in_tensors(scaler)
            w = weight()
            optimizer = SGD([w], lr=1.0)
            for _ in range(5):
                scaler.backward(w.sum())
                w.grad.fill_(math.inf)
                steps += 1
                outcome = scaler.apply(optimizer)
                assert int(outcome.skipped_in_a_row) == steps
            scaler = restart(scaler)
    assert steps == 8


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1e155, 1e300, 1e-300])
def test_float64_gradients_whose_squares_overflow_are_clipped(size: float, fused: bool) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    scaler.backward((w * torch.tensor([3.0, 4.0], dtype=torch.float64) * size).sum())
    outcome = scaler.apply(SGD([w], lr=1.0, fused=fused), clip_norm=1.0)
    assert outcome.applied
    wanted = [-0.6, -0.8] if size > 1 else [-3.0 * size, -4.0 * size]
    assert w.tolist() == pytest.approx(wanted, rel=2.0**-20)


def test_a_disabled_scaler_without_update_does_not_grow() -> None:
    scaler, w = GradScaler("cpu", enabled=False), weight()
    optimizer = SGD([w], lr=1.0)

    def run(count: int) -> int:
        for _ in range(count):
            scaler.scale(w.sum()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
        gc.collect()
        # The package alone: a folder of that name may hold torch's files, too.
        ours = tracemalloc.Filter(True, f"{Path(gs.__file__).parent}/*")
        traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
        return sum(trace.size for trace in traces)

    tracemalloc.start()
    before = run(50)
    grown = run(2000) - before
    tracemalloc.stop()
    assert grown < 2000 * 8  # one reference per step would be more


def test_a_disabled_scaler_does_not_keep_optimizers() -> None:
    scaler, w = GradScaler("cpu", enabled=False), weight()
    gone = []
    for _ in range(3):
        optimizer = SGD([w], lr=1.0)
        gone.append(weakref.ref(optimizer))
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        del optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert scaler.outcome().applied


def test_a_copied_sharded_scaler_still_has_losses_on_every_rank(one_rank: Any) -> None:
    scaler = ShardedGradScaler("cpu")
    for twin in (scaler, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        with pytest.warns(UserWarning, match="float16"):  # refused where other ranks have no loss
            assert twin.scale(torch.ones((), dtype=torch.float16)).item() == 2.0**15


def test_one_scaler_of_two_threads_keeps_both_right() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**8)
    params = [weight() for _ in range(2)]
    optimizers = [SGD([param], lr=1.0) for param in params]
    lock, errors = threading.Lock(), []

    def train(i: int) -> None:
        try:
            for _ in range(50):
                with lock:  # who shares a scaler steps in turns
                    scaler.backward(params[i].sum())
                    scaler.apply(optimizers[i])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [param.item() for param in params] == [-50.0, -50.0]


def test_a_second_thread_must_wait_for_the_end_of_an_iteration() -> None:
    # In the middle of one, it would read gradients that the other thread's pass is writing.
    scaler, params = GradScaler("cpu", init_scale=2.0**8), [weight() for _ in range(2)]
    optimizers = [SGD([param], lr=1.0) for param in params]
    scaled, end = threading.Event(), threading.Event()

    def train() -> None:
        loss = scaler.scale(params[0].sum())
        scaled.set()
        end.wait()
        loss.backward()
        scaler.step(optimizers[0])
        scaler.update()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    scaled.wait()
    calls: list[Callable[[], object]] = [
        lambda: scaler.scale(params[1].sum()),
        lambda: scaler.backward(params[1].sum(), loss_id=1),
        lambda: scaler.unscale_(optimizers[1]),
        lambda: scaler.step(optimizers[1]),
        lambda: scaler.apply(optimizers[1]),
        scaler.update,
    ]
    for call in calls:
        with pytest.raises(gs.CallOrderError, match="second thread"):
            call()
    assert scaler.state_dict()["scale"] == scaler.get_scale()  # whoever reads may
    end.set()
    thread.join()
    scaler.backward(params[1].sum())
    scaler.apply(optimizers[1])
    assert [param.item() for param in params] == [-1.0, -1.0]


def test_an_iteration_of_a_thread_that_died_is_taken_over() -> None:
    scaler, w = GradScaler("cpu"), weight()
    thread = threading.Thread(target=lambda: scaler.scale(w.sum()))
    thread.start()
    thread.join()
    scaler.backward(w.sum())
    scaler.apply(SGD([w], lr=1.0))
    assert w.item() == -1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GradScaler("cpu", policy="dynamical"),
            r"policy must be .*names headroom, dynamic",
        ),
        (lambda: GradScaler("cpu", policy=gs.Headroom), r"Headroom\(\)"),
        (lambda: _precision(policy="dynamical"), r"policy must be .*names headroom, dynamic"),
        (lambda: _precision(policy=gs.Headroom), r"Headroom\(\)"),
        (lambda: _precision(init_scale=4.0), r"Headroom\(init_scale=4\.0\)"),
        (lambda: GradScaler("cpu", min_scale=8.0, max_scale=4.0), r"min_scale.*8\.0.*4\.0"),
        (lambda: GradScaler("cpu", policy=gs.Dynamic(), init_scale=4.0), "policy"),
        (lambda: GradScaler("cpu").apply(torch.nn.Linear(1, 1)), "pass the optimizer"),
        (lambda: GradScaler("cpu").step(torch.nn.Linear(1, 1)), "optimizer"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(make: Callable[[], object], message: str) -> None:
    with pytest.raises(gs.SettingError, match=f"(?i){message}"):
        make()


def test_a_static_scale_may_be_given_by_position() -> None:
    assert gs.Static(1024.0) == gs.Static(init_scale=1024.0)


def test_what_is_printed_says_what_matters() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), weight()
    assert repr(scaler).startswith("GradScaler(scale=8, ")
    scaler.backward(w.sum())
    outcome = scaler.apply(SGD([w], lr=1.0))
    assert repr(outcome) == "StepOutcome('applied', scale=8, skipped_in_a_row=0)"
    assert "applied" in repr(scaler)
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler(disabled)"


LOOP = """
import torch
from torch.optim import SGD
from gradscale.torch import GradScaler
w = torch.zeros(2, dtype=torch.float32, device="cpu", requires_grad=True)
x = torch.tensor([3.0, 4.0], dtype=torch.float32, device="cpu")
{trap}
scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=1, underflow_every=1)
optimizer = SGD([w], lr=1.0)
scaler.on("skip", lambda event: None)
for size in (1.0, float("inf"), 1.0):
    scaler.scale((w * x).sum()).backward()
    w.grad.mul_(size)
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 100.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
scaler.backward((w * x).sum(), loss_id=1)
scaler.apply(optimizer, clip_norm=100.0, clip_value=50.0)
scaler.backward((w * x).sum(), droppable=True)
outcome = scaler.apply(optimizer)
copy = GradScaler("cpu")
copy.load_state_dict(scaler.state_dict())
scaler.flush()
print(w.tolist(), copy.get_scale(), float(outcome.grad_norm), outcome.verdict())
"""


@pytest.mark.parametrize(
    "trap",
    [
        "torch.set_default_dtype(torch.float16)",
        "torch.set_default_dtype(torch.float64)",
        # torch 2.6 cannot import Dynamo, which its optimizers do, with this default.
        'import torch._dynamo; torch.set_default_device("meta")',
    ],
)
def test_defaults_of_torch_do_not_reach_the_engine(trap: str) -> None:
    runs = [run_python("-W", "ignore", "-c", LOOP.format(trap=line)) for line in ("", trap)]
    assert runs[0].stdout.startswith("[-12.0, -16.0]"), runs[0].stderr
    assert runs[1].stdout == runs[0].stdout, runs[1].stderr


def test_a_late_step_does_not_lower_the_scale_because_of_an_earlier_float16_loss() -> None:
    scaler, w = GradScaler("cpu", init_scale=1.0, growth_interval=1), weight()
    optimizer = SGD([w], lr=1.0)
    scaler.watch(optimizer)
    with pytest.warns(UserWarning, match="The loss is float16"):
        scaler.scale(w.sum().half()).backward()
    scaler.update(2.0**16)
    scaler.step(optimizer)
    assert scaler.get_scale() == 2.0**16
    assert scaler.scale(torch.ones(())).item() == 2.0**15  # another one may come


def test_a_scale_that_is_set_is_a_float32_as_torchs_is() -> None:
    scaler, w = GradScaler("cpu"), weight()
    scaler.scale(w.sum())
    scaler.update(3e-5)
    assert scaler.get_scale() == torch.tensor(3e-5, dtype=torch.float32).item()


@pytest.mark.parametrize("first", [True, False])
def test_a_droppable_pass_that_raises_may_be_left_out(first: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), weight()
    optimizer = SGD([w], lr=1.0)
    for fails in (first, not first):
        if fails:
            with pytest.raises(MemoryError):
                scaler.backward(Fails.apply(w).sum(), droppable=True)
        else:
            scaler.backward(w.sum(), droppable=True)
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == -1.0


def test_a_pass_of_an_own_loss_that_raises_is_none_of_the_common_scale() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1), weight()
    with pytest.raises(MemoryError):
        scaler.backward(Fails.apply(w).sum(), loss_id=1)
    scaler.backward(w.sum(), loss_id=1)
    assert scaler.apply(SGD([w], lr=1.0))
    assert [scaler.get_scale(), scaler.get_scale(1)] == [4.0, 8.0]  # as without the first one


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(
    "policy",
    [gs.Static(2.0**16), gs.Dynamic(init_scale=2.0**17, min_scale=2.0**16)],
    ids=["without a floor", "with a high floor"],
)
def test_a_float16_loss_of_its_own_is_limited_by_any_policy(
    policy: gs.Policy, tensors: bool
) -> None:
    scaler, w = GradScaler("cpu", policy=policy), weight()
    if tensors:
        keep_in_tensors(scaler)
    with pytest.warns(UserWarning, match="The loss is float16"):
        scaler.backward(w.half().sum(), loss_id=1)
    assert scaler.apply(SGD([w], lr=1.0))
    assert w.item() == -1.0
    assert scaler.get_scale(1) == 2.0**16  # what the policy can hold


def test_a_float16_penalty_limits_the_first_loss_of_the_next_iteration() -> None:
    scaler, w = GradScaler("cpu", policy=gs.Static(2.0**16)), weight()
    optimizer = SGD([w], lr=1.0)
    with pytest.warns(UserWarning, match="The loss is float16"):
        scaler.grad(w.half().sum(), w)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    scaler.backward(w.sum())
    (grad,) = scaler.grad(w.half().sum(), w)
    assert grad is not None
    assert grad.item() == 1.0


def test_penalties_of_a_second_thread_are_refused() -> None:
    scaler, w = GradScaler("cpu"), weight()
    scaler.backward(w.sum())
    errors: list[Exception] = []

    def penalty() -> None:
        try:
            scaler.grad(w.sum(), w)
        except gs.CallOrderError as error:
            errors.append(error)

    thread = threading.Thread(target=penalty)
    thread.start()
    thread.join()
    assert "second thread" in str(errors)


@pytest.mark.parametrize("enabled", [True, False])
def test_an_iteration_ends_though_zero_grad_raises(enabled: bool) -> None:
    class Clumsy(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            raise MemoryError("planted")

    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1, enabled=enabled), weight()
    optimizer, followed = Clumsy([w], lr=1.0), []
    scaler.follow(lambda: followed.append(w.item()), wait=True)
    for count in (1, 2):
        scaler.backward(w.sum())
        with pytest.raises(MemoryError):
            scaler.apply(optimizer)
        assert len(followed) == count
    assert w.item() == -2.0
    assert scaler.get_scale() == (16.0 if enabled else 1.0)


def test_a_closure_after_gradients_that_no_unscaling_has_seen_is_an_error() -> None:
    scaler, w = GradScaler("cpu"), weight()
    optimizer = SGD([w], lr=1.0)
    scaler.scale(w.sum())
    scaler.unscale_(optimizer)
    w.grad = torch.ones(1)

    def closure() -> Tensor:
        raise AssertionError("evaluated")

    with pytest.raises(gs.CallOrderError, match="but unscale_\\(\\) had found none"):
        scaler.step(optimizer, closure)
    assert w.item() == 0.0


def test_a_pass_after_a_late_step_beside_masters_that_raised_is_noticed() -> None:
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    with_masters = SGD(models[0].parameters(), lr=1.0)
    plain = gradscale.torch.optim.SGD(models[1].parameters(), lr=1.0)
    mp = MixedPrecision(models, [with_masters, plain], "fp16-master", policy=gs.Static(8.0))

    def fail(*_: object) -> None:
        raise MemoryError("planted")

    def run_backward() -> None:
        mp.backward(sum(model(torch.ones(1, 1)).sum() for model in models))

    handle = with_masters.register_step_pre_hook(fail)
    run_backward()
    mp.scaler.update(8.0)
    with pytest.raises(MemoryError):
        mp.step(clip_value=0.5)
    handle.remove()
    run_backward()  # adds scaled gradients to those that are unscaled and clipped
    with pytest.raises(gs.CallOrderError, match="scaled gradients to the unscaled ones"):
        mp.step(clip_value=0.5)


def test_loss_ids_have_one_order_on_all_ranks() -> None:
    guarded = []
    for ids in ((1, "1"), ("1", 1)):
        scaler, w = GradScaler("cpu", init_scale=4.0), weight()
        for loss_id in ids:
            scaler.backward(w.sum(), loss_id=loss_id)
        scaler._state.losses[1] = scaler._state.losses[1]._replace(scale=2.0)
        guarded.append([value.item() for value in scaler._state.guarded()])
    assert guarded[0] == guarded[1]


def test_abandon_waits_for_the_step_of_another_thread() -> None:
    scaler, w = GradScaler("cpu"), weight()
    optimizer = SGD([w], lr=1.0)
    thread = threading.Thread(target=scaler.abandon)

    def in_the_step(*_: object) -> None:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()

    optimizer.register_step_pre_hook(in_the_step)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    thread.join()
    assert w.item() == -1.0


def _iterate(scaler: GradScaler, *weights: Tensor) -> None:
    for each in weights:
        each.grad = None
    loss: Any = sum(each.sum() for each in weights)
    scaler.scale(loss).backward()


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_before_a_scale_that_is_given_is_counted(path: str, bad: bool) -> None:
    with kernels.use(path):
        scaler, a = GradScaler("cpu"), weight()
        sgd = SGD([a], lr=1.0)
        _iterate(scaler, a)
        if bad:
            a.grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(sgd)
        scaler.update(1024.0)
        outcome = scaler.outcome()
        assert scaler.get_scale() == 1024.0
        assert outcome is not None
        assert (bool(outcome), int(outcome.skipped_in_a_row)) == (not bad, int(bad))
        _iterate(scaler, a)
        assert a.grad.item() == 1024.0  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_optimizers_that_were_stepped_can_be_freed(path: str) -> None:
    with kernels.use(path):
        scaler, a, b = GradScaler("cpu"), weight(), weight()
        both = [SGD([a], lr=1.0), SGD([b], lr=1.0)]
        refs = [weakref.ref(optimizer) for optimizer in both]
        for count in (1, 2, 2):
            _iterate(scaler, a, b)
            for optimizer in both[:count]:
                scaler.step(optimizer)
            scaler.update()
        del optimizer
        both.clear()
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


def test_an_optimizer_that_update_frees_hides_no_other() -> None:
    scaler, a, b = GradScaler("cpu"), weight(), weight()
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    _iterate(scaler, a, b)
    scaler.step(first)
    scaler.step(second)
    del first
    scaler.update()
    _iterate(scaler, b)
    scaler.step(second)
    scaler.update()
    assert b.item() == -2.0


def test_an_optimizer_that_dies_while_it_skips_leaves_no_count() -> None:
    scaler, a = GradScaler("cpu"), weight()
    names: list[str] = []
    scaler.on("recover", lambda event: names.append(event.name))
    sgd = SGD([a], lr=1.0)
    scaler.backward((a * math.inf).sum())
    scaler.apply(sgd)
    del sgd
    gc.collect()
    for _ in range(2):
        scaler.backward(a.sum())
        scaler.apply(SGD([a], lr=1.0))
    assert names == []
    assert not scaler._pipeline.monitor.busy


def test_calibrating_prepares_the_log_of_graphs() -> None:
    with kernels.use("triton"):
        scaler, a = GradScaler("cpu"), weight()
        scaler.calibrate(lambda: a.sum(), SGD([a], lr=1.0))
        numbers = torch.zeros(3, dtype=torch.int32)
        scaler._pipeline.monitor.log.log(numbers, Layout((), ()))  # raises if it was not prepared


def test_a_load_forgets_the_steps_since_the_last_update() -> None:
    scaler, a = GradScaler("cpu"), weight()
    sgd, names = SGD([a], lr=1.0), []
    saved = scaler.state_dict()
    scaler.on("skip", lambda event: names.append(event.name))
    _iterate(scaler, a)
    a.grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(sgd)
    scaler.load_state_dict(saved)
    _iterate(scaler, a)
    scaler.step(sgd)
    scaler.update()
    assert names == []


def test_a_copy_goes_on_with_the_counts_of_the_same_optimizers() -> None:
    scaler, a, b = GradScaler("cpu", on_stuck="ignore", stuck_after=2), weight(), weight()
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)

    def step(scaler: GradScaler, bad: bool) -> None:
        each, optimizer = (b, second) if bad else (a, first)
        _iterate(scaler, each)
        if bad:
            b.grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()

    for bad in (False, False, True, True):
        step(scaler, bad)
    twin, names = copy.deepcopy(scaler), []
    for name in ("recover", "stuck"):
        twin.on(name, lambda event: names.append(event.name))
    step(twin, bad=False)
    step(twin, bad=True)
    assert names == []


@pytest.mark.parametrize(("loaded", "clamped"), [(2.0**66, 2.0**64), (2.0**-20, 2.0**-14)])
def test_a_loaded_scale_that_was_clamped_is_a_plain_number(loaded: float, clamped: float) -> None:
    torchs, scaler = torch.amp.GradScaler("cpu", init_scale=loaded), GradScaler("cpu")
    with pytest.warns(UserWarning, match="clamped"):
        scaler.load_state_dict(torchs.state_dict())
    assert type(scaler._state.initial.scale) is float  # torch.full() may take others for an int
    w = weight()
    for _ in range(2):
        scaler.backward(w.sum())
        scaler.apply(SGD([w], lr=0.0), zero_grad=False)
    assert scaler.get_scale() == clamped


def test_a_refused_step_leaves_a_scaler_that_can_be_pickled() -> None:
    w = weight()
    optimizer, scaler = SGD([w], lr=0.1), GradScaler("cpu")
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    with pytest.raises(gs.CallOrderError, match="no new gradients"):
        scaler.step(optimizer)
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_shared_gradient_that_is_clipped_after_a_step_is_not_divided_again(fused: bool) -> None:
    weights = []
    for scale in (1.0, 1024.0):
        w = torch.ones(3, requires_grad=True)
        first, second = (SGD([w], lr=0.25, fused=fused) for _ in range(2))
        scaler = GradScaler("cpu", init_scale=scale)
        scaler.scale((w * torch.tensor([4.0, 0.0, 3.0])).sum()).backward()
        scaler.step(first)  # the scaler has not met the second one yet
        torch.nn.utils.clip_grad_value_([w], 2.0)
        scaler.step(second)
        weights.append(w.detach())
    assert torch.equal(*weights)
    assert weights[0].tolist() == [-0.5, 1.0, -0.25]


def test_a_scale_that_torch_saves_before_the_first_loss_is_loaded_in_float32() -> None:
    state = torch.amp.GradScaler("cpu", init_scale=0.3).state_dict()
    assert state["scale"] == 0.3  # not yet rounded
    scaler = GradScaler("cpu")
    scaler.load_state_dict(state)
    assert scaler.get_scale() == torch.tensor(0.3).item()


def test_zeros_of_a_second_optimizer_do_not_hide_gradients_of_the_first() -> None:
    w, v = weight(), weight()
    first, second = SGD([w], lr=0.1), SGD([v], lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(w.sum() + v.sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    before = scaler.get_scale()
    w.grad, v.grad = torch.ones_like(w), torch.zeros_like(v)  # made by hand
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert scaler.get_scale() == 2 * before
