"""The inspector: what it samples is what passed through the model, and it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import torch_has  # noqa: E402
from gradscale.errors import SettingError  # noqa: E402
from gradscale.formats import format_named  # noqa: E402
from gradscale.policy import Static  # noqa: E402
from gradscale.runlog import read  # noqa: E402
from gradscale.torch import GradScaler, Inspector, MixedPrecision  # noqa: E402
from gradscale.torch.optim import AdamW  # noqa: E402


def mlp(**settings: Any) -> nn.Sequential:
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(**settings)


class Loop:
    """A model that is trained in float16, step by step."""

    def __init__(self, model: nn.Module, every: int = 4, **settings: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.scaler = GradScaler("cpu", **{"policy": Static(init_scale=2.0**8), **settings})
        self.inspector = Inspector(model, self.scaler, every=every)

    def loss(self, x: Tensor | None = None) -> Tensor:
        """The loss of a batch."""
        x = torch.randn(16, 8) if x is None else x
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(x)
        return functional.mse_loss(out.float(), x.sum(1, keepdim=True))

    def step(self, x: Tensor | None = None) -> None:
        """One iteration of torch's loop."""
        self.scaler.scale(self.loss(x)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def hooks(model: nn.Module) -> int:
    """How many hooks the modules have."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_are_there_in_sampled_iterations_alone() -> None:
    loop = Loop(mlp(), every=4)
    there = []
    for _ in range(9):
        there.append(bool(hooks(loop.model)))
        loop.step()
    assert there == [True, False, False, False] * 2 + [True]
    assert [sample.step for sample in loop.inspector.samples] == [1, 5, 9]
    loop.inspector.close()
    assert hooks(loop.model) == 0
    assert loop.scaler._pipeline.monitor.watchers == []
    assert loop.optimizer._optimizer_step_pre_hooks == {}


def test_nothing_is_left_after_an_exception_or_without_the_inspector() -> None:
    model = mlp()
    scaler = GradScaler("cpu")

    kept = Inspector(model, scaler)

    def fail() -> None:
        with kept:
            assert hooks(model)
            model(torch.ones(1, 8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hooks(model) == 0
    inspector = Inspector(model, scaler)
    assert hooks(model)
    del inspector
    gc.collect()
    assert hooks(model) == 0


def test_a_graph_that_outlives_the_sample_has_no_hook_of_it() -> None:
    loop = Loop(mlp(), every=100)
    loss = loop.loss()
    loop.step()
    assert hooks(loop.model) == 0
    before = loop.inspector.samples
    loss.backward()  # the graph was made in the sampled iteration
    assert loop.inspector.samples == before


def true_counts(tensor: Tensor, smallest: float) -> tuple[int, int, int]:
    """Elements that are zero, and that are nonzero and below a number, in float64; all of them."""
    values = tensor.detach().double().abs()
    return int((values == 0).sum()), int(((values > 0) & (values < smallest)).sum()), values.numel()


@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_layers_are_counted_as_float64_counts_them(dtype: torch.dtype, scale: float) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))
    factor = 2.0**-6 if dtype is torch.float16 else 2.0**-118  # into the subnormal numbers
    outputs: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        name = next(name for name, each in model.named_modules() if each is module)
        outputs[name] = output.clone()
        output.register_hook(lambda grad: grads.update({name: grad.clone()}))

    for module in model:
        module.register_forward_hook(keep)
    inspector = Inspector(model, every=1)
    with torch.autocast("cpu", dtype=dtype):
        out = model(torch.randn(128, 8))
    (out.float().square().mean() * factor * scale).backward()
    inspector.step()
    (sample,) = inspector.samples
    smallest = format_named(sample.format).smallest_normal
    assert sample.format == str(dtype).removeprefix("torch.")
    weights = {n: p.grad for n, p in model.named_parameters()}
    for kind, true in (
        ("activation", outputs),
        ("activation_grad", grads),
        ("weight_grad", weights),
    ):
        assert len(sample.of(kind)) == len(true)
        for tensor in sample.of(kind):
            zeros, below, numel = true_counts(true[tensor.name], smallest)
            assert (tensor.zeros, tensor.below(smallest), tensor.numel) == (zeros, below, numel)
    if scale < 1:
        assert any(tensor.below(smallest) for tensor in sample.of("activation_grad"))


def test_replay_distinguishes_zeros_that_underflow_has_made() -> None:
    loop = Loop(mlp(), policy=Static(init_scale=2.0**-20))
    loop.step()
    x = torch.randn(16, 8)
    before = [p.detach().clone() for p in loop.model.parameters()]
    state = torch.get_rng_state()

    def closure() -> Tensor:
        return functional.mse_loss(loop.model(x).float(), x.sum(1, keepdim=True))

    sample = loop.inspector.replay(closure)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert all(param.grad is None for param in loop.model.parameters())

    def gradient(enabled: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            loss = closure()
        (grad,) = torch.autograd.grad(2.0**-20 * loss.float(), [loop.model[0].weight])
        return grad

    narrow, wide = gradient(True), gradient(False)
    (found,) = [t for t in sample.of("weight_grad") if t.name == "0.weight"]
    flushed = int(((narrow == 0) & (wide != 0)).sum())
    assert found.flushed == flushed > 0
    assert found.zeros == int((narrow == 0).sum())
    assert found.underflow() == flushed / int((wide != 0).sum())
    assert "underflow" in {finding.kind for finding in loop.inspector.findings()}


def test_a_closure_with_autocast_of_its_own_is_refused() -> None:
    loop = Loop(mlp())
    with pytest.raises(SettingError, match="Remove autocast from the closure"):
        loop.inspector.replay(loop.loss)
    with pytest.raises(SettingError, match="closure must return the loss"):
        loop.inspector.replay(lambda: None)  # type: ignore[arg-type,return-value]
    assert hooks(loop.model) > 0  # the sample that was open is open again


class Pair(nn.Module):
    """One layer that is used twice, another not at all, and a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.twice, self.never, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.twice(self.twice(x))))


