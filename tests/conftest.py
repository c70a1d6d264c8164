"""Settings that every test shares. Needs no framework: a machine may lack any of them."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quick_interpreter
import their_warnings

# Read when the frameworks are first imported, so they are set before any test module is.
# Keras' default backend is TensorFlow, which we do not install.
os.environ.setdefault("KERAS_BACKEND", "jax")
# Without it JAX searches for accelerators, and says so when it finds a GPU that it cannot use.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Four devices, so that one process can share work out; programs that are compiled quickly rather
# than well; and float16 that is float16: XLA leaves out a rounding that is followed by float32.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true --xla_allow_excess_precision=false",
)

# torch's compiler believes the CPU which vectors it has, instead of compiling programs to see.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell ignores SIGINT in what it starts in the background, and child processes inherit that.
# Tests of `gradscale run` send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A script, run by `make mutants`, and what test files import (`pythonpath` in pyproject.toml makes
# that work): the doctest collector would import the first, and the second once more.
collect_ignore = ["mutants.py", "support"]

if importlib.util.find_spec("hypothesis"):
    from hypothesis import Phase, settings

    # No deadline: the first call into a framework takes seconds, and two workers share two cores.
    settings.register_profile("explore", deadline=None, print_blob=True)
    settings.register_profile("fixed", deadline=None, derandomize=True)
    # A planted fault need only be noticed: shrinking takes minutes in kernels.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", deadline=None, derandomize=True, phases=phases)
    settings.load_profile("explore")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the examples of the profiles that are fixed the same in every run."""
    for line in their_warnings.lines():
        config.addinivalue_line("filterwarnings", line)
    if config.getoption("hypothesis_profile", None) in ("fixed", "mutants"):
        from hypothesis.internal.conjecture import providers

        # Examples contain constants from the modules that are imported by then, which differ with
        # the tests that a worker happens to have run before.
        if hasattr(providers, "is_local_module_file"):
            providers.is_local_module_file = lambda path: False


def no_cuda() -> str | None:
    """Why tests marked `gpu` cannot run here, or None if they can."""
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device, and torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device, and torch finds none"


if no_cuda():
    # Kernels run in Triton's interpreter, which must be asked for before they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = no_cuda() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leaves what is imported by now to itself: a search for cycles in it takes 0.4 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undoes it: extensions complain of what is still there when Python ends."""
    gc.unfreeze()


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.barrier()  # else gloo's thread may want the GIL while it is joined
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation site, built strictly."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder
