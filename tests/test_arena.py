"""The arena: its float16 is real, its measurements find planted faults, and it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from arena import __main__ as arena  # noqa: E402
from arena import arms, data, half, measure, pool, rows, runs, table, tasks, times  # noqa: E402
from arena.pictures import DeepPlain, frechet  # noqa: E402
from arena.texts import NaNs, Spikes  # noqa: E402
from arena.training import Place, Turn  # noqa: E402
from arena.trainings import TRAININGS  # noqa: E402
from torch import nn  # noqa: E402

import gradscale  # noqa: E402

NO_SCALE, TORCHS = "float16, no scale", "torch's GradScaler"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On the tensors of these tests more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Float16 on the CPU.


@pytest.mark.parametrize(
    ("quick", "slow", "shapes"),
    [
        (half.linear, nn.functional.linear, ((3, 7, 40), (9, 40), (9,))),
        (half.matmul, torch.matmul, ((2, 3, 7, 40), (2, 3, 40, 9))),
    ],
)
def test_half_product_is_that_of_torch_to_one_rounding(
    quick: Callable[..., torch.Tensor], slow: Callable[..., torch.Tensor], shapes: tuple[Any, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    with torch.autocast("cpu", dtype=torch.float16):
        made, expected = quick(*ours), slow(*theirs)
    made.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert made.dtype is torch.float16
    torch.testing.assert_close(made, expected, rtol=2.0**-9, atol=2.0**-8)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2.0**-9, atol=2.0**-8)


def test_gradients_of_all_layers_are_float16() -> None:
    training = DeepPlain(Place(), 1)
    seen: list[torch.dtype] = []

    def watch(module: nn.Module, given: object, made: torch.Tensor) -> None:
        made.register_hook(lambda grad: seen.append(grad.dtype))

    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch)
    (turn,) = training.turns(0)
    turn.loss.backward()
    assert seen == [torch.float16] * 21


def test_small_gradients_vanish_as_in_float16() -> None:
    weight = torch.ones(1, 1, requires_grad=True)
    for scale, expected in ((2.0**-26, 0.0), (2.0**-24, 2.0**-24)):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.float16):
            made = half.linear(torch.ones(1, 1), weight)
        (made.float() * scale).sum().backward()
        assert weight.grad is not None
        assert weight.grad.item() == expected


# What is measured.


def look(*grads: torch.Tensor, first: int = 0) -> measure.Look:
    """What gradients show, by way of the numbers of a step."""
    rest = torch.tensor([0.0, 1.0, 0.5, 1.0], dtype=torch.float64)
    (step,) = measure.read([measure.Reading(torch.cat([rest, measure.look(grads)]), first)])
    return step.look


def test_underflow_share_is_exact_on_a_planted_gradient() -> None:
    smallest = 2.0**-14
    below = math.nextafter(smallest, 0)
    seen = look(torch.tensor([0.0, smallest, -smallest / 2, 1.0]), torch.zeros(2))
    assert seen == measure.Look(finite=True, underflow=1 / 3, alive=frozenset({0}))
    assert look(torch.tensor([below, 3.0], dtype=torch.float64)).underflow == 0.0  # rounded
    assert look(torch.tensor([smallest * 0.999, 3.0])).underflow == 0.5


def test_gradients_that_have_all_vanished_have_all_underflowed() -> None:
    seen = look(torch.zeros(3), torch.zeros(2))
    assert seen == measure.Look(finite=True, underflow=1.0, alive=frozenset())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gradient_that_is_not_finite_is_found(bad: float) -> None:
    grads = [torch.ones(2), torch.tensor([1.0, bad]), torch.ones(1, dtype=torch.float16)]
    seen = look(*grads, first=5)
    assert not seen.finite
    assert seen.alive == {5, 6, 7}
    assert not measure.finite(grads)
    assert measure.finite(grads[::2])


def test_readings_are_read_in_order() -> None:
    one, other = torch.ones(3), torch.tensor([0.0, 2.0**-20])
    readings = [
        measure.Reading(torch.cat([torch.tensor(facts).double(), measure.look(grads)]), first)
        for facts, grads, first in (
            ([0.0, 0.0, math.nan, 4.0], [one, other], 0),
            ([7.0, 8.0, 2.5, 2.0], [other], 2),
        )
    ]
    assert measure.read(readings) == [
        measure.Step(False, False, 4.0, measure.Look(True, 0.25, frozenset({0, 1}))),
        measure.Step(True, True, 2.0, measure.Look(True, 1.0, frozenset({2}))),
    ]
    assert measure.read([]) == []


def one_weight() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(2))
    return weight, torch.optim.AdamW([weight], lr=0.1, fused=True)


def steppers() -> dict[str, Callable[[], arms.Stepper]]:
    return {
        "bare": arms.Bare,
        "torch": lambda: arms.Torchs("cpu"),
        "ours": lambda: arms.Ours("cpu", gradscale.Dynamic()),
    }


@pytest.mark.parametrize("name", steppers())
def test_skipped_step_is_counted_and_applied_ones_are_not(name: str) -> None:
    stepper = steppers()[name]()
    weight, optimizer = one_weight()
    steps = []
    for factor in (1.0, math.inf, 2.0, math.nan):
        # The loss is finite; its gradient is what is planted.
        loss = weight.sum()
        loss.register_hook(lambda grad, factor=factor: grad * factor)
        steps.append(arms.advance(stepper, Turn(loss, optimizer), clip_norm=1.0))
    steps = measure.read(steps)
    assert [step.applied for step in steps] == [True, False, True, False]
    assert [step.look.finite for step in steps] == [True, False, True, False]
    assert measure.summarise(steps, 1).skipped == 2
    assert weight.isfinite().all()


@pytest.mark.parametrize("name", steppers())
def test_bad_loss_excuses_a_skipped_step(name: str) -> None:
    stepper = steppers()[name]()
    weight, optimizer = one_weight()
    losses = (weight.sum() * math.nan, weight.sum())
    steps = measure.read([arms.advance(stepper, Turn(loss, optimizer), None) for loss in losses])
    summary = measure.summarise(steps, 1)
    assert (summary.skipped, summary.excused, summary.wasted) == (0, 1, 1)


@pytest.mark.parametrize("name", ["spikes", "spikes, small head"])
def test_spike_is_computed_again(name: str) -> None:
    training = TRAININGS[name](Place(), 50)
    stepper = arms.Retrying("cpu", gradscale.Headroom())
    spike = 20 if name == "spikes" else 40
    tries = []
    for number in (*range(4), spike, 4):
        for turn in training.turns(number):
            assert torch.equal(turn.again(), turn.loss)
            (step,) = measure.read([arms.advance(stepper, turn, training.clip_norm)])
            assert step.applied
            tries.append(1 + len(stepper.outcome.earlier))
    assert tries[:4] == [1] * 4
    assert 2 <= tries[4] <= 3
    assert tries[5] == 1


def test_arms_for_spikes_are_for_trainings_with_spikes() -> None:
    every = arms.fixed_arms()
    found = {kind.name for kind in TRAININGS.values() if every[arms.RETRIES].suits(kind)}
    assert found == {"spikes", "spikes, small head"}
    assert not every[arms.BLOCKS].suits(Spikes)
    assert all(every["Headroom"].suits(kind) for kind in TRAININGS.values())


@pytest.mark.parametrize("name", ["GAN", "half weights", "deep plain net"])
def test_outcome_says_what_the_arena_sees(name: str) -> None:
    training = TRAININGS[name](Place(), 6)
    stepper = arms.Ours("cpu", gradscale.Dynamic(), underflow_every=1)
    for number in range(6):
        for turn in training.turns(number):
            (seen,) = measure.read([arms.advance(stepper, turn, training.clip_norm)])
            outcome = stepper.outcome
            assert (bool(outcome.applied), bool(outcome.finite)) == (seen.applied, seen.look.finite)
            assert float(outcome.scale) == seen.scale
            if seen.applied:
                assert float(outcome.underflow) == pytest.approx(seen.look.underflow, abs=1e-6)


def step(
    applied: bool, loss_finite: bool = True, scale: float = 1.0, **seen: object
) -> measure.Step:
    look = measure.Look(finite=applied, underflow=0.5, alive=frozenset())
    return measure.Step(loss_finite, applied, scale, look._replace(**seen))


def test_summary_counts_what_its_words_say() -> None:
    steps = [
        step(False, scale=4.0, underflow=1.0, alive=frozenset({2})),
        step(False, loss_finite=False, scale=2.0),
        step(True, scale=2.0, underflow=0.2, alive=frozenset({0})),
        step(False, scale=2.0),
        step(False, loss_finite=False),
        step(True, underflow=0.4),
    ]
    assert measure.summarise(steps, 3) == measure.Summary(
        skipped=2, excused=2, wasted=3, underflow=pytest.approx(0.3), dead=2, moves=2
    )


def test_run_without_applied_steps_has_no_underflow() -> None:
    summary = measure.summarise([step(False)] * 4, 1)
    assert math.isnan(summary.underflow)
    assert (summary.wasted, summary.dead) == (4, 1)


@pytest.mark.parametrize(
    ("history", "start", "expected"),
    [
        ([10, 10, 10], 0, 0),
        ([16, 14, 12, 10, 10], 0, 2),  # 12 is two binades away: near
        ([10, 10, 3, 10], 0, 3),  # what is lost again does not count
        ([16, 10, 10, 3], 0, 4),  # not near at the end
        ([10, 0, 0, 10, 10], 2, 1),
        ([0, 10, 10, 10], 2, 0),
    ],
)
def test_steps_to_a_good_scale(history: list[float], start: int, expected: int) -> None:
    assert measure.steps_to_good(history, 10, start) == expected


def test_history_survives_packing() -> None:
    history = [*map(measure.log2, (2.0**16, 2.0**16, 2.0**-44, 0.0)), 0.5]
    assert measure.pack(history) == "16x2 -44x1 -infx1 0.5x1"
    assert measure.unpack(measure.pack(history)) == history
    assert measure.unpack("") == []


# The trainings.


def test_text_and_digits_are_split() -> None:
    for split, held_out in (
        (data.documentation(), data.OF_TEXT),
        (data.program(), data.OF_TEXT),
        (data.digits(), data.OF_DIGITS),
    ):
        share = len(split.validation) / (len(split.validation) + len(split.train))
        assert share == pytest.approx(held_out, abs=0.01)
    assert len(data.documentation().train) > 200_000


def test_turned_digits_are_turned() -> None:
    images = torch.arange(128.0).view(2, 64)
    made = data.turned(images, torch.tensor([0, 1])).view(2, 8, 8)
    assert torch.equal(made[0], images[0].view(8, 8))
    assert torch.equal(made[1], images[1].view(8, 8).rot90())


def test_frechet_distance_knows_a_shift_and_a_stretch() -> None:
    points = torch.randn(500, 4, generator=torch.Generator().manual_seed(0)).double()
    assert frechet(points, points) == pytest.approx(0.0, abs=1e-6)
    assert frechet(points, points + 2) == pytest.approx(16.0, abs=1e-6)
    spread = points.T.cov().trace().item()
    assert frechet(points, 3 * points - 2 * points.mean(0)) == pytest.approx(4 * spread, rel=1e-6)
    assert frechet(points * math.nan, points) == math.inf


def test_batches_are_the_same_for_every_arm() -> None:
    def losses(dtype: torch.dtype) -> list[float]:
        training = TRAININGS["GPT"](Place(dtype=dtype), 2)
        return [turn.loss.item() for number in range(2) for turn in training.turns(number)]

    assert losses(torch.float16) == pytest.approx(losses(torch.float32), rel=1e-3)


def test_disturbances_come_when_they_should() -> None:
    spikes = Spikes(Place(), 100)
    (usual,), (spike,) = (list(spikes.turns(number)) for number in (19, 20))
    assert (spike.loss / usual.loss).item() == pytest.approx(512, rel=0.1)
    assert NaNs(Place(), 100).calm_after() == 100
    nans = NaNs(Place(), 200)
    assert nans.calm_after() == 140
    bad = [
        math.isnan(turn.loss.item()) for number in (79, 80, 139, 140) for turn in nans.turns(number)
    ]
    assert bad == [False, True, True, False]


def test_gradients_of_the_deep_net_span_more_than_float16() -> None:
    training = DeepPlain(Place(dtype=torch.float32), 1)
    (turn,) = training.turns(0)
    turn.loss.backward()
    peaks = [p.grad.abs().max().log2().item() for p in training.model.parameters()]
    assert max(peaks) - min(peaks) > 40


@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena.texts.PRETRAINING", (2, 2))
    row = runs.play(TRAININGS[name], arms.fixed_arms()["Dynamic"], Place(), 2)
    assert row.note == ""
    assert math.isfinite(row.value)
    assert len(measure.unpack(row.history)) == row.steps == 2 * (2 if name == "GAN" else 1)


def test_noise_of_a_metric_is_a_small_share() -> None:
    assert {name: kind.noise for name, kind in TRAININGS.items() if not 0 < kind.noise < 0.5} == {}


def test_tensors_of_both_networks_are_alive() -> None:
    row = runs.play(TRAININGS["GAN"], arms.static_arm(0), Place(), 2)
    assert (row.tensors, row.dead, row.skipped) == (12, 0, 0)


def test_torch_refuses_half_weights_and_the_row_says_so() -> None:
    row = runs.play(TRAININGS["half weights"], arms.fixed_arms()[TORCHS], Place(), 2)
    assert "unscale FP16" in row.note
    assert math.isnan(row.value)


# The script, its rows and its table.


def test_smoke(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    options = ["--trainings", "deep", "--steps", "5", "--results", str(results)]
    arena.main([*options, "--arms", "no scale", "torch's"])
    arena.main([*options, "--arms", "static", "--seeds", "2"])
    found = rows.read(results)
    assert {row.arm for row in found} >= {NO_SCALE, TORCHS, "static 2^-10", "static 2^40"}
    assert {row.steps for row in found} == {5}
    assert len([row for row in found if row.seed == 1]) == 1  # the best of the first seed
    dead = {row.arm: row.dead for row in found if row.seed == 0}
    assert dead[NO_SCALE] > dead[TORCHS] > 0
    page = tmp_path / "measurements" / "page.md"
    page.parent.mkdir()
    page.write_text(f"Before.\n{table.BEGIN}\nold\n{table.END}\nAfter.\n")
    table.write(found, page=page, images=tmp_path / "images")
    table.write(found, page=page, images=tmp_path / "images")
    text = page.read_text()
    assert text.startswith(f"Before.\n{table.BEGIN}\n\n### Small, ")
    assert text.endswith(f"\n{table.END}\nAfter.\n")
    assert text.count(f"| {TORCHS} |") == 1
    for name in ("scales", "metrics"):
        picture = f"images/arena-small-cpu-{name}.png"
        assert f"](../{picture})" in text
        assert (tmp_path / picture).stat().st_size > 1000


@pytest.mark.soak  # two processes import torch
def test_processes_work_off_what_one_would(tmp_path: Path) -> None:
    options = [
        "--trainings",
        "aux",
        "--steps",
        "2",
        "--arms",
        "torch's",
        "Headroom",
        "--seeds",
        "2",
    ]
    found = []
    for jobs in ("1", "2"):
        results = tmp_path / jobs / "results.csv"
        results.parent.mkdir()
        arena.main([*options, "--jobs", jobs, "--results", str(results)])
        found.append({(row.arm, row.seed): (row.value, row.history) for row in rows.read(results)})
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_only_what_is_missing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.csv"
    options = ["--trainings", "aux", "--steps", "1", "--results", str(results), "--seeds", "2"]
    arms_of = ["--arms", "Dynamic", "static"]
    arena.main([*options, "--arms", "Dynamic", "--limit", "0"])
    assert "2 tasks have not started" in capsys.readouterr().out
    assert not results.exists()
    arena.main([*options, *arms_of, "--missing"])
    whole = results.read_text().splitlines()
    assert len(whole) == 1 + 2 + 14 + 1
    arena.main([*options, *arms_of, "--missing"])
    assert results.read_text().splitlines() == whole
    lost = next(line for line in whole if ",static" in line and ",1,1," in line)
    results.write_text("".join(f"{line}\n" for line in whole if line != lost))
    arena.main([*options, *arms_of, "--missing"])
    assert len(results.read_text().splitlines()) == len(whole)


def task(training: str, arm: str, seed: int = 0) -> tasks.Task:
    return tasks.Task(training, arm, seed, Place(seed=seed), 2)


def test_tasks_wait_for_what_they_need_and_long_ones_start_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tasks.Task] = []
    monkeypatch.setattr(tasks.Task, "run", begun.append)
    best, search = task("GPT", tasks.BEST, 1), task("GPT", "static 2^2")
    tune, before = task("fine-tune", "Headroom"), task("fine-tune", tasks.PRETRAINING)
    gan, lstm = task("GAN", "Headroom"), task("LSTM", "Headroom")
    assert not list(pool.work([best, search, tune, gan, lstm, before], lambda each: each))
    assert begun == [before, lstm, tune, gan, search, best]
    assert tune.waits_for(before)
    assert best.waits_for(search)
    for one, other in ((before, tune), (search, best), (gan, before), (before, before)):
        assert not one.waits_for(other)
    assert not task("fine-tune", "Headroom", 1).waits_for(before)


def test_task_that_fails_is_said_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: tasks.Task) -> rows.Row:
        if self.arm == "torch":
            raise RuntimeError("out of memory")
        return example(self.arm)

    monkeypatch.setattr(tasks.Task, "run", run)
    todo = [task("GPT", "torch"), task("GPT", "Headroom")]
    assert [row.arm for row in pool.work(todo, lambda each: each)] == ["Headroom"]
    assert "GPT, torch, seed 0: RuntimeError('out of memory')" in capsys.readouterr().out


def test_rows_of_errors_of_the_device_are_run_again() -> None:
    refused = example(TORCHS, math.nan, note="ValueError: refused")
    broken = example("Headroom", math.nan, note="RuntimeError: out of memory")
    known = [refused, broken, example("Dynamic")]
    done = [
        arm
        for arm in (TORCHS, "Headroom", "Dynamic", "LogMax")
        if tasks.is_done(task("GPT", arm), known)
    ]
    assert done == [TORCHS, "Dynamic"]


def test_steps_are_timed_and_shown_beside_the_metric(tmp_path: Path) -> None:
    kind, place = TRAININGS["half weights"], Place()
    every = arms.fixed_arms()
    found = list(times.clock(kind, [every[TORCHS], every["Headroom"]], place, warm_up=1, steps=1))
    assert math.isnan(found[0].ms)  # refused
    assert found[1].ms > 0
    for row in found:
        rows.add(row, tmp_path / "times.csv")
    assert [row.arm for row in rows.read_times(tmp_path / "times.csv")] == [TORCHS, "Headroom"]
    runs_of = [example(row.arm, training=kind.name) for row in found]
    (text,) = table.big_table(runs_of, found)
    assert f"| {TORCHS} | 1.0000 |  | 0 |" in text
    assert f"| Headroom | 1.0000 | {found[1].ms:.2f} | 0 |" in text


def test_second_metric_is_in_the_row_and_the_table() -> None:
    row = runs.play(TRAININGS["spikes, small head"], arms.fixed_arms()["Headroom"], Place(), 2)
    assert row.second_metric == "main loss"
    assert 0 < row.second_value < 2
    (text,) = table.big_table([row])
    assert f"{row.value:.4f}; main loss {row.second_value:.4f}" in text


def test_starts_are_run_and_shown(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    options = ["--starts", "--trainings", "GAN", "--steps", "3", "--results", str(results)]
    arena.main([*options, "--arms", "torch's"])
    _, text = table.starts(rows.read(results))
    assert text.splitlines()[2].startswith(f"| {TORCHS} | 0 |")
    assert text.splitlines()[2].endswith("| 6 |")  # two turns in each of three steps, from 2^40


def example(arm: str, value: float = 1.0, **changes: object) -> rows.Row:
    """A row with nothing in it but what is said."""
    blank = {field.name: 0 for field in dataclasses.fields(rows.Row)} | rows.where("cpu")
    blank |= {"training": "GPT", "metric": "loss", "size": "small", "note": "", "skips": ""}
    blank |= {"second_metric": "", "second_value": 0.0}
    return rows.Row(**blank | {"arm": arm, "value": value, "steps": 9, **changes})


def test_rows_survive_the_file_and_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    row = example("Headroom", 2.5, history="16x9", underflow=0.25, seconds=1.5)
    for one in (dataclasses.replace(row, value=9.0), example("torch", history=""), row):
        rows.add(one, path)
    assert rows.read(path)[0] == row
    assert len(rows.read(path)) == 2


def test_best_static_scale_is_the_best_and_of_equals_the_cleanest() -> None:
    def static(scale: int, value: float, **changes: object) -> rows.Row:
        return example(f"static 2^{scale}", value, history=f"{scale}x9", **changes)

    worse, tie = static(2, 2.1), static(6, 2.003, underflow=0.2)
    clean, skips = static(10, 2.002, underflow=0.1), static(14, 2.0, skipped=3)
    never = static(18, 1.9, skipped=9)
    assert table.best_static([worse, tie, clean, skips, never]) == 10
    assert table.best_static([worse, skips]) == 14
    assert table.best_static([example("Headroom")]) is None


def test_static_scales_that_skip_everything_show_a_dash() -> None:
    found = [example("static 2^2", 2.5), example("static 2^40", 3.5, skipped=9)]
    _, text = table.statics(found)
    assert text.splitlines()[::2] == ["| static scale | 2^2 | 2^40 |", "| GPT | 2.500 | - |"]


def test_duel_leaves_out_what_one_side_refused() -> None:
    found = [
        example(TORCHS, 2.0, skipped=7),
        example("Headroom", 1.9, skipped=1),
        example(TORCHS, math.nan, training="half weights", note="refused"),
        example("Headroom", 1.9, training="half weights", skipped=5),
    ]
    _, text = table.duel(found)
    assert "half weights" not in text
    assert text.splitlines()[2].endswith("| 2.0000 | 1.9000 | -0.1000 |")
    assert text.splitlines()[-1].startswith("| total | 7 | 1 |")


def test_page_without_marks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nothing.\n")
    with pytest.raises(ValueError, match=r"page\.md must have the marks"):
        table.write([], page=page)