def test_modules_that_are_used_twice_and_parameters_without_gradient_are_facts() -> None:
    loop = Loop(Pair(), every=10)
    for _ in range(21):
        loop.step()
    sample = loop.inspector.samples[-1]
    assert sample.fact("used_twice") == {"twice": 2.0}
    assert sample.fact("no_grad") == {"never.weight": 1.0, "never.bias": 1.0}
    (finding,) = loop.inspector.findings()
    assert (finding.kind, finding.where) == ("dead-gradient", "never")


class Turns(nn.Module):
    """Two heads; one of them is used in every second iteration, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """The output of the head whose turn it is."""
        self.calls += 1
        return self.heads[self.calls % 2](x)


def test_a_head_that_is_never_used_in_a_sampled_iteration_is_not_dead() -> None:
    loop = Loop(Turns(), every=4)
    for _ in range(24):
        loop.step()
    sampled = {t.name for s in loop.inspector.samples for t in s.of("weight_grad")}
    assert sampled == {"heads.1.weight", "heads.1.bias"}
    (finding,) = loop.inspector.findings()
    assert (finding.kind, finding.where) == ("dead-gradient", "heads.2")


def test_weights_that_change_their_size_between_samples_are_left_out() -> None:
    loop = Loop(Turns(), every=2)
    loop.step()
    with torch.no_grad():
        loop.model.heads[2].weight.data = torch.ones(1, 4)
    for _ in range(3):
        loop.step()
    assert not loop.inspector.samples[-1].fact("trained_between").get("heads.2.weight")


@pytest.mark.parametrize(
    ("between", "where", "direction"),
    [
        (lambda x: (x - 1e9).log(), "", "forward"),
        (lambda x: (0 * x).square().sqrt(), "", "backward"),
    ],
)
def test_a_function_between_modules_is_put_down_to_the_module_around_it(
    between: Callable[[Tensor], Tensor], where: str, direction: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Pair(between))
    loop = Loop(model, every=1, on_stuck="ignore")
    loop.step()
    (sample,) = loop.inspector.samples
    assert sample.first_nonfinite is not None
    assert sample.first_nonfinite[:2] == ("1", direction)


def test_large_weights_are_part_of_the_evidence_of_an_overflow() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight.fill_(4e4)
    loop = Loop(model, every=1, on_stuck="ignore")
    loop.step()
    (finding,) = loop.inspector.findings()
    assert (finding.kind, finding.where) == ("forward-overflow", "2")
    assert "its weights reach 4e+04" in finding.evidence
    assert finding.remedy.startswith("Lower the learning rate")


@pytest.mark.parametrize("named", [False, True])
def test_messages_of_the_scaler_have_the_names_of_the_model(named: bool) -> None:
    model, kinds = mlp(), {"scale too high", "NaN at any scale"}
    loop = Loop(model, policy=Static(init_scale=2.0**40))
    if named:
        loop.scaler.name(nn.ModuleDict({"mine": model}))
    loop.step()
    outcome = loop.scaler.outcome()
    assert outcome.verdict() in kinds
    first = outcome.culprits()[0].name
    assert first == ("mine.0.weight" if named else "0.weight")


def test_the_range_of_the_inputs_is_exact() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight.fill_(1e5)
    loop = Loop(model, every=1)
    x = torch.randn(16, 8)
    loop.step(x)
    with torch.autocast("cpu", dtype=torch.float16):
        inputs = model[:2](x).detach()
    (sample,) = loop.inspector.samples
    expected = ("2", "forward", float(inputs.min()), float(inputs.max()))
    assert sample.first_nonfinite == expected


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.scores_masked, self.out = nn.Linear(8, 8), Masked(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(8)
        mask[4:] = -math.inf
        return self.out(self.scores_masked(self.scores(x), mask).softmax(-1))


def test_minus_infinity_that_a_softmax_takes_out_is_healthy() -> None:
    loop = Loop(Attends(), every=1)
    loop.step()
    assert loop.inspector.samples[-1].first_nonfinite is None
    assert any(tensor.infs for tensor in loop.inspector.samples[-1].of("activation"))
    assert loop.inspector.findings() == []
    with torch.no_grad():
        loop.model.out.weight.fill_(1e6)
    loop.step()  # nor is it the first suspect when something else overflows
    assert loop.inspector.samples[-1].first_nonfinite[:2] == ("out", "forward")


def test_an_infinite_input_is_the_data() -> None:
    loop = Loop(mlp(), every=1)
    loop.step(torch.full((16, 8), math.nan))
    (finding,) = loop.inspector.findings()
    assert (finding.kind, finding.where) == ("data-not-finite", "")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_counted_once(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.first, self.inner, self.again = nn.Linear(8, 8), mlp(), again

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return (
                checkpoint(self.inner, x, use_reentrant=reentrant) if self.again else self.inner(x)
            )

    samples = []
    x = torch.randn(16, 8)
    start = Again(True).state_dict()
    for again in (True, False):
        model = Again(again)
        model.load_state_dict(start)
        loop = Loop(model, every=1)
        loop.step(x)
        samples.append(loop.inspector.samples[0])
    kinds = ("activation", "activation_grad", "weight_grad")
    here, there = ({(t.kind, t.name): t for k in kinds for t in s.of(k)} for s in samples)
    assert here == there


def test_several_passes_of_an_iteration_are_one_sample() -> None:
    loop = Loop(mlp(), every=1)
    for _ in range(3):
        loop.scaler.scale(loop.loss()).backward()
    grads = {name: p.grad.clone() for name, p in loop.model.named_parameters()}
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    (sample,) = loop.inspector.samples
    assert [t.numel for t in sample.of("activation")] == [3 * 16 * 32, 3 * 16 * 32, 3 * 16]
    for tensor in sample.of("weight_grad"):
        assert tensor.numel == grads[tensor.name].numel()
        assert tensor.zeros == int((grads[tensor.name] == 0).sum())


def test_a_sample_waits_for_an_iteration_in_which_the_model_has_a_pass() -> None:
    first, second = mlp(), mlp()
    one, two = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (first, second))
    scaler = GradScaler("cpu")
    inspector = Inspector(first, scaler, every=4)
    for model, optimizer in ((second, two), (first, one), (second, two)):
        scaler.scale(model(torch.randn(4, 8)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    (sample,) = inspector.samples
    assert sample.step == 2
    assert len(sample.of("weight_grad")) == 4


def test_an_evaluation_is_not_part_of_a_sample() -> None:
    loop = Loop(mlp(), every=1)
    loop.model.eval()
    with torch.no_grad():
        loop.model(torch.full((100, 8), math.nan))
    loop.model.train()
    loop.step()
    (sample,) = loop.inspector.samples
    assert [t.numel for t in sample.of("activation")] == [16 * 32, 16 * 32, 16]
    assert sample.fact("data_nonfinite") == {}


def test_a_copy_or_a_pickle_of_a_sampled_model_is_not_sampled() -> None:
    loop = Loop(mlp(), every=1)
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        other(torch.ones(2, 8)).sum().backward()
        for module in other.modules():  # the hooks that were copied have gone
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._forward_pre_hooks_with_kwargs
    loop.step()
    (sample,) = loop.inspector.samples
    assert [t.numel for t in sample.of("activation")] == [16 * 32, 16 * 32, 16]


def test_samples_are_bounded_and_come_after_a_skipped_step() -> None:
    loop = Loop(mlp(), every=20, policy=None, init_scale=2.0**30, on_stuck="ignore")
    for _ in range(60):
        loop.step()
    steps = [sample.step for sample in loop.inspector.samples]
    # Skips are looked into every second iteration, a tenth of the interval; then every 20th.
    assert steps[:3] == [1, 4, 7] or steps[:3] == [1, 3, 5]
    assert steps[-1] - steps[-2] == 20
    assert loop.inspector._samples.maxlen == 1000


def test_windows_that_have_ended_are_not_kept() -> None:
    loop = Loop(mlp(), every=1)
    loop.step()
    old = weakref.ref(loop.inspector._window)
    for _ in range(3):
        loop.step()
    gc.collect()
    assert old() is None


def test_gradients_from_before_the_first_iteration_are_not_suspected() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(4, 8)).sum().backward()
    inspector = Inspector(model, every=1)
    for clears in (True, False, False):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        inspector.step()
    assert [bool(s.fact("leftover")) for s in inspector.samples] == [False, False, True]


def test_sparse_gradients_are_counted_and_left_as_they_are() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    inspector = Inspector(model, every=1)
    model(torch.tensor([1, 1, 3])).sum().backward()
    assert not model[0].weight.grad.is_coalesced()
    inspector.step()
    (found,) = [t for t in inspector.samples[0].of("weight_grad") if t.name == "0.weight"]
    assert found.numel == 2 * 4  # two different words
    assert not model[0].weight.grad.is_coalesced()


def test_weights_with_masters_lose_no_update() -> None:
    small, lost = {}, {}
    for mode in ("fp16-master", None):
        model = mlp() if mode else mlp(dtype=torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        mp = MixedPrecision(model, optimizer, mode) if mode else None
        scaler = mp or GradScaler("cpu")
        inspector = Inspector(model, scaler, every=1)
        for _ in range(4):
            x = torch.randn(16, 8)
            scaler.backward(model(x if mode else x.half()).float().square().mean())
            mp.step() if mp else scaler.apply(optimizer)
        small[mode] = inspector.samples[-1].fact("update_lost")
        lost[mode] = [f.kind for f in inspector.findings()]
    assert (small["fp16-master"], lost["fp16-master"]) == ({}, [])
    assert min(small[None].values()) > 0.9
    assert set(lost[None]) == {"update-lost"}


def test_own_optimizers_keep_masters_too() -> None:
    model = mlp(dtype=torch.float16)
    optimizer = AdamW(model.parameters(), lr=1e-9)
    scaler = GradScaler("cpu")
    inspector = Inspector(model, scaler, every=1)
    for _ in range(3):
        scaler.backward(model(torch.randn(4, 8).half()).float().mean())
        scaler.apply(optimizer)
    assert inspector.samples[-1].fact("update_lost") == {}


def test_samples_and_findings_go_to_the_log_of_the_run(tmp_path: Path) -> None:
    loop = Loop(mlp(), every=2)
    loop.scaler.log_to(tmp_path)
    for _ in range(5):
        loop.step(torch.full((16, 8), math.inf))
    loop.inspector.close()
    loop.scaler.log_to(None)
    run = read(tmp_path)
    assert repr(run.samples) == repr(loop.inspector.samples)  # NaN is not equal to itself
    assert [f.kind for f in run.findings if f.kind == "data-not-finite"] == ["data-not-finite"]


def test_a_report_has_a_line_for_every_module() -> None:
    loop = Loop(mlp())
    assert "No iteration" in loop.inspector.report()
    loop.step()
    lines = loop.inspector.report().splitlines()
    assert lines[0] == "step 1, float16, scale 256"
    assert [line.split()[0] for line in lines[2:]] == ["module", "0", "1", "2"]


def test_without_a_scaler_step_is_called_by_hand_and_with_one_it_is_refused() -> None:
    model = mlp()
    inspector = Inspector(model, every=2)
    for _ in range(4):
        model(torch.randn(4, 8)).mean().backward()
        inspector.step()
    assert [sample.step for sample in inspector.samples] == [1, 3]
    with pytest.raises(SettingError, match="is advanced by the update"):
        Loop(model).inspector.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be a whole number >= 1, got 0"),
        ({"every": True}, "every must be"),
        ({"scaler": torch.amp.GradScaler("cpu")}, r"GradScaler\.from_torch\(\)"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Inspector(mlp(), **settings)
    with pytest.raises(SettingError, match=r"must be a torch\.nn\.Module"):
        Inspector(lambda x: x)  # type: ignore[arg-type]


def test_compiled_models_run_eagerly_in_samples_alone() -> None:
    torch_has.stances_of_the_compiler()
    runs: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(True)
            return graph.forward(*args)

        return run

    inner = mlp()
    model = torch.compile(inner, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", policy=Static(init_scale=256.0))
    inspector = Inspector(model, scaler, every=3)
    counts = []
    for _ in range(5):
        scaler.backward(model(torch.randn(16, 8)).square().mean())
        scaler.apply(optimizer)
        counts.append(len(runs))
    assert counts == [0, 1, 2, 2, 3]
    assert [sample.step for sample in inspector.samples] == [1, 4]
    assert {t.name for t in inspector.samples[-1].of("activation")} == {"0", "1", "2"}
    inspector.close()


def test_ddp_is_looked_into(one_rank: Any) -> None:
    loop = Loop(nn.parallel.DistributedDataParallel(mlp()), every=1)
    loop.step()
    (sample,) = loop.inspector.samples
    assert {t.name for t in sample.of("weight_grad")} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    assert sample.of("activation_grad")


def test_fsdp2_is_counted_by_the_local_part(one_rank: Any) -> None:
    torch_has.fsdp2_on_the_cpu()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    loop = Loop(model, every=1)
    loop.step()
    (sample,) = loop.inspector.samples
    assert {t.name: t.numel for t in sample.of("weight_grad")} == {
        "0.weight": 256,
        "0.bias": 32,
        "2.weight": 32,
        "2.bias": 1,
    }
    assert loop.inspector.findings() == []
    with pytest.raises(SettingError, match="before fully_shard"):
        loop.inspector.replay(lambda: model(torch.ones(1, 8)).sum())


class Scores(nn.Module):
    """A layer, and scores with minus infinity in one column."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores = nn.Linear(8, 8), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The scores."""
        hidden = self.first(x).float()
        return self.scores(hidden.index_fill(1, torch.tensor([0]), -math.inf))


