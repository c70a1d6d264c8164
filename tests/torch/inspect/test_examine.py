"""The examination before training: it changes nothing, and what it recommends works."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from gradscale.errors import SettingError  # noqa: E402
from gradscale.formats import FLOAT16  # noqa: E402
from gradscale.monitor.samples import Sample, TensorSample  # noqa: E402
from gradscale.torch import Examination, MixedPrecision, examine  # noqa: E402
from gradscale.torch.inspect.examination import working_scales  # noqa: E402


class Net(nn.Module):
    """A network with dropout and a batch norm, and a layer that can be too large."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 32), nn.BatchNorm1d(32)
        self.drop, self.large, self.last = nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, 1)
        with torch.no_grad():
            self.large.weight.mul_(size)
            self.last.weight.div_(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.large(self.drop(self.norm(self.first(x)))))


BATCH = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))


def examined(model: nn.Module, factor: float = 1.0, **settings: object) -> Examination:
    """An examination with a fixed batch."""

    def closure() -> Tensor:
        out = model(BATCH).float()
        return factor * functional.mse_loss(out, BATCH.sum(1, keepdim=True))

    return examine(model, closure, **settings)  # type: ignore[arg-type]


def test_nothing_is_changed() -> None:
    model = Net()
    model(BATCH).sum().backward()
    grads = [param.grad for param in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copies = [grad.clone() for grad in grads]
    state = torch.get_rng_state()
    examined(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [id(param.grad) for param in model.parameters()] == list(map(id, grads))
    assert all(torch.equal(a, b) for a, b in zip(copies, grads, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
def test_the_recommended_scale_suits_the_loss(factor: float) -> None:
    found = examined(Net(), factor)
    assert found.scales is not None
    assert found.scales[0] <= found.scale <= found.scales[1]
    assert found.mode == "fp16"
    assert found.keep_float32 == []
    assert found.error < 0.01
    assert all(row.headroom is None or row.headroom >= 1 for row in found.rows)
    assert max(row.underflow for row in found.rows) < 0.01
    # A loss that is 2**20 times as large wants a scale that is 2**20 times as small.
    other = examined(Net(), factor * 2.0**-20)
    assert other.scale == found.scale * 2.0**20


def test_a_layer_that_overflows_is_kept_in_float32_and_that_helps() -> None:
    found = examined(Net(1e6))
    assert found.keep_float32 == ["large"]
    assert found.error == float("inf")
    assert {row.name: row.room for row in found.rows}["large"] < 0
    model = Net(1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    mp = MixedPrecision(model, optimizer, "fp16", keep_float32=[*found.keep_float32, "last"])
    with mp.autocast():
        loss = functional.mse_loss(model(BATCH).float(), BATCH.sum(1, keepdim=True))
    assert torch.isfinite(loss)


def test_bfloat16_needs_no_scale_and_is_less_exact() -> None:
    half, brain = examined(Net()), examined(Net(), mode="bf16")
    assert brain.scale == 1.0
    assert brain.mode == "bf16"
    assert 2 * half.error < brain.error < 0.05
    assert brain.loss[0] == half.loss[0]


def test_float32_has_no_error() -> None:
    found = examined(Net(), mode="fp32")
    assert found.error == 0.0
    assert found.keep_float32 == []


def test_only_the_parameters_of_the_optimizer_are_examined() -> None:
    model = Net()
    found = examined(model, optimizer=torch.optim.SGD(model.last.parameters(), lr=0.1))
    assert {row.name for row in found.rows if row.error is not None} == {"last"}


def test_the_table_has_a_line_for_every_module() -> None:
    lines = str(examined(Net())).splitlines()
    assert lines[0].split() == ["module", "room", "headroom", "underflow", "error"]
    assert [line.split()[0] for line in lines[1:6]] == ["first", "norm", "drop", "large", "last"]
    assert lines[7].startswith("mode fp16, scale 2**")


def test_a_closure_that_misses_the_model_is_refused() -> None:
    weight = nn.Parameter(torch.ones(()))
    with pytest.raises(SettingError, match="does not depend on any module"):
        examine(nn.Linear(1, 1), lambda: weight * 2)
    with pytest.raises(SettingError, match="mode must be one of"):
        examine(nn.Linear(1, 1), lambda: weight, mode="fp8")
    assert weight.grad is None
    with pytest.raises(SettingError, match=r"model must be a torch\.nn\.Module, got function"):
        examine(lambda: weight, lambda: weight)  # type: ignore[arg-type]


def root(x: Tensor) -> Tensor:
    """Finite, with a gradient that is not."""
    return (0 * x).square().sum().sqrt()


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda x: x.sum() * math.nan, "a loss of nan"),
        (root, "a loss of 0 and values that are not finite, first in the backward pass of"),
        (lambda x: x.sum() / 0, "a loss of -?inf"),
    ],
)
def test_a_closure_that_is_not_finite_in_float32_is_refused(
    loss: Callable[[Tensor], Tensor], match: str
) -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(SettingError, match=match):
        examine(model, lambda: loss(model(BATCH)))
    assert all(param.grad is None for param in model.parameters())


@settings(max_examples=40)
@given(st.integers(-60, 20), st.lists(st.integers(0, 1000), min_size=1, max_size=50))
def test_scales_that_work_are_the_outermost_ones(low: int, counts: list[int]) -> None:
    counts[-1] += 1
    tensor = TensorSample("x", "weight_grad", sum(counts), low, tuple(counts))
    found = working_scales(Sample(1, "float32", (tensor,)), FLOAT16)

    def works(exponent: int) -> bool:
        smallest = -25 - exponent  # half the smallest subnormal number is rounded to zero
        lost = sum(n for place, n in enumerate(counts, low) if place < smallest)
        return low + len(counts) - 1 + exponent < 15 and lost <= 0.01 * sum(counts)

    fine = [exponent for exponent in range(-120, 120) if works(exponent)]
    if not fine:
        assert found is None
    else:
        assert found == (2.0 ** fine[0], 2.0 ** fine[-1])
