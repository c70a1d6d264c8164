"""The demo: its data, that float16 is float16, that it repeats, and that its words are true."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
matplotlib = pytest.importorskip("matplotlib")

from torch import Tensor, nn  # noqa: E402

import gradscale  # noqa: E402
from gradscale import runlog  # noqa: E402
from gradscale.demo import digits, picture, summary, train  # noqa: E402
from gradscale.errors import SettingError  # noqa: E402

IMAGES = digits.load_digits()
EXACT, BARE, STATIC, TORCH, OURS, TORCH_NAN, OURS_NAN = train.RUNS


def trace(run: train.Run, steps: int = 25, seed: int = 0) -> train.Trace:
    with train.one_thread():
        return train.Trace(run, list(train.train(run, IMAGES, steps, seed)))


# The data.


def test_data_are_the_1797_digits() -> None:
    assert IMAGES.shape == (1797, 64)
    assert IMAGES.dtype == torch.float32
    assert set((IMAGES * 16).unique().tolist()) == set(range(17))
    first = (IMAGES[0].view(8, 8) * 16).int().tolist()
    assert first[0] == [0, 0, 5, 13, 9, 1, 0, 0]  # the ring of a zero
    assert first[3] == [0, 4, 12, 0, 0, 8, 8, 0]


def test_other_data_are_refused(tmp_path: Path) -> None:
    spoilt = bytearray(gzip.decompress(digits.FILE.read_bytes()))
    spoilt[1000] ^= 1
    file = tmp_path / "digits.gz"
    file.write_bytes(gzip.compress(bytes(spoilt)))
    with pytest.raises(ValueError, match=r"digits\.gz must unpack to .* got 115008 bytes"):
        digits.load_digits(file)


def test_source_and_licence_stand_beside_the_data() -> None:
    note = digits.FILE.with_name("digits.md").read_text(encoding="utf-8")
    assert "Creative Commons Attribution 4.0" in note
    assert "10.24432/C50P49" in note


# Real float16.


@contextmanager
def formats_seen() -> Iterator[set[tuple[str, torch.dtype]]]:
    """What every layer computes with, forward and backward, as (what, format)."""
    seen: set[tuple[str, torch.dtype]] = set()

    def forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.update((("activation", inputs[0].dtype), ("activation", output.dtype)))
        if isinstance(module, nn.Linear):
            seen.update((("weight", module.weight.dtype), ("weight", module.bias.dtype)))
        if output.requires_grad:
            output.register_hook(lambda grad: seen.add(("gradient", grad.dtype)))

    def only_layers(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, (nn.Linear, nn.Sigmoid)):
            forward(module, inputs, output)

    handle = nn.modules.module.register_module_forward_hook(only_layers)
    try:
        yield seen
    finally:
        handle.remove()


def complaints(run: train.Run) -> list[str]:
    """How a step of `run` computes in another format than it claims."""
    steps = train.train(run, IMAGES, 2, 0)
    next(steps)  # which measures the underflow too, with one float32 pass
    with formats_seen() as seen:
        next(steps)
    assert {what for what, _ in seen} == {"activation", "weight", "gradient"}
    return sorted(f"{what} is {dtype}" for what, dtype in seen if dtype is not run.dtype)


@pytest.mark.parametrize("run", train.RUNS, ids=lambda run: run.name)
def test_all_arithmetic_of_the_layers_is_in_the_format_of_the_run(run: train.Run) -> None:
    assert complaints(run) == []


def in_float32(redraw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cheat(net: nn.Module, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        return redraw(net, {name: w.float() for name, w in weights.items()}, images)

    return cheat


def test_run_that_secretly_uses_float32_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "redraw", in_float32(train.redraw))
    assert complaints(BARE) == [
        "activation is torch.float32",
        "gradient is torch.float32",
        "weight is torch.float32",
    ]


def test_loss_is_not_made_small() -> None:
    # Of the first step: of the weights and the batch that any reader gets from the same seed.
    net = train.build(0)
    batch = IMAGES[torch.randint(1797, (train.BATCH,), generator=torch.Generator().manual_seed(0))]
    plain = (net(batch) - batch).square().mean().item()
    assert trace(EXACT, 1).steps[0].loss == pytest.approx(plain, rel=1e-6)
    assert trace(BARE, 1).steps[0].loss == pytest.approx(plain, rel=1e-2)


# The runs.


@pytest.mark.parametrize("run", train.RUNS, ids=lambda run: run.name)
def test_run_repeats_with_its_seed_alone(run: train.Run) -> None:
    torch.manual_seed(1)
    # By `repr`: the loss of a NaN batch is not equal to itself.
    first = repr(trace(run, 10))
    torch.manual_seed(2)
    assert repr(trace(run, 10)) == first
    assert repr(trace(run, 10, seed=1)) != first


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    trace(EXACT, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with train.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_without_a_scale_gradients_become_zero_and_with_one_they_do_not() -> None:
    bare, static, ours = (summary.summarise(trace(run, 41)).lost for run in (BARE, STATIC, OURS))
    assert bare is not None
    assert static is not None
    assert ours is not None
    assert bare.flushed > 0.2
    assert static.flushed < 0.01
    assert ours.flushed < static.flushed
    assert bare.underflow > static.underflow > ours.underflow


def test_torch_runs_use_the_class_of_torch_and_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Recorded(torch.amp.GradScaler):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append((args, settings, self.get_scale(), self.get_growth_interval()))

    monkeypatch.setattr(torch.amp, "GradScaler", Recorded)
    trace(TORCH, 1)
    assert made == [(("cpu",), {}, 2.0**16, 2000)]
    trace(OURS, 1)
    assert len(made) == 1


def test_torch_scaler_steps_as_ours_does_with_the_rule_of_torch() -> None:
    rule = train.Run("", torch.float16, gradscale.Dynamic())
    assert trace(TORCH, 10).steps == trace(rule, 10).steps


def test_nan_batches_are_in_the_middle_of_the_two_runs_alone() -> None:
    assert train.nan_steps(OURS_NAN, 1000) == range(480, 520)
    assert train.nan_steps(TORCH_NAN, 40) == range(16, 24)
    assert list(train.nan_steps(OURS_NAN, 1)) == list(train.nan_steps(OURS, 1000)) == []
    clean = list(train.batches(OURS, IMAGES, 20, 0))
    damaged = list(train.batches(OURS_NAN, IMAGES, 20, 0))
    for index, (batch, other) in enumerate(zip(clean, damaged, strict=True)):
        assert bool(other.isnan().all()) == (index in range(8, 12))
        assert batch.isfinite().all()
        assert index in range(8, 12) or torch.equal(batch, other)


def test_nan_batches_halve_the_scale_of_torch_and_leave_ours() -> None:
    # 220 steps have all 40 NaN batches.
    ours, theirs = trace(OURS_NAN, 220).steps, trace(TORCH_NAN, 220).steps
    damaged = train.nan_steps(OURS_NAN, 220)
    assert len(damaged) == 40
    for steps in (ours, theirs):
        assert [index for index, step in enumerate(steps) if not step.applied] == list(damaged)
    assert [step.scale for step in theirs[90:131]] == [2.0 ** (16 - i) for i in range(41)]
    assert all(step.empty and step.scale == 2.0**-24 for step in theirs[damaged.stop :])
    # The last of 40 is counted as an overflow; see the docstring of gradscale.demo.train.
    assert {step.scale for step in ours[damaged.start : damaged.stop]} == {ours[89].scale}
    assert ours[damaged.stop].scale >= ours[89].scale / 2**6
    assert not any(step.empty for step in ours[damaged.stop :])


def test_log_of_a_run_has_its_steps_and_changes_nothing(tmp_path: Path) -> None:
    with train.one_thread():
        logged = list(train.train(OURS_NAN, IMAGES, 25, 0, tmp_path))
    assert repr(logged) == repr(trace(OURS_NAN, 25).steps)  # NaN is not equal to itself
    found = runlog.read(tmp_path)
    assert [step["steps"][0]["applied"] for step in found.steps] == [s.applied for s in logged]
    assert [step["steps"][0]["scale"] for step in found.steps] == [s.scale for s in logged]
    bad = [step["steps"][0]["culprits"] for step in found.steps if not step["steps"][0]["applied"]]
    assert bad[0][0][0] == "0.weight"  # parameters have their names


def test_overflow_is_skipped_and_not_measured() -> None:
    policy = gradscale.Dynamic(init_scale=2.0**40, growth_interval=2)
    steps = trace(OURS._replace(policy=policy), 40).steps
    skipped = [step for step in steps if not step.applied]
    assert skipped[0] is steps[0]
    assert all(step.lost is None for step in skipped)
    applied = [step.scale for step in steps if step.applied]
    assert applied[0] < 2.0**40
    assert len(set(applied)) > 1


def test_share_of_lost_elements_is_counted_by_hand() -> None:
    halves = [torch.tensor([0.0, 0.0, 2.0**-14, -(2.0**-20), 1.0], dtype=torch.float16)]
    exact = [torch.tensor([0.0, 1e-9, 2.0**-14, -(2.0**-20), 1.0])]
    assert train.compare(halves, exact) == train.Lost(underflow=1 / 3, flushed=1 / 4)
    nothing = [torch.zeros(2)]
    assert train.compare([torch.zeros(2).half()], nothing) == train.Lost(0.0, 0.0)


@pytest.mark.parametrize(
    ("steps", "seed", "complaint"),
    [
        (0, 0, "steps must be >= 1, got 0"),
        (-1, 0, "steps must be >= 1, got -1"),
        (1, -1, "seed must be >= 0 and < 2\\*\\*63, got -1"),
        (1, 2**63, "seed must be .*, got 9223372036854775808"),
    ],
)
def test_settings_are_checked(steps: int, seed: int, complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        next(train.train(EXACT, IMAGES, steps, seed))


@pytest.mark.parametrize(
    "runs",
    # Seconds each, in XLA's compiler.
    [
        pytest.param([EXACT], id="float32", marks=pytest.mark.soak),
        pytest.param([OURS_NAN], id="gradscale", marks=pytest.mark.soak),
        pytest.param([BARE, STATIC]),
    ],
)
def test_jax_trains_as_torch_does(runs: list[train.Run]) -> None:
    pytest.importorskip("optax")
    from gradscale.demo import jax_train

    flushed = {}
    for run in runs:
        steps, theirs = list(jax_train.train(run, IMAGES, 10, 0)), trace(run, 10).steps
        # scale, applied, empty
        assert [step[1:4] for step in steps] == [step[1:4] for step in theirs]
        # Weights, batches and rule are the same. A sum of float32 numbers has another order, and
        # 8 layers round to float16 up to twice each: 8 * 2 * 2**-11.
        close = 1e-3 if run is EXACT else 2.0**-7
        losses = [step.loss for step in theirs]
        assert [step.loss for step in steps] == pytest.approx(losses, rel=close, nan_ok=True)
        flushed[run] = [each[0].lost.flushed for each in (steps, theirs) if each[0].lost]
    # JAX rounds the product of a sigmoid's gradient after every factor and torch once, so the
    # shares differ; that a scale saves nearly all of them does not.
    assert [len(shares) for shares in flushed.values()] == [
        0 if run is EXACT else 2 for run in runs
    ]
    for bare, static in zip(flushed.get(BARE, []), flushed.get(STATIC, []), strict=True):
        assert bare > 0.05  # JAX 9 %, torch more
        assert static < bare / 10


# The words.


def made(losses: dict[train.Run, float], steps: int = 1000) -> list[train.Trace]:
    """Traces with made-up numbers: from 0.06 in the first half to these losses in the second."""
    traces = []
    for run, loss in losses.items():
        damaged = train.nan_steps(run, steps)
        taken = [
            train.Step(
                loss=float("nan") if i in damaged else 0.06 if i < steps // 2 else loss,
                scale=1024.0,
                applied=i not in damaged,
                empty=run == TORCH_NAN and i >= damaged.stop,
                lost=None,
            )
            for i in range(steps)
        ]
        traces.append(train.Trace(run, taken))
    return traces


GOOD = {
    EXACT: 0.04,
    BARE: 0.074,
    STATIC: 0.04,
    TORCH: 0.04,
    OURS: 0.041,
    TORCH_NAN: 0.07,
    OURS_NAN: 0.042,
}


@pytest.mark.parametrize(
    ("changes", "holds", "words"),
    [
        ({}, True, "GradScaler wasted 480 of the 480 remaining steps"),
        ({}, True, "ended at loss 0.0700; gradscale skipped 40 steps, wasted 0 others"),
        ({TORCH_NAN: 0.0501}, True, "ended at loss 0.0501"),
        ({TORCH_NAN: 0.0499}, False, "torch's GradScaler is not clearly worse here: loss 0.0499"),
        ({TORCH_NAN: float("nan")}, True, "ended at loss nan"),
        ({OURS: 0.0445}, False, "gradscale is worse than float32: loss 0.0445, more than 10%"),
        ({OURS: float("nan")}, False, "gradscale is worse than float32: loss nan"),
        ({OURS_NAN: 0.0445}, False, "With 40 NaN batches gradscale is worse than float32"),
        ({OURS_NAN: float("nan")}, False, "With 40 NaN batches gradscale is worse"),
        ({EXACT: 0.07}, False, "Too few steps for a result"),
        ({EXACT: float("nan")}, False, "Too few steps for a result"),
    ],
)
def test_result_follows_the_numbers(
    changes: dict[train.Run, float], holds: bool, words: str
) -> None:
    result = summary.result_of(made(GOOD | changes), 0.0733)
    assert result.holds == holds
    assert words in result.sentence


def test_result_without_torch_is_about_gradscale_alone() -> None:
    runs = {run: loss for run, loss in GOOD.items() if run.policy is not None}
    result = summary.result_of(made(runs), 0.0733)
    assert result.holds
    assert "torch" not in result.sentence
    with pytest.raises(ValueError, match="traces must have float32"):
        summary.result_of(made({OURS: 0.04}), 0.0733)


def test_mean_image_has_the_variance_of_the_pixels_as_its_loss() -> None:
    assert train.loss_of_the_mean(IMAGES) == pytest.approx(0.0733, abs=1e-4)


# The picture.


@pytest.mark.parametrize("suffix", picture.SUFFIXES)
def test_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    # One step, the shortest run there is, and no numbers but these.
    step = train.Step(loss=0.1, scale=1024.0, applied=False, empty=False, lost=None)
    path = tmp_path / f"picture{suffix}"
    picture.draw([train.Trace(run, [step]) for run in train.RUNS], 0.07, path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm")


def test_picture_has_the_result_and_the_wasted_steps_of_both(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture.draw(made(GOOD), 0.0733, path)
    drawn = path.read_text(encoding="utf-8")
    for text in ("After 40 NaN batches", "torch GradScaler: 520", "gradscale: 40", "skipped step"):
        assert text in drawn


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert picture.smooth([2.0] * 40) == [2.0] * 40
    assert picture.smooth([1.0, 3.0]) == [2.0, 2.0]
    first, gap, last = picture.smooth([1.0, float("nan"), 3.0])
    assert (first, last) == (2.0, 2.0)
    assert gap != gap
