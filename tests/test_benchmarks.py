"""The benchmarks: their models have the sizes that they claim, and all that can runs on the CPU."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch_has  # noqa: E402

torch_has.fully_shard()

import _rows  # noqa: E402
import _shapes  # noqa: E402
import calls  # noqa: E402
import drop_in  # noqa: E402
import end_to_end  # noqa: E402
import host  # noqa: E402
import illnesses  # noqa: E402
import inspector  # noqa: E402
import iterations  # noqa: E402
import modes  # noqa: E402
import spikes  # noqa: E402
import step  # noqa: E402

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(path: Path) -> ModuleType:
    """A script, under a name that no module of the tests has."""
    name = f"benchmarks_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ranks = load(FOLDER / "ranks.py")
blocks = load(FOLDER / "blocks.py")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On the tensors of these tests more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_scripts_are_all_known_here() -> None:
    known = (
        *((FOLDER / f"{name}.py") for name in ("jax_gpt", "jax_step")),
        blocks,
        calls,
        drop_in,
        end_to_end,
        host,
        illnesses,
        inspector,
        iterations,
        modes,
        ranks,
        spikes,
        step,
    )
    assert {str(path) for path in FOLDER.glob("[a-z]*.py")} == {
        str(each) if isinstance(each, Path) else each.__file__ for each in known
    }


def cases_of(table: Path) -> list[str]:
    """The cases in a table of JAX, in order; every time and loss in it is a number above 0."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["value"]) > 0 for row in rows if row["what"] in ("ms", "loss"))
    return list(dict.fromkeys(row["case"] for row in rows))


