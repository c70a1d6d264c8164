"""The shape of the library, enforced: who may import whom, and what reviewers tire of checking.

Each check maps a module (dotted name and text) to a list of complaints, so the same function runs
over the real tree and over the planted faults that show it can fail.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "gradscale"
CODE_FOLDERS = ("gradscale", "tests", "examples", "benchmarks")

MAX_LINES = (
    450  # a file becomes a folder at about 400; this is where it is no longer a matter of taste
)
MAX_IMPORT = 5.0
"""Starts of the interpreter that `import gradscale` may take: 50 ms on an idle core. What else runs
slows down both, so the quotient stays."""
FRAMEWORKS = ("torch", "jax", "keras", "tensorflow", "numpy", "triton")
NO_NAMES = {"utils", "util", "base", "types", "helpers", "common", "_src", "src", "misc"}


class Rule(NamedTuple):
    """What one part of the library may import, besides itself and the standard library."""

    ours: Set[str] = frozenset()
    """Parts of gradscale; `__init__` is the package's own front door."""
    theirs: Set[str] = frozenset()
    """Third-party packages."""
    lazily: Set[str] = frozenset()
    """Parts of gradscale that may be imported inside a function only."""


FACTS = {"formats", "errors"}
CORE = FACTS | {"policy", "checkpoints", "monitor"}
ENGINES = {"torch", "jax", "keras"}
BELOW_ENGINES = CORE | {"runlog", "__init__"}

# The diagram in CONTRIBUTING.md, arrows followed to the end. A new part needs a row here.
RULES = {
    "__init__": Rule(CORE),
    "errors": Rule(),
    "formats": Rule({"errors"}),
    "policy": Rule(FACTS),
    "checkpoints": Rule(FACTS | {"policy"}),
    "monitor": Rule(FACTS),
    "runlog": Rule(FACTS | {"monitor"}),
    "torch": Rule(BELOW_ENGINES, {"torch"}),
    "torch.grads.triton": Rule(BELOW_ENGINES, {"torch", "triton"}),
    "jax": Rule(BELOW_ENGINES, {"jax", "optax"}),
    "keras": Rule(BELOW_ENGINES, {"keras"}),
    "keras.replicas": Rule(BELOW_ENGINES, {"keras", "tensorflow"}),
    "compat": Rule(
        BELOW_ENGINES | ENGINES,
        {"torch", "jax", "numpy", "flax", "equinox", "keras", "tensorflow", "deepspeed", "mxnet"},
    ),
    "plugins": Rule(
        BELOW_ENGINES | ENGINES,
        {"torch", "lightning", "accelerate", "transformers"},
    ),
    "report": Rule(FACTS | {"monitor", "runlog", "__init__"}),
    "simulate": Rule(FACTS | {"policy", "__init__"}, {"numpy"}),
    "demo": Rule(
        FACTS | {"policy", "__init__", "torch", "jax"}, {"torch", "matplotlib", "jax", "optax"}
    ),
    "__main__": Rule({"cli"}),
    "cli": Rule(
        FACTS | {"policy", "monitor", "report", "runlog", "__init__"},
        {"typer", "rich"},
        ENGINES | {"compat", "demo", "simulate"},
    ),
}


# The folders of the PyTorch engine, lowest first: a row says what a folder or module may import of
# the others. Above `compile` only, because the facade's methods refer to operators and handles.
TORCH_RULES: dict[str, Set[str]] = {
    "construction": set(),
    "features": set(),
    "tenants": set(),
    "grads": set(),
    "saved_state": set(),
    "state": {"grads", "saved_state"},
    "telemetry": {"features", "grads"},
    "distributed": {"grads", "telemetry"},
    "compile": {"features", "grads", "telemetry"},
    "step": {"grads", "state", "distributed", "telemetry"},
    "torch_names": {"grads", "step"},
    # torch's sharded class becomes ours, which is above the scaler: imported when one is given.
    "torch_scaler": {"distributed.fsdp_scaler"},
    "scaler": {
        "saved_state",
        "state",
        "step",
        "distributed",
        "telemetry",
        "compile",
        "torch_names",
        "torch_scaler",
        "construction",
    },
    # torch's class of the same name is one of FSDP, and this one is a scaler.
    "distributed.fsdp_scaler": {"scaler", "distributed"},
    "distributed.join": {"step.contract", "distributed"},
    "optim": {"features", "grads", "step.contract", "compile.handles"},
    "mixed_precision": {"grads", "optim", "scaler", "step", "telemetry"},
    "blocks": {"features", "grads", "tenants"},
    "inspect": {
        "features",
        "grads",
        "mixed_precision",
        "optim",
        "scaler",
        "step",
        "telemetry",
        "tenants",
    },
    "checkpoint": {"scaler", "step"},
    "drop_in": {"scaler", "distributed.fsdp_scaler"},
    "replacement": {"construction", "drop_in"},
}


