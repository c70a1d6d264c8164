"""Our optimizers beside torch's: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscale import SettingError
from gradscale.torch import GradScaler, optim
from gradscale.torch.grads import dispatch as kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE = "cuda" if torch.cuda.is_available() else "cpu"


class LionInDouble(torch.optim.Optimizer):
    """Lion as its paper writes it."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        self.numbers = lr, *betas, weight_decay, -1 if maximize else 1
        self.doubtful: dict[Any, Any] = {}
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        lr, first, second, decay, sign = self.numbers
        for w in self.param_groups[0]["params"]:
            m = self.state[w].setdefault("exp_avg", torch.zeros_like(w))
            mixed = first * m + (1 - first) * sign * w.grad
            # The sign of a sum that is 0 to the rounding is anybody's guess.
            doubt = mixed.abs() <= 2.0**-20 * (m.abs() + w.grad.abs())
            self.doubtful[w] = self.doubtful.get(w, False) | doubt
            update = torch.sign(mixed)
            w.sub_(lr * (update + decay * w))
            m.copy_(second * m + (1 - second) * sign * w.grad)


PAIRS = [
    (optim.Adam, torch.optim.Adam),
    (optim.AdamW, torch.optim.AdamW),
    (optim.SGD, torch.optim.SGD),
]
ADAM: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.0},
    {"betas": (0.0, 0.999)},
]
CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    *[(*pair, settings) for pair in PAIRS[:2] for settings in ADAM],
    (*PAIRS[2], {"lr": 1e-3}),
    (*PAIRS[2], {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
    (*PAIRS[2], {"lr": 1e-3, "momentum": 0.5, "dampening": 0.3, "maximize": True}),
    (*PAIRS[2], {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.Lion, LionInDouble, {}),
    (optim.Lion, LionInDouble, {"lr": 1e-3, "betas": (0.5, 0.7), "weight_decay": 0.5}),
    (optim.Lion, LionInDouble, {"maximize": True}),
]
KINDS: list[Any] = [
    optim.Adam,
    optim.AdamW,
    optim.Lion,
    lambda w, **s: optim.SGD(w, momentum=0.9, dampening=0.1, **s),
]
SIZES = [(3,), (7, 5), (0,), (4096 + 5,)]
LARGE = [*SIZES, (2**15 + 1,)]
"""With a tensor that several programs step, each of them a chunk."""


def params(sizes: list[Any] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(HERE).requires_grad_() for size in sizes]


def fill(weights: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for w in weights:
        values = torch.randn(w.shape, generator=generator) * 10.0 ** (step % 5 - 2)
        w.grad = values.to(device=HERE, dtype=w.dtype)


def run(
    kind: Any, path: str, steps: int, sizes: list[Any] = SIZES, **settings: Any
) -> tuple[list[Tensor], Any]:
    weights = params(sizes)
    optimizer = kind(weights, **settings)
    with kernels.use(path):
        for step in range(steps):
            fill(weights, step)
            optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize(("ours", "theirs", "settings"), CASES)
@pytest.mark.parametrize("path", ["triton", "reference"])
def test_steps_are_torchs_to_the_rounding(
    ours: Any, theirs: Any, settings: dict[str, Any], path: str
) -> None:
    steps = 1000 if HERE == "cuda" else 3
    mine, optimizer = run(ours, path, steps, LARGE, **settings)
    exact = [w.detach().double().requires_grad_() for w in params(LARGE)]
    reference = theirs(exact, **settings)
    size = max(float(w.detach().abs().max()) for w in exact if w.numel())
    for step in range(steps):
        fill(exact, step)
        reference.step()
        size = max(size, *(float(w.detach().abs().max()) for w in exact if w.numel()))
    lr = settings.get("lr", 1e-4 if ours is optim.Lion else 1e-3)
    # Every step rounds a parameter once (half a unit of the largest) and its change to some ten
    # units. Adam's change is lr times a few. SGD's is lr times a gradient, here up to 500, that
    # momentum adds up to ten times. Lion's is lr.
    change = {optim.SGD: 500 * 10 * 64, optim.Lion: 64}.get(ours, 64) * lr
    bound = steps * 2.0**-24 * (size + change)
    doubtful = getattr(reference, "doubtful", {})
    for w, e in zip(mine, exact, strict=True):
        doubt = doubtful.get(e, torch.zeros_like(e, dtype=torch.bool))
        assert torch.all(((w.double() - e).abs() <= bound) | doubt)
        assert int(doubt.sum()) <= doubt.numel() / 100
    counts = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert counts <= {float(steps)}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_states_go_over_to_torch_and_back(ours: Any, theirs: Any) -> None:
    settings = {"momentum": 0.9, "lr": 0.01} if ours is optim.SGD else {}
    mine, optimizer = run(ours, "triton", 3, **settings)
    twin = [w.detach().clone().requires_grad_() for w in mine]
    other = theirs(twin, fused=True, **settings)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = [w.detach().clone().requires_grad_() for w in mine]
    again = ours(back, **settings)
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    thawed = pickle.loads(pickle.dumps(optimizer))
    with kernels.use("triton"):
        for weights, stepped in ((mine, optimizer), (back, again)):
            fill(weights, 9)
            stepped.step()
        frozen = thawed.param_groups[0]["params"]
        fill(frozen, 9)
        thawed.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, back, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mine, frozen, strict=True))
    fill(twin, 9)
    other.step()
    for a, b in zip(mine, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_state_of_torchs_that_was_not_fused_is_fused_here(ours: Any, theirs: Any) -> None:
    settings = {"momentum": 0.9, "dampening": 0.5, "lr": 0.01} if ours is optim.SGD else {}
    weights, other = run(theirs, "reference", 3, **settings)
    assert not other.param_groups[0]["fused"]
    twin = [w.detach().clone().requires_grad_() for w in weights]
    mine = ours(twin, **settings)
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    assert mine.param_groups[0]["fused"] is True
    counters = [state["step"] for state in mine.state.values() if "step" in state]
    assert {counter.device.type for counter in counters} <= {HERE}
    scaler = GradScaler(HERE, init_scale=4.0)
    with kernels.use("triton"):
        scaler.scale(sum((w.sum() for w in twin), torch.zeros((), device=HERE))).backward()
        scaler.step(mine)
    for w in weights:
        w.grad = torch.ones_like(w)
    other.step()
    for a, b in zip(twin, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_state_that_is_cleared_or_replaced_is_not_gone_on_with() -> None:
    w = torch.ones(4, device=HERE, requires_grad=True)
    optimizer = optim.Adam([w], lr=0.5)
    with kernels.use("triton"):
        for change in (lambda: None, optimizer.state.clear, lambda: None):
            change()
            w.grad = torch.ones_like(w)
            optimizer.step()
        assert float(optimizer.state[w]["step"]) == 2.0
        optimizer.state[w]["exp_avg"] = torch.full_like(w, 7.0)
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert optimizer.state[w]["exp_avg"].tolist() == pytest.approx([6.3] * 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("scaler_kind", [GradScaler, torch.amp.GradScaler])
def test_a_skipped_step_writes_nothing(kind: Any, scaler_kind: Any, path: str) -> None:
    weights = params()
    optimizer = kind(weights, lr=0.1)
    scaler = scaler_kind(HERE, init_scale=4.0)

    def step(bad: bool) -> None:
        scaler.scale(sum((w.sum() for w in weights), torch.zeros((), device=HERE))).backward()
        if bad:
            weights[1].grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with kernels.use(path):
        step(True)  # the first one of all
        for state in optimizer.state.values():
            assert not any(value.any() for value in state.values() if value is not None)
        step(False)
        before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
        step(True)
        after = (weights, optimizer.state_dict()["state"])
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    for old, new in zip(before[1].values(), after[1].values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_scaled_and_clipped_steps_are_those_of_unscaled_gradients() -> None:
    def train(scaled: bool) -> list[Tensor]:
        weights = params()
        optimizer = optim.AdamW(weights, lr=0.1)
        scaler = GradScaler(HERE, init_scale=2.0**12, enabled=scaled)
        with kernels.use("triton"):
            for step in range(2):
                scaler.backward(sum((w.square().sum() for w in weights), torch.zeros(())))
                scaler.apply(optimizer, clip_norm=3.0 + step)
        return weights

    for a, b in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_parameters_join_leave_and_move() -> None:
    weights = params()
    ours = optim.AdamW(weights[:3])
    twin = [w.detach().clone().requires_grad_() for w in weights]
    theirs = torch.optim.AdamW(twin[:3])  # its fused step refuses the last gradient on a GPU
    with kernels.use("triton"):
        for step in range(6):
            for group, optimizer in ((weights, ours), (twin, theirs)):
                fill(group, step)
                if step == 2:
                    group[1].grad = None
                if step == 3:
                    optimizer.add_param_group({"params": group[3:], "lr": 0.5})
                if step == 4:
                    group[0].data = group[0].data.clone()
                if step == 5:
                    group[1].grad = group[1].grad.t().contiguous().t()
                optimizer.step()
    for a, b in zip(weights, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_laid_out_in_any_dense_way(kind: Any) -> None:
    def train(last: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn(shape, generator=generator).to(HERE)
            for shape in ((4, 3, 2, 2), (5, 2, 3, 1), (6,))
        ]
        if last:
            form = torch.channels_last
            weights[:2] = [w.contiguous(memory_format=form) for w in weights[:2]]
        weights = [w.requires_grad_() for w in weights]
        optimizer, scaler = kind(weights, lr=0.1), GradScaler(HERE, init_scale=4.0)
        with kernels.use("triton"):
            for _ in range(2):
                scaler.backward(sum((w * w.detach().abs()).sum() for w in weights))
                assert optimizer.fused_plan() is not None
                scaler.apply(optimizer)
        assert not last or not weights[0].is_contiguous()
        return weights

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_hooks_and_wrappers_of_a_step_are_called_once() -> None:
    weights = params()
    optimizer, scaler = optim.AdamW(weights, lr=0.1), GradScaler(HERE)
    calls: list[str] = []
    for path in ("triton", "reference"):
        with kernels.use(path):
            hooks = [
                optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
                optimizer.register_step_post_hook(lambda *_: calls.append("post")),
            ]
            scaler.backward(sum(w.sum() for w in weights))
            scaler.apply(optimizer)
            assert calls == ["pre", "post"]
            for hook in hooks:
                hook.remove()
            calls.clear()
    step = optimizer.step
    optimizer.step = lambda *args: (calls.append("mine"), step(*args))  # type: ignore[method-assign]
    with kernels.use("triton"):
        scaler.backward(sum(w.sum() for w in weights))
        scaler.apply(optimizer)
    assert calls == ["mine"]


def test_a_hook_that_replaces_gradients_is_heeded() -> None:
    w = torch.ones(4, device=HERE, requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=1.0), GradScaler(HERE, init_scale=4.0)

    def replace(*_: object) -> None:
        w.grad = torch.full_like(w, 8.0)

    with kernels.use("triton"):
        scaler.backward(w.sum())
        optimizer.register_step_pre_hook(replace)
        scaler.apply(optimizer)
    assert w.tolist() == [-1.0] * 4  # 1 - 8 / 4


def test_a_group_that_is_replaced_is_heeded() -> None:
    w = torch.ones(4, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=1.0)
    with kernels.use("triton"):
        for lr in (1.0, 0.5):
            optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": lr}
            w.grad = torch.ones_like(w)
            optimizer.step()
    assert w.tolist() == [-0.5] * 4


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_the_first_applied_step_of_sgd_takes_no_dampening(path: str) -> None:
    w = torch.zeros(4, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=1.0, momentum=0.5, dampening=0.75)
    scaler = GradScaler(HERE, init_scale=4.0)
    seen = []
    with kernels.use(path):
        for bad in (True, False, False):
            scaler.backward(w.sum())
            if bad:
                w.grad[0] = math.inf
            scaler.apply(optimizer)
            seen.append(w.tolist()[0])
    assert seen == [0.0, -1.0, -1.75]  # 0.5 * 1 + 0.25 * 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_dampening_begins_with_every_parameter(dtype: torch.dtype) -> None:
    weights = [torch.zeros(4, dtype=dtype, requires_grad=True) for _ in range(2)]
    twins = [torch.zeros(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    settings = {"lr": 1.0, "momentum": 0.5, "dampening": 0.5}
    ours, theirs = optim.SGD(weights, **settings), torch.optim.SGD(twins, **settings)
    for number in (1, 2, 2):  # the second one joins later
        for some, optimizer in ((weights, ours), (twins, theirs)):
            for w in some[:number]:
                w.grad = torch.ones_like(w)
            with kernels.use("reference"):
                optimizer.step()
    assert [w.tolist() for w in weights] == [w.tolist() for w in twins]
    assert ours.param_groups[0]["dampening"] == 0.5
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(w) for w in weights]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["triton", "reference"])
def test_gradients_may_be_laid_out_otherwise(kind: Any, path: str) -> None:
    def train(gradient: Any, last: bool = False) -> list[float]:
        w = torch.zeros(2, 3, 2, 2, device=HERE)
        w = w.contiguous(memory_format=torch.channels_last) if last else w
        optimizer = kind([w.requires_grad_()], lr=0.1)
        for step in range(2):
            w.grad = gradient(torch.arange(24.0, device=HERE).view(2, 3, 2, 2) + step)
            with kernels.use(path):
                optimizer.step()
        return w.flatten().tolist()

    plain = train(lambda values: values)
    assert train(lambda v: v.contiguous(memory_format=torch.channels_last)) == plain
    assert train(lambda values: values, last=True) == plain
    ones = train(lambda values: torch.ones_like(values))
    assert train(lambda values: torch.ones((), device=HERE).expand(values.shape)) == ones
    assert ones != plain


def test_states_and_parameters_that_move_at_the_same_place_are_noticed() -> None:
    w = torch.zeros(8, device=HERE, requires_grad=True)
    store, optimizer = w.data, optim.SGD([w], lr=1.0, momentum=0.5)
    with kernels.use("triton"):
        w.grad = torch.ones(8, device=HERE)
        optimizer.step()
        buffer = optimizer.state[w]["momentum_buffer"]
        buffer.data = torch.zeros(8, device=HERE)
        optimizer.step()
        assert buffer.tolist() == [1.0] * 8
        w.grad = None
        w.data = w.data[:4]
        w.grad = torch.ones(8, device=HERE)[:4]
        optimizer.state.clear()
        optimizer.step()
    assert store.tolist() == [-3.0] * 4 + [-2.0] * 4


def test_autograd_hears_of_a_step() -> None:
    w = torch.ones(4, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=1.0)
    loss = (w * w).sum()
    w.grad = torch.ones_like(w)
    with kernels.use("triton"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_the_kernel_does_not_do_is_torchs_and_said_once() -> None:
    weights = params()
    double = [torch.ones(3, device=HERE, dtype=torch.float64, requires_grad=True)]
    double[0].grad = torch.ones_like(double[0])
    optimizer = optim.AdamW(weights, amsgrad=True)
    fill(weights, 0)
    with kernels.use("reference"):
        optim.AdamW(double).step()  # nobody asked for kernels, so nothing is missing
    with kernels.use("triton"):
        with pytest.warns(UserWarning, match="amsgrad"):
            optimizer.step()
        fill(weights, 1)
        optimizer.step()
        with pytest.warns(UserWarning, match="float32"):
            optim.AdamW(double).step()
    for wrong in ({"fused": False}, {"foreach": True}, {"differentiable": True}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            optim.Adam(weights, **wrong)
        with pytest.raises(SettingError, match=next(iter(wrong))):
            optim.SGD([{"params": weights, **wrong}], lr=1.0)


def test_a_closure_and_a_learning_rate_that_is_a_tensor() -> None:
    def train(lr: Any) -> tuple[list[Tensor], Any]:
        weights = params()
        optimizer = optim.AdamW(weights, lr=lr)

        def closure() -> float:
            fill(weights, 1)
            return 7.0

        with kernels.use("triton"):
            return weights, optimizer.step(closure)

    plain, loss = train(0.125)
    assert loss == 7.0
    tensor, _ = train(torch.tensor(0.125, device=HERE))
    for a, b in zip(plain, tensor, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_parameter_that_changes_its_format_or_size_is_not_taken_for_what_it_was() -> None:
    weights = [torch.ones(64, device=HERE, requires_grad=True)]
    optimizer = optim.AdamW(weights, lr=0.1)
    with kernels.use("triton"):
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.step()
        weights[0].grad = None
        weights[0].data = weights[0].data.double()
        weights[0].grad = torch.ones_like(weights[0])
        optimizer.state.clear()
        with pytest.warns(UserWarning, match="float32"):
            optimizer.step()
        weights[0].grad = None
        weights[0].data = torch.ones(4, device=HERE)
        weights[0].grad = torch.ones(4, device=HERE)
        optimizer.state.clear()
        optimizer.step()
    assert optimizer.state[weights[0]]["exp_avg"].shape == (4,)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.AdamW])
def test_a_captured_step_skips_recovers_and_grows_as_an_eager_one(kind: Any) -> None:
    def world() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64, device="cuda")
        settings = {} if kind is optim.AdamW else {"fused": True, "capturable": True}
        optimizer = kind(model.parameters(), lr=torch.tensor(0.01, device="cuda"), **settings)
        scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=3, on_stuck="ignore")
        return model, optimizer, scaler, torch.ones(8, 64, device="cuda")

    def step(model: Any, optimizer: Any, scaler: GradScaler, inputs: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    eager, graphed = world(), world()
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(12)]
    for bad in (3, 4, 8):
        inputs[bad][0, 0] = 2.0**100
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*graphed)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(*eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*graphed)
    for values in inputs:
        for one in (eager, graphed):
            one[3].copy_(values)
        graph.replay()
        step(*eager)
        assert eager[2].get_scale() == graphed[2].get_scale()
        assert torch.equal(eager[0].weight, graphed[0].weight)
    fill(params(), 0)  # others come and go, and write where they like
    graphed[3].copy_(inputs[0])
    graph.replay()
    assert torch.isfinite(graphed[0].weight).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_copy_of_a_model_and_its_optimizer_goes_on_as_the_original(
    kind: Any, path: str, steps: int, dtype: torch.dtype
) -> None:
    def step(model: torch.nn.Module, optimizer: Any, scaler: GradScaler) -> None:
        scaler.backward(sum(p.float().square().sum() for p in model.parameters()))
        scaler.apply(optimizer)

    model = torch.nn.Linear(3, 2, device=HERE, dtype=dtype)
    optimizer, scaler = kind(model.parameters(), lr=0.1), GradScaler(HERE, init_scale=4.0)
    with kernels.use(path):
        for _ in range(steps):
            step(model, optimizer, scaler)
        twin, other, second = copy.deepcopy((model, optimizer, scaler))
        before = [p.detach().clone() for p in model.parameters()]
        step(twin, other, second)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        step(model, optimizer, scaler)
    for a, b, old in zip(model.parameters(), twin.parameters(), before, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, old)
    assert other.state.keys() == set(twin.parameters())


def test_a_shallow_copy_keeps_masters_in_its_own_way() -> None:
    w = torch.ones(4, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=0.5)
    copy.copy(optimizer).keep_masters("split")
    w.grad = torch.ones_like(w)
    with kernels.use("reference"):
        optimizer.step()
    assert list(optimizer.state[w]) == ["master"]


@pytest.mark.parametrize("kind", KINDS)
def test_changes_between_two_steps_without_kernels_are_heeded(kind: Any) -> None:
    def train(change: int | None) -> list[Tensor]:
        weights = params()
        optimizer = kind(weights, lr=0.1)
        with kernels.use("reference"):
            for step in range(4):
                fill(weights, step)
                if step == 2:
                    if change == 0:
                        weights[0].data = weights[0].data.clone()
                    elif change == 1:
                        weights[1].data = weights[1].data.t().contiguous().t()
                    elif change == 2:
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    elif change == 3:
                        for state in optimizer.state.values():
                            state.update({name: value.clone() for name, value in state.items()})
                    elif change == 4:
                        optimizer.param_groups[0] = dict(optimizer.param_groups[0])
                    elif change == 5:
                        weights[1].grad = weights[1].grad.t().contiguous().t()
                optimizer.step()
        return weights

    plain = train(None)
    for change in range(6):
        for a, b in zip(train(change), plain, strict=True):
            # In another layout other elements are last, which torch's loop rounds otherwise:
            # in each of two steps by a unit of the largest number that is added, which is below 8.
            torch.testing.assert_close(a, b, rtol=0, atol=2 * 8 * 2.0**-23 if change == 1 else 0)


def test_parameters_without_gradients_come_and_go_without_kernels() -> None:
    weights, twins = params(), params()
    ours, theirs = optim.AdamW(weights), torch.optim.AdamW(twins, fused=HERE == "cpu")
    with kernels.use("reference"):
        for missing in (None, 1, 1, 0, None):
            for some, optimizer in ((weights, ours), (twins, theirs)):
                fill(some, 0)
                if missing is not None:
                    some[missing].grad = None
                optimizer.step()
    for a, b in zip(weights, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optim.AdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with kernels.use("reference"), pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Lion])
def test_complex_parameters_are_refused(kind: Any) -> None:
    real, other = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.complex64)
    with pytest.raises(SettingError, match="complex64"):
        kind([{"params": [real]}, {"params": [other.requires_grad_()]}], lr=0.1)
    optimizer = kind([real], lr=0.1)
    with pytest.raises(SettingError, match="complex64"):
        optimizer.add_param_group({"params": [other]})
    assert [group["params"] for group in optimizer.param_groups] == [[real]]


def test_a_subclass_that_wraps_step_is_called() -> None:
    calls: list[str] = []

    class Mine(optim.SGD):
        @functools.wraps(optim.SGD.step)
        def step(self, closure: Any = None) -> Any:
            calls.append("mine")
            return super().step(closure)

    w = torch.ones(4, device=HERE, requires_grad=True)
    optimizer, scaler = Mine([w], lr=1.0), GradScaler(HERE, init_scale=4.0)
    with kernels.use("triton"):
        for _ in range(2):
            scaler.backward(w.sum())
            scaler.apply(optimizer)
    assert calls == ["mine"] * 2
    assert w.tolist() == [-1.0] * 4


def test_a_plan_checks_every_address_once_a_step() -> None:
    from gradscale.torch.optim.launch_plan import LaunchPlan

    weights = params()
    optimizer, scaler = optim.AdamW(weights, lr=0.1), GradScaler(HERE)
    calls: list[str] = []
    with kernels.use("triton"), pytest.MonkeyPatch.context() as patch:
        for name in ("point_to", "rest_holds"):
            known = getattr(LaunchPlan, name)

            def counted(self: Any, *args: Any, name: str = name, known: Any = known) -> Any:
                calls.append(name)
                return known(self, *args)

            patch.setattr(LaunchPlan, name, counted)
        for _ in range(3):
            scaler.backward(sum(w.sum() for w in weights))
            calls.clear()
            scaler.apply(optimizer)
    assert calls == ["point_to", "rest_holds"]
