"""The contents of `gradscale info` as plain data: packages, devices, code path, missing extras.

Each framework is imported in a process of its own, and kernels are tried in one more. So what is
broken, even what kills its process, is a line of the report, and its output does not mix with
ours.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gradscale import __version__

FRAMEWORKS = ("torch", "jax", "keras", "triton")
# As in pyproject.toml, which is not part of an installation; a test compares the two.
EXTRAS = {
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "equinox": ("jax", "optax", "equinox"),
    "keras": ("keras",),
    "mxnet": ("mxnet", "numpy"),
    "cli": ("typer", "rich"),
    "simulate": ("typer", "rich", "numpy"),
    "demo": ("torch", "typer", "rich", "matplotlib"),
    "report": ("typer", "rich"),
}
TIMEOUT = 120.0
"""Seconds that the import of one framework may take."""

# A folder of that name in the current directory is not the framework. (`python -P`, from 3.11 on.)
SAFE_PATH = "import sys; sys.path = [place for place in sys.path if place]\n"

PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
version = str(getattr(module, "__version__", "unknown"))
sys.stdout.write("\\n" + json.dumps({"version": version}))
"""

DEVICES = """
import json, sys
sys.path.append(sys.argv[1])
import torch
from gradscale.torch.grads.device_path import path_of

def write(value):
    sys.stdout.write("\\ngradscale: " + json.dumps(value))
    sys.stdout.flush()

devices = []
for index in range(torch.cuda.device_count()):
    capability = None
    if torch.version.hip is None:
        capability = "%d.%d" % torch.cuda.get_device_capability(index)
    devices.append((f"cuda:{index}", torch.cuda.get_device_name(index), capability))
xpu = getattr(torch, "xpu", None)
for index in range(xpu.device_count() if xpu else 0):
    devices.append((f"xpu:{index}", xpu.get_device_name(index), None))
if torch.backends.mps.is_available():
    devices.append(("mps", "Apple GPU", None))
devices.append(("cpu", "CPU", None))
write(devices)
for device, *_ in devices:
    path = path_of(torch.device(device))
    write((path.name, path.why))
"""


MARK = "gradscale: "
"""What a line of that program begins with; libraries may print others."""


class Package(NamedTuple):
    """A framework, as found on this machine."""

    name: str
    version: str | None = None
    """None where it is not installed or cannot be imported."""
    error: str | None = None
    """Why it cannot be imported; None where it can, or is not installed."""

    @property
    def remedy(self) -> str | None:
        """The command that installs it; None where it is installed."""
        if self.version or self.error:
            return None
        wanted = f'"gradscale[{self.name}]"' if self.name in EXTRAS else self.name
        return f"pip install {wanted}"


class Device(NamedTuple):
    """A device that torch finds, and the code that gradscale.torch runs on gradients there."""

    device: str
    """As in `torch.device`, such as "cuda:0"."""
    name: str
    capability: str | None
    """The compute capability; None of what is no CUDA device."""
    path: str
    """"triton" (kernels), "reference" (torch operations) or "unknown"."""
    why: str


def is_installed(name: str) -> bool:
    """Whether there is a module `name`; does not import it."""
    return importlib.util.find_spec(name) is not None


class Run(NamedTuple):
    """What a program in another process wrote, and why it ended early, if it did."""

    lines: list[str]
    error: str | None = None


def run(program: str, argument: str, what: str) -> Run:
    """Runs a Python program with one argument; `what` it does is for the error."""
    command = [sys.executable, "-c", SAFE_PATH + program, argument]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Run([], f"{what} took longer than {TIMEOUT:g} s")
    lines = done.stdout.splitlines()
    if done.returncode < 0:
        return Run(lines, f"{what} ended the process ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Run(lines, said[-1])
    return Run(lines)


def look(name: str) -> Package:
    """The framework `name`; imports it in another process."""
    if not is_installed(name):
        return Package(name)
    lines, error = run(PROBE, name, "its import")
    return Package(name, error=error) if error else Package(name, json.loads(lines[-1])["version"])


def find_devices() -> list[Device]:
    """The devices that torch finds; runs a kernel on each CUDA device, in another process."""
    if not is_installed("torch"):
        return []
    lines, error = run(DEVICES, str(Path(__file__).parents[2]), "trying a kernel")
    written = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
    devices, *paths = written or [[("any", "not found", None)]]
    paths += [("unknown", error)] * (len(devices) - len(paths))
    return [Device(*device, *path) for device, path in zip(devices, paths, strict=True)]


def path(packages: Mapping[str, Package], devices: Sequence[Device]) -> dict[str, str]:
    """The code that gradscale.torch runs on gradients, and why.

    It is "triton", "reference", "none" where there is no torch, or "unknown".
    """
    if packages["torch"].version is None:
        return {"name": "none", "why": "gradscale.torch needs torch"}
    gpus = [device for device in devices if device.device.startswith(("cuda", "any"))]
    if not gpus:
        return {"name": "reference", "why": "the kernels need a CUDA device, and torch finds none"}
    used = [gpu.device for gpu in gpus if gpu.path == "triton"]
    if not used:
        return {"name": gpus[0].path, "why": gpus[0].why}
    return {"name": "triton", "why": f"kernels on {', '.join(used)}, torch operations elsewhere"}


def use_of(
    package: Package, packages: Mapping[str, Package], devices: Sequence[Device] = ()
) -> str:
    """What gradscale uses `package` for, or how to install or repair it, in words."""
    if package.version is None:
        return package.error or package.remedy or ""
    if package.name == "triton":
        chosen = path(packages, devices)
        return f"{'used' if chosen['name'] == 'triton' else 'not used'}: {chosen['why']}"
    if is_installed(f"gradscale.{package.name}"):
        return f"engine gradscale.{package.name}"
    return "policies only: there is no engine for it"


def gather() -> dict[str, Any]:
    """The whole report, fit for JSON."""
    with ThreadPoolExecutor() as pool:  # each thread waits for its process
        found = pool.submit(find_devices)
        packages = {package.name: package for package in pool.map(look, FRAMEWORKS)}
    devices = found.result()
    return {
        "gradscale": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: {
                "version": package.version,
                "error": package.error,
                "remedy": package.remedy,
                "engine": is_installed(f"gradscale.{name}"),
                "use": use_of(package, packages, devices),
            }
            for name, package in packages.items()
        },
        "path": path(packages, devices),
        "devices": [device._asdict() for device in devices],
        "cuda_devices": [device.name for device in devices if device.device.startswith("cuda")],
        "missing": {
            extra: [name for name in names if not is_installed(name)]
            for extra, names in EXTRAS.items()
        },
    }