@pytest.mark.parametrize("finite", [True, False])
def test_minus_infinity_is_a_mask_only_while_the_loss_is_finite(finite: bool) -> None:
    torch.manual_seed(0)
    model = Scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", policy=Static(init_scale=2.0**30), on_stuck="ignore")
    inspector = Inspector(model, scaler, every=1)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.randn(16, 8))
    loss = out.softmax(1)[:, 1].sum() if finite else -out.sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    (sample,) = inspector.samples
    assert sample.first_nonfinite is not None
    assert sample.first_nonfinite[1] == ("backward" if finite else "forward")


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_gradients_of_before_count_if_a_step_used_them(used: bool, to_none: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    inspector = Inspector(model, scaler, every=1)
    for _ in range(4):
        for turn in range(2):
            scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
            if used == (turn == 0):
                scaler.step(optimizer)
            if turn == 0:
                optimizer.zero_grad(set_to_none=to_none)
        scaler.update()
    kinds = {finding.kind for finding in inspector.findings()}
    assert kinds == ({"gradients-not-cleared"} if used else set())


@pytest.mark.parametrize(("trained", "dead"), [(False, ["heads.1"]), (True, [])])
def test_weight_decay_is_no_training(trained: bool, dead: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"heads": nn.ModuleList(nn.Linear(8, 4) for _ in range(2))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler = GradScaler("cpu")
    inspector = Inspector(model, scaler, every=4)
    for number in range(21):
        outs = [head(torch.randn(16, 8)).square().mean() for head in model["heads"]]
        scaler.backward(outs[0] + outs[1] * float(trained and number % 4 == 2))
        scaler.apply(optimizer)
    assert [finding.where for finding in inspector.findings()] == dead


class Spectral(nn.Module):
    """A layer, and a complex weight whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 1)
        self.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self.first(x) + 0 * (x.float() * self.filter).real.sum()


def test_a_complex_weight_with_zero_gradients_is_sampled() -> None:
    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inspector = Inspector(model, every=1)
    for _ in range(4):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        inspector.step()
    (zeros,) = [t.zeros for t in inspector.samples[-1].of("weight_grad") if t.name == "filter"]
    assert zeros == 16
