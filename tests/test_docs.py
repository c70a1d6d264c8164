"""Every Python block of the documentation runs, and so does every example."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_has
from gradscale.torch import features
from pages import run_page
from programs import run_python

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def run_example(path: Path) -> str:
    """What an example prints; the test fails if the example does, or if it warns."""
    # One thread: their networks are small, and threads that wait for a busy core take ten times as
    # long (2 cores, shared).
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # torchrun itself starts one of them: it is the same for all, by a test below.
    program = ["-c", RANKS, path] if path in ON_RANKS[1:] else [path]
    done = run_python("-W", "error", *program, cwd=ROOT, env=env, limit=120)
    if done.returncode:
        pytest.fail(f"{path.name} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def start_of(path: Path) -> str:
    """The last lines of an example: how it is started."""
    return path.read_text(encoding="utf-8").split('if __name__ == "__main__":\n')[1]


ON_RANKS = [path for path in EXAMPLES if "torch.distributed.run" in start_of(path)]
"""Those that start themselves again with torchrun."""
RANKS = """
import os, runpy, socket, sys
with socket.socket() as free:
    free.bind(("localhost", 0))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
os.environ["WORLD_SIZE"] = "2"
children = []
for rank in ("0", "1"):
    children.append(os.fork())
    if not children[-1]:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        runpy.run_path(sys.argv[1], run_name="__main__")
        sys.exit()
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""
"""What torchrun does, in processes that need not import torch once more."""


def test_examples_on_ranks_start_in_the_same_way() -> None:
    assert len(ON_RANKS) == 3
    assert len({start_of(path) for path in ON_RANKS}) == 1


NEEDS: dict[str, Callable[[], Any]] = {
    "docs/move/accelerate.md": partial(pytest.importorskip, "accelerate"),
    "docs/move/mxnet.md": partial(pytest.importorskip, "mxnet"),
    "docs/move/keras.md": partial(pytest.importorskip, "keras"),
    "examples/keras_fit.py": partial(pytest.importorskip, "keras"),
    "docs/how-to/jax.md": lambda: [*map(pytest.importorskip, ("optax", "equinox", "flax"))],
    "examples/jax_equinox.py": partial(pytest.importorskip, "equinox"),
    "examples/jax_flax_nnx.py": partial(pytest.importorskip, "flax"),
    "examples/jax_optax.py": partial(pytest.importorskip, "optax"),
    "examples/jax_sharded.py": partial(pytest.importorskip, "optax"),
    "docs/move/lightning.md": partial(pytest.importorskip, "lightning"),
    "docs/how-to/quantize.md": partial(pytest.importorskip, "onnxruntime"),
    "examples/qat_tensorrt.py": partial(pytest.importorskip, "onnxruntime"),
    "docs/move/transformers.md": partial(pytest.importorskip, "transformers"),
    "examples/trainer_lora.py": partial(pytest.importorskip, "peft"),
    "docs/explain/blocks.md": torch_has.input_metadata,
    "docs/how-to/fsdp2.md": torch_has.fsdp2_on_the_cpu,
    "docs/how-to/pipeline.md": torch_has.pipeline_stages,
    "examples/fsdp2.py": torch_has.fsdp2_on_the_cpu,
    "examples/pipeline.py": torch_has.pipeline_stages,
}
"""What a page or an example is skipped without."""


def place(path: Path) -> str:
    """Where a page or an example is, from the root."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NEEDS.get(place(path), lambda: None)()
    monkeypatch.chdir(tmp_path)  # a block may save a checkpoint
    torch.manual_seed(0)
    try:
        # docs/measurements/versions.md: older versions have graph breaks, and the same results.
        run_page(path, features.COMPILES_OPERATORS)
    finally:
        if torch.distributed.is_initialized():  # of a page that has failed
            torch.distributed.destroy_process_group()


def soaked(path: Path) -> Any:
    """`path` as a parameter, in `make soak` alone if it is long: its parts run elsewhere then."""
    long = path.name == "qat_tensorrt.py"  # tests/test_qat.py
    return pytest.param(path, marks=[pytest.mark.soak] if long else [])


@pytest.mark.parametrize("path", [soaked(path) for path in EXAMPLES], ids=lambda path: path.name)
def test_example_runs(path: Path) -> None:
    NEEDS.get(place(path), lambda: None)()
    assert run_example(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 100


def test_dropin_example_skips_the_planted_step_and_learns() -> None:
    rows = [line.split() for line in run_example(ROOT / "examples/dropin.py").splitlines()[1:]]
    assert [int(row[0]) for row in rows if row[3] == "no"] == [6]
    assert float(rows[-1][1]) < float(rows[0][1])


def write(tmp_path: Path, page: str) -> Path:
    """A page with the given text."""
    path = tmp_path / "page.md"
    path.write_text(page, encoding="utf-8")
    return path


def test_blocks_of_a_page_share_a_namespace(tmp_path: Path) -> None:
    page = "<!-- python\nx = 1\n-->\n\n```python\ny = x + 1\n```\n\n```python\nassert y == 2\n```\n"
    assert run_page(write(tmp_path, page)) == 2


def test_failing_block_fails_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "Text.\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_page(path)
    fault = caught.traceback[-1]
    assert (Path(fault.path), fault.lineno + 1) == (path, 5)


def test_other_languages_are_not_run(tmp_path: Path) -> None:
    assert run_page(write(tmp_path, "```\nno code\n```\n\n```bash\nfalse\n```\n")) == 0


@pytest.mark.parametrize(
    "page",
    [
        "```python\nx = 1\n",
        "- item\n\n  ```python\n  x = 1\n  ```\n",
        "```py\nx = 1\n```\n",
        "~~~python\nx = 1\n~~~\n",
        "```{.python}\nx = 1\n```\n",
        "```python title='x'\nx = 1\n```\n",
        "```pycon\n>>> 1\n1\n```\n",
    ],
)
def test_block_that_would_be_passed_over_fails(tmp_path: Path, page: str) -> None:
    with pytest.raises(ValueError, match="1 Python blocks, of which 0"):
        run_page(write(tmp_path, page))


def test_example_that_warns_fails(tmp_path: Path) -> None:
    path = tmp_path / "noisy.py"
    path.write_text("import warnings\nwarnings.warn('old', stacklevel=1)\n")
    with pytest.raises(pytest.fail.Exception, match=r"noisy\.py exited with 1"):
        run_example(path)


def torch_rules() -> dict[str, set[str]]:
    """TORCH_RULES of tests/test_architecture.py."""
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text(encoding="utf-8"))
    made = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    (value,) = [node.value for node in made if ast.unparse(node.target) == "TORCH_RULES"]
    assert isinstance(value, ast.Dict)
    return {
        ast.literal_eval(part): set() if isinstance(rule, ast.Call) else ast.literal_eval(rule)
        for part, rule in zip(value.keys, value.values, strict=True)
        if part is not None
    }


def test_contributing_has_the_import_rules_that_are_checked() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("| part | may import |\n|---|---|\n")[1].split("\n\n")[0]
    shown = {}
    for line in table.splitlines():
        parts, allowed = (re.findall("`([^`]+)`", cell) for cell in line.strip("|").split("|"))
        shown |= {part: set(allowed) - {"torch/"} for part in parts}
    assert shown == torch_rules()