def test_step_of_jax_is_timed_against_its_peers(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("flax")
    module, table = load(FOLDER / "jax_step.py"), tmp_path / "jax.csv"
    module.measure("perceptron", module.perceptron(True), True, 1, 1, table)
    assert cases_of(table) == [f"perceptron, clipping, {case}" for case in module.CASES]


def test_gpt_of_jax_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optax")
    module, table = load(FOLDER / "jax_gpt.py"), tmp_path / "jax.csv"
    few = ["--tiny", "--steps", "20", "--seeds", "1", "--results", str(table)]
    module.main([*few, "--arms", "float16, headroom"])
    assert cases_of(table) == ["float16, headroom"]
    assert "0 skipped" in capsys.readouterr().out


def test_best_accuracy_of_the_blocks_is_that_of_the_best_guess() -> None:
    shape = blocks.Shape(8, 2, 4, 4, 16)
    data = blocks.Data(0, shape, "cpu")
    x, labels = data.batch(4096)
    first, second = (x.mean(1) @ data.ways.T > 0).long().unbind(1)
    best = data.best_accuracy()
    error = (best * (1 - best) / 4096) ** 0.5
    assert abs(((first + 2 * second) == labels).double().mean().item() - best) < 4 * error


def test_blocks_are_timed_and_learn(capsys: pytest.CaptureFixture[str]) -> None:
    shape = blocks.Shape(8, 2, 4, 4, 8)
    blocks.cost("small", shape, "cpu", rounds=1)
    blocks.learn(shape, "cpu", seeds=[0], steps=12)
    out = capsys.readouterr().out
    assert "ms with BlockScales, ratio" in out
    assert "blocks 0." in out
    assert out.count("0 dead after 10 updates") >= 2  # float32 and blocks


def test_cost_of_looking_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    inspector.main(["--tiny", "--rounds", "1", "--batch", "1", "--steps", "2"])
    out = capsys.readouterr().out
    assert all(f"{case} " in out for case in inspector.CASES)
    assert "a sampled iteration " in out
    assert "findings: []" in out


def test_spikes_are_recomputed_or_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    spikes.main(["--tiny", "--turns", "1", "--iterations", "50"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| {name}" for name in spikes.NAMES]
    skipped, recomputed = [int(row[3]) for row in rows], [row[4] for row in rows]
    assert (skipped[0], skipped[2], skipped[3]) == (0, 0, 0)
    assert skipped[1] > 0
    assert recomputed == ["0.0%", "0.0%", "0.0%", "2.0%"]


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [
        ("GPT-2 small", 124_439_808, 148),
        ("GPT-2 XL", 1_557_611_200, 580),
        ("ResNet-50", 25_557_032, 161),
        ("7B-like", 6_738_415_616, 291),
    ],
)
def test_model_has_the_shapes_of_its_name(model: str, parameters: int, tensors: int) -> None:
    shapes = step.MODELS[model]
    assert _shapes.size(shapes) == parameters
    assert len(shapes) == tensors


def test_layers_fit_with_a_tenth_of_the_memory_left() -> None:
    for free in (0, 20 * 2**30, 80 * 2**30):
        layers = _shapes.seven_b_layers(free)
        assert 16 * _shapes.size(_shapes.seven_b(layers)) <= 0.9 * free or layers == 0
        assert 16 * _shapes.size(_shapes.seven_b(layers + 1)) > 0.9 * free
    assert _shapes.seven_b_layers(2**60) == 32


# The compiler takes its time.
FLOAT32 = [n for n, r in step.cases().items() if r.dtype is torch.float32 and not r.compiled]


@pytest.mark.parametrize("name", FLOAT32)
def test_case_of_step_applies_every_step(name: str) -> None:
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (5, 1, 3)]
    grads = [torch.empty_like(param, requires_grad=False) for param in params]
    case = step.Case(step.cases()[name], params, grads, device="cpu")
    for _ in range(3):
        case.before()
        case.after()
    assert case.skipped() == 0
    assert case.optimizer.state[params[0]]["step"] == 3
    assert all(param.grad is None for param in params)


def test_calls_are_counted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("import two\n\ndef f():\n    two.g()\n    return h()\n\n"
                                     "def h():\n    return 1\n")  # fmt: skip
    (tmp_path / "two.py").write_text("def g():\n    return sorted([2], key=lambda x: -x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(calls, "PACKAGE", f"{tmp_path}/")
    import one

    # f calls g, which calls a lambda; back in f, h: four calls, there and back once.
    assert calls.Tracer().run(one.f) == calls.Count(calls=4, files=2, jumps=2)
    assert calls.Tracer().run(lambda: torch.ones(1).sum()) == calls.Count(0, 0, 0)


def test_every_case_of_host_is_compared_and_nothing_is_left_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host.main(["--tensors", "3", "--updates", "3"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("    3 tensors, 10 rounds: drop-in ")
    assert all(f"{name} " in line for name in host.AGAINST)
    assert set(host.CASES) == {*host.AGAINST, *host.AGAINST.values()}


def test_a_case_of_host_whose_steps_do_not_happen_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host.torch.optim.AdamW, "step", lambda self: None)
    with pytest.raises(RuntimeError, match="0 of 12 steps of 'drop-in' were applied"):
        host.measure(3, 10)


def test_chosen_cases_come_with_what_they_are_compared_with() -> None:
    assert list(step.chosen("ResNet-50", ["clip_grad_norm_"])) == ["torch", "ours, clip_grad_norm_"]
    picked = step.chosen("ResNet-50", ["AdamW, no clipping"])
    assert list(picked) == ["torch, no clipping", "ours, torch's AdamW, no clipping"]
    assert len(step.chosen("GPT-2 small", [])) == len(step.cases())
    assert not any("master" in name for name in step.chosen("7B-like", []))


def test_small_gpt_has_the_size_of_gpt2() -> None:
    with torch.device("meta"):
        model = end_to_end.GPT(end_to_end.SMALL)
    more_words = (50_304 - 50_257) * 768
    assert sum(param.numel() for param in model.parameters()) == 124_439_808 + more_words


def test_end_to_end_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "results.csv"
    end_to_end.main(["--tiny", "--steps", "2", "--batch", "2", "--results", str(table)])
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = end_to_end.CASES
    assert [row["case"] for row in rows[::3]] == [f"eager, {name}" for name in names]
    assert all(float(row["median_ms"]) > 0 for row in rows)
    said = capsys.readouterr().out
    assert said.count("11 of 11 steps applied") == len(names)
    assert "float16, ours, against float16, no scaler: " in said


def test_whole_iterations_are_timed_in_every_way(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    few = ["--tiny", "--steps", "1", "--repeats", "1", "--models", "MLP", "GPT-2 small"]
    iterations.main([*few, "--results", str(table)])
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"{model}, {case}" for model in ("MLP", "GPT-2 small") for case in iterations.CASES]
    assert [row["case"] for row in rows[::3]] == names
    assert {row["tensors"] for row in rows if row["case"].startswith("MLP")} == {"40"}
    assert all(float(row["median_ms"]) > 0 for row in rows)


def test_every_mode_is_trained_on_the_cpu(tmp_path: Path) -> None:
    table = tmp_path / "modes.csv"
    size = modes.TINY._replace(words=len(modes.data.alphabet()))
    generator = torch.Generator().manual_seed(0)
    texts = modes.data.windows(modes.data.documentation().train, 8, size.length, generator)
    small = modes.Task(lambda: modes.GPT(size), lambda _: texts, lambda: [texts], 30, 1e-2)
    first = modes.train(small, "fp32", "cpu", 0, 1)[0]
    for arm in modes.ARMS:
        loss, skipped = modes.train(small, arm, "cpu", 0, 30)
        assert loss < 0.9 * first
        assert skipped == 0
    modes.main(["memory", "--results", str(table)])  # nothing to count here
    assert not table.exists()


def test_tables_of_modes_are_made_of_the_last_rows() -> None:
    rows = _rows.read(modes.Row, modes.RESULTS)
    page = modes.PAGE.read_text(encoding="utf-8")
    there = [row for row in rows if "CPU" not in row.device]
    for lines in (modes._quality_table(there), modes._memory_table(there)):
        assert "\n".join(lines) in page
    changed = [row._replace(value=row.value * 2) for row in there]
    assert "\n".join(modes._quality_table(changed)) not in page


def told(moved: str, scales: str, error: str = "", as_without: bool = True) -> Any:
    """What a rank says; a letter for each step."""
    moves = {"a": "all", "n": "none", "s": "some"}
    steps = tuple(256.0 * 2.0 ** int(power) for power in scales.split())
    return ranks.Told(error, tuple(moves[each] for each in moved), steps, as_without)


GOOD, SKIPPED = told("aaaaa", "0 0 1 1 1"), told("aaana", "0 0 1 0 0")


@pytest.mark.parametrize(
    ("fault", "first", "second", "verdict"),
    [
        ("none", GOOD, GOOD, "right"),
        ("inf", SKIPPED, SKIPPED, "right"),
        ("nan", GOOD, GOOD, "wrong"),
        ("none", SKIPPED, SKIPPED, "wrong"),
        ("inf", GOOD, SKIPPED, "ranks differ"),
        ("inf", told("aaana", "0 0 1 0 0"), told("aaana", "0 0 1 1 1"), "ranks differ"),
        ("inf", told("aaasa", "0 0 1 0 0"), SKIPPED, "ranks differ"),
        ("none", GOOD, GOOD._replace(as_without=False), "wrong"),
        ("no gradient", GOOD, told("aaana", "0 0 1 1 1"), "right"),
        ("no gradient", GOOD, SKIPPED, "ranks differ"),
        ("none", GOOD, None, "hangs"),
        ("none", None, told("", "", "TypeError: no"), "error: TypeError"),
    ],
)
def test_verdict_says_what_ranks_did(fault: str, first: Any, second: Any, verdict: str) -> None:
    found, detail = ranks.judge(fault, [first, second])
    assert found == verdict
    assert bool(detail) == (verdict != "right")
    assert ranks.judge(fault, [second, first])[0] == verdict


@pytest.mark.soak
def test_matrix_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks._launching, "GRACE", 0.1)
    chosen = [
        ranks.Cell(scaler, "DDP", "foreach", fault, "step()")
        for scaler, fault in (
            ("torch GradScaler", "inf"),
            ("torch GradScaler", "no gradient"),
            ("gradscale GradScaler", "no gradient"),
            ("gradscale GradScaler", "inf"),
        )
    ]
    found = [verdict for _, verdict, _ in ranks.run(chosen, watchdog=60)]
    assert found == ["ranks differ", "error: AssertionError", "right", "right"]


@pytest.mark.soak
def test_cost_is_told_as_ratios(tmp_path: Path) -> None:
    torch_has.fsdp2_on_the_cpu()
    costs = tmp_path / "ranks_cost.csv"
    few = ["--ranks", "2", "--step-ranks", "2", "--rounds", "2", "--steps", "2"]
    ranks.main(["cost", *few, "--costs", str(costs)])
    found = _rows.read(ranks.CostRow, costs)
    assert {row.part for row in found} == {"agreement", "after backward"}
    assert all(0 < row.lower <= row.ratio <= row.upper for row in found)


def test_tables_of_ranks_are_made_of_the_last_rows() -> None:
    page = ranks.PAGE.read_text(encoding="utf-8")
    for lines in ranks.tables(ranks.RESULTS, ranks.COSTS).values():
        assert "\n".join(lines) in page
    rows = _rows.read(ranks.Row, ranks.RESULTS)
    assert {row.verdict for row in rows if row.scaler.startswith("gradscale")} == {"right"}
    assert {ranks.Cell(*row[5:10]) for row in rows} == set(ranks._cells.cells())
    changed = [row._replace(verdict="wrong") for row in rows]
    assert "\n".join(ranks.matrix_table(changed)) not in page