class Module(NamedTuple):
    """A source file: its dotted name, its text, and whether it is an `__init__.py`."""

    name: str
    source: str
    is_package: bool = False


class Import(NamedTuple):
    """One imported name, absolute, and whether the import sits inside a function."""

    target: str
    line: int
    lazy: bool


def read_tree(library: Path) -> list[Module]:
    """All modules below the folder `library`, which is the package itself."""
    modules = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), is_package))
    return modules


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, with whether importing the module does not run it.

    That is the inside of functions, and of `if TYPE_CHECKING:`, which only type checkers read.
    """
    typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    unread = node.body if isinstance(node, ast.If) and typing else []
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        inside = inside or child in unread
        yield child, inside
        yield from walk(child, inside)


def imports(module: Module) -> Iterator[Import]:
    """Every import in the module: statements anywhere, and import_module() of a literal name."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node, lazy in walk(ast.parse(module.source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(origin, package) if node.level else origin
            names = [f"{origin}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            names = [str(node.args[0].value)] if called in {"import_module", "__import__"} else []
        for name in names:
            yield Import(name, node.lineno, lazy)


def part_of(name: str) -> str:
    """The part of gradscale that a dotted name belongs to; what is no part is of `__init__`."""
    part = name.split(".")[1] if "." in name else "__init__"
    return part if part in RULES else "__init__"


def forbidden_imports(module: Module) -> list[str]:
    """Imports that RULES does not allow."""
    inner = module.name.partition(".")[2] or "__init__"
    words = inner.split(".")
    rows = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    row = next((row for row in rows if row in RULES), words[0])
    if row not in RULES:
        return [f"{module.name}: has no row in RULES"]
    rule, own = RULES[row], row.split(".")[0]
    complaints = []
    for target, line, lazy in imports(module):
        top = target.split(".")[0]
        if top == "gradscale":
            allowed = {own} | rule.ours | (rule.lazily if lazy else set())
            fine = part_of(target) in allowed
        else:
            fine = top in sys.stdlib_module_names or top in rule.theirs
        if not fine:
            complaints.append(f"{module.name}:{line}: may not import {target}")
    return complaints


def forbidden_inside_torch(module: Module) -> list[str]:
    """Imports between the folders of the PyTorch engine that TORCH_RULES does not allow."""
    inner = module.name.removeprefix("gradscale.torch").lstrip(".")
    if not module.name.startswith("gradscale.torch") or not inner:
        return []
    words = inner.split(".")
    rows = [".".join(words[:count]) for count in range(len(words), 0, -1)]
    row = next((row for row in rows if row in TORCH_RULES), None)
    if row is None:
        return [f"{module.name}: has no row in TORCH_RULES"]
    allowed = {words[0]} if row == words[0] else set()
    complaints = []
    for target, line, _ in imports(module):
        if not target.startswith("gradscale.torch."):
            continue
        there = target.removeprefix("gradscale.torch.")
        if not any(f"{there}.".startswith(f"{part}.") for part in allowed | TORCH_RULES[row]):
            complaints.append(f"{module.name}:{line}: may not import {target}")
    return complaints


def vague_names(module: Module) -> list[str]:
    """Names that say nothing about what is inside."""
    words = module.name.split(".")
    return [
        f"{module.name}: no module may be named {w}" for w in words if {w, w.lstrip("_")} & NO_NAMES
    ]


def too_long(module: Module) -> list[str]:
    """Files that should have become a folder."""
    lines = len(module.source.splitlines())
    return [f"{module.name}: {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else []


def prints(module: Module) -> list[str]:
    """Calls of print() outside the command line."""
    if module.name == "gradscale.cli":
        return []
    return [
        f"{module.name}:{node.lineno}: print()"
        for node, _ in walk(ast.parse(module.source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def asserts(module: Module) -> list[str]:
    """Assert statements, which `python -O` removes: they guard nobody."""
    return [
        f"{module.name}:{node.lineno}: assert"
        for node, _ in walk(ast.parse(module.source))
        if isinstance(node, ast.Assert)
    ]


def not_ascii(module: Module) -> list[str]:
    """Lines with characters outside ASCII."""
    lines = module.source.splitlines()
    return [
        f"{module.name}:{i}: not ASCII" for i, line in enumerate(lines, 1) if not line.isascii()
    ]


def without_tests(library: Path, tests: Path) -> list[str]:
    """Folders of the library that no folder of tests is named after.

    Inside a folder a test file is named after what it promises, not after a module.
    """
    complaints = []
    modules = [path for path in library.rglob("*.py") if path.stem != "__init__"]
    for path in sorted({path.parent for path in modules}):
        wanted = tests / path.relative_to(library)
        if not any(wanted.glob("test_*.py")):
            complaints.append(f"{path.relative_to(library)}: no tests in {wanted.name}/")
    return complaints


def import_in_fresh_process(folder: Path) -> tuple[float, set[str]]:
    """Starts of the interpreter that `import gradscale` takes, and the frameworks that it loads.

    In the processor's time: that on the wall also counts the turns of other processes.
    """
    program = (
        "import sys, time; start = time.process_time(); import gradscale; "
        "print((time.process_time() - start) / start, "
        f"*{set(FRAMEWORKS)!r}.intersection(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    starts, *frameworks = done.stdout.split()
    return float(starts), set(frameworks)


def best_import(folder: Path) -> tuple[float, set[str]]:
    """The fastest of several imports: the first compiles, and other processes share the cores."""
    return min((import_in_fresh_process(folder) for _ in range(7)), key=lambda run: run[0])


CHECKS: list[Callable[[Module], list[str]]] = [
    forbidden_imports,
    forbidden_inside_torch,
    vague_names,
    too_long,
    prints,
    asserts,
    not_ascii,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_library_keeps_the_rule(check: Callable[[Module], list[str]]) -> None:
    modules = read_tree(LIBRARY)
    assert {"gradscale", "gradscale.policy"} <= {module.name for module in modules}
    assert [complaint for module in modules for complaint in check(module)] == []


def test_all_code_is_ascii() -> None:
    modules = [module for folder in CODE_FOLDERS for module in read_tree(ROOT / folder)]
    assert [complaint for module in modules for complaint in not_ascii(module)] == []


def test_each_source_folder_has_a_test_folder() -> None:
    assert without_tests(LIBRARY, ROOT / "tests") == []


def test_import_loads_no_framework_and_is_quick() -> None:
    starts, frameworks = best_import(ROOT)
    assert frameworks == set()
    assert starts < MAX_IMPORT


def test_rules_let_no_engine_import_another() -> None:
    for row, rule in RULES.items():
        if row.split(".")[0] in ENGINES:
            assert not (rule.ours | rule.lazily) & ENGINES


def test_rules_have_no_cycle() -> None:
    # TopologicalSorter raises CycleError; the front door stands for the core it re-exports.
    graph = {row: rule.ours for row, rule in RULES.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


CLEAN = '''"""A module that keeps every rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import errors
from .formats import FORMATS

text = "print('assert')"
'''

FAULTS = [
    (forbidden_imports, "policy", "import torch", "import torch"),
    (forbidden_imports, "policy", "import numpy as np", "import numpy"),
    (forbidden_imports, "policy", "def f():\n    import torch", "import torch"),
    (forbidden_imports, "policy", "import importlib as i\ni.import_module('jax')", "import jax"),
    (
        forbidden_imports,
        "policy",
        "from gradscale.checkpoints.format import save",
        "gradscale.checkpoints.format.save",
    ),
    (forbidden_imports, "policy", "from . import checkpoints", "gradscale.checkpoints"),
    (forbidden_imports, "policy", "from gradscale import Dynamic", "gradscale.Dynamic"),
    (forbidden_imports, "formats", "from .policy import Dynamic", "gradscale.policy.Dynamic"),
    (forbidden_imports, "checkpoints.peers", "import deepspeed", "import deepspeed"),
    (forbidden_imports, "monitor.events", "import torch", "import torch"),
    (forbidden_imports, "monitor", "from gradscale import policy", "gradscale.policy"),
    (forbidden_imports, "monitor.records", "from gradscale.torch import scaler", "torch.scaler"),
    (forbidden_imports, "policy", "from gradscale.monitor import Event", "gradscale.monitor.Event"),
    (forbidden_imports, "errors", "from . import formats", "gradscale.formats"),
    (forbidden_imports, "jax", "from .torch import scaler", "gradscale.torch.scaler"),
    (forbidden_imports, "torch.scaler", "from ..jax import grad", "gradscale.jax.grad"),
    (forbidden_imports, "torch.scaler", "def f():\n    import gradscale.keras", "gradscale.keras"),
    (forbidden_imports, "torch.scaler", "import triton.language as tl", "triton.language"),
    (forbidden_imports, "torch.scaler", "import numpy", "import numpy"),
    (forbidden_imports, "cli", "import gradscale.torch", "gradscale.torch"),
    (forbidden_imports, "cli.commands", "from gradscale.demo import train", "gradscale.demo.train"),
    (
        forbidden_imports,
        "cli",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import gradscale.demo",
        ":4: may not import gradscale.demo",
    ),
    (forbidden_imports, "policy", "if TYPE_CHECKING:\n    import torch", "import torch"),
    (forbidden_imports, "demo.train", "import numpy", "import numpy"),
    (forbidden_imports, "torch.scaler", "from gradscale.demo import train", "gradscale.demo.train"),
    (forbidden_imports, "torch.scaler", "import gradscale.plugins", "gradscale.plugins"),
    (forbidden_imports, "compat.apex", "import gradscale.plugins", "gradscale.plugins"),
    (forbidden_imports, "novelty", "import math", "no row"),
    (
        forbidden_inside_torch,
        "torch.grads.collect",
        "from gradscale.torch.step import entries",
        "gradscale.torch.step.entries",
    ),
    (
        forbidden_inside_torch,
        "torch.step.pipeline",
        "if TYPE_CHECKING:\n    from gradscale.torch.scaler import GradScaler",
        "gradscale.torch.scaler.GradScaler",
    ),
    (
        forbidden_inside_torch,
        "torch.optim.adam",
        "from gradscale.torch.step.pipeline import Pipeline",
        "gradscale.torch.step.pipeline.Pipeline",
    ),
    (forbidden_inside_torch, "torch.novelty", "import math", "no row"),
    (vague_names, "torch.grads._helpers", "", "_helpers"),
    (vague_names, "_src.policy", "", "_src"),
    (too_long, "policy", "x = 1\n" * (MAX_LINES + 1), "451 lines"),
    (prints, "torch.scaler", "def f():\n    print('skipped')", ":2: print"),
    (asserts, "policy", "def f(x):\n    assert x > 1", ":2: assert"),
    (not_ascii, "policy", "x = 1\n# 2 \N{MULTIPLICATION SIGN} 2", ":2: not ASCII"),
]


@pytest.mark.parametrize(
    ("check", "name", "source", "complaint"),
    FAULTS,
    ids=[f"{check.__name__}-{name}-{complaint}" for check, name, _, complaint in FAULTS],
)
def test_check_finds_a_planted_fault(
    check: Callable[[Module], list[str]], name: str, source: str, complaint: str
) -> None:
    found = check(Module(f"gradscale.{name}", source))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_passes_a_clean_module(check: Callable[[Module], list[str]]) -> None:
    assert check(Module("gradscale.policy", CLEAN)) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("torch.scaler", "import torch\nfrom gradscale import Dynamic\nfrom .state import Scale"),
        ("torch.optim.adam", "from gradscale.torch.step.contract import is_capable"),
        ("torch.grads.triton", "import triton"),
        ("cli", "def demo():\n    import gradscale.torch\n    print('ok')"),
        ("cli.commands", "if TYPE_CHECKING:\n    from gradscale.demo.train import Trace"),
        ("plugins.lightning", "import lightning\nfrom gradscale.torch.scaler import GradScaler"),
        ("demo.picture", "import matplotlib\nfrom gradscale.torch import GradScaler"),
    ],
)
def test_check_passes_what_the_rules_allow(name: str, source: str) -> None:
    module = Module(f"gradscale.{name}", source)
    assert [complaint for check in CHECKS for complaint in check(module)] == []


def test_missing_test_folder_is_found(tmp_path: Path) -> None:
    library, tests = tmp_path / "gradscale", tmp_path / "tests"
    for name in ("errors.py", "torch/scaler.py", "torch/grads/collect.py", "jax/__init__.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).touch()
    (tests / "torch" / "grads").mkdir(parents=True)
    (tests / "test_policy.py").touch()
    (tests / "torch/test_scaler.py").touch()
    missing = without_tests(library, tests)
    assert [complaint.split(":")[0] for complaint in missing] == ["torch/grads"]
    (tests / "torch/grads/test_triton.py").touch()
    assert without_tests(library, tests) == []


def test_slow_import_and_framework_are_found(tmp_path: Path) -> None:
    end = f"time.process_time() * {1.0 + MAX_IMPORT}"
    slow = f"import time, torch\nend = {end}\nwhile time.process_time() < end:\n    pass\n"
    (tmp_path / "gradscale.py").write_text(slow)
    (tmp_path / "torch.py").touch()  # a stand-in: the real one takes seconds
    starts, frameworks = best_import(tmp_path)
    assert starts >= MAX_IMPORT
    assert frameworks == {"torch"}
