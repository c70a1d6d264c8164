"""On a GPU: the kernel counts as the CPU does, and a sample waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from gradscale.torch import GradScaler, Inspector, examine  # noqa: E402
from gradscale.torch.grads import dispatch  # noqa: E402
from gradscale.torch.inspect.counts import Counts, histograms  # noqa: E402
from gradscale.torch.optim import AdamW  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("numel", "step"), [(1, 1), (4096, 1), (5_000_001, 1), (5_000_001, 7)])
def test_counts_are_those_of_the_cpu(path: str, dtype: torch.dtype, numel: int, step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator)
    values = values * 2.0 ** torch.randint(-40, 20, (numel,), generator=generator)
    values[::97] = 0.0
    values[::1001] = float("nan")
    values = values.to(dtype)
    here, there = Counts(2, torch.device("cpu")), Counts(2, torch.device("cuda"))
    here.add(1, values, step)
    with dispatch.use(path):
        there.add(1, values.cuda(), step)
    ours, theirs = (histograms(c.send().read(), c.numels) for c in (here, there))
    assert ours == theirs


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("calls", ["apply", "step"])
def test_a_sample_waits_for_nothing(
    own: bool, calls: str, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 1)
    ).cuda()
    kind = AdamW if own else lambda params: torch.optim.AdamW(params, fused=True)
    optimizer, scaler = kind(model.parameters()), GradScaler("cuda")
    inspector = Inspector(model, scaler, every=2)
    x = torch.randn(128, 64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if calls == "apply":
            scaler.apply(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    for _ in range(4):
        step()
    with no_sync():
        for _ in range(6):
            step()
    steps = [sample.step for sample in inspector.samples]
    assert steps == sorted(steps)
    assert len(steps) >= 5
    last = inspector.samples[-1]
    assert {t.name for t in last.of("weight_grad")} == {n for n, _ in model.named_parameters()}
    assert last.fact("scale")[""] == float(scaler.get_scale())
    assert inspector.findings() == []
    inspector.close()


def test_an_examination_on_the_gpu_finds_a_scale() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    x = torch.randn(32, 64, device="cuda")
    found = examine(model, lambda: model(x).float().square().mean())
    assert found.scales is not None
    assert found.error < 0.02
