"""The contents of `gradscale info` as plain data: installed packages, code path, missing extras.

Each framework is imported in a process of its own. So a broken one, even one that kills its
process, is a line of the report, and its output does not mix with ours.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from gradscale import __version__

FRAMEWORKS = ("torch", "jax", "keras", "triton")
# As in pyproject.toml, which is not part of an installation; a test compares the two.
EXTRAS = {
    "torch": ("torch",),
    "cli": ("typer", "rich"),
    "simulate": ("typer", "rich", "numpy"),
    "demo": ("torch", "typer", "rich", "matplotlib"),
    "report": ("plotly",),
}
TIMEOUT = 120.0
"""Seconds that the import of one framework may take."""

PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
devices = []
if sys.argv[1] == "torch":
    devices = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
version = str(getattr(module, "__version__", "unknown"))
sys.stdout.write("\\n" + json.dumps({"version": version, "devices": devices}))
"""


class Package(NamedTuple):
    """A framework, as found on this machine."""

    name: str
    version: str | None = None
    """None where it is not installed or cannot be imported."""
    error: str | None = None
    """Why it cannot be imported; None where it can, or is not installed."""
    devices: tuple[str, ...] = ()
    """The CUDA devices that it finds."""

    @property
    def remedy(self) -> str | None:
        """The command that installs it; None where it is installed."""
        if self.version or self.error:
            return None
        wanted = f'"gradscale[{self.name}]"' if self.name in EXTRAS else self.name
        return f"pip install {wanted}"


class ChosenPath(NamedTuple):
    """The code that gradscale.torch runs on the gradients."""

    name: str
    """"triton", "reference" or "none"."""
    why: str
    """The reason, in words."""


def look(name: str) -> Package:
    """The framework `name`; imports it in another process."""
    if importlib.util.find_spec(name) is None:
        return Package(name)
    # -P: a folder of that name in the current directory is not the framework.
    command = [sys.executable, "-P", "-c", PROBE, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Package(name, error=f"its import takes longer than {TIMEOUT:g} s")
    if done.returncode < 0:
        killer = signal.Signals(-done.returncode).name
        return Package(name, error=f"its import ends the process ({killer})")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Package(name, error=lines[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return Package(name, found["version"], devices=tuple(found["devices"]))


def has_engine(name: str) -> bool:
    """Whether this version of gradscale has an engine for the framework `name`."""
    return importlib.util.find_spec(f"gradscale.{name}") is not None


def path(packages: Mapping[str, Package]) -> ChosenPath:
    """The code that gradscale.torch runs with these frameworks, and why."""
    if packages["torch"].version is None:
        return ChosenPath("none", "gradscale.torch needs torch")
    if not packages["torch"].devices:
        return ChosenPath("reference", "torch operations; the kernels need a CUDA device")
    if packages["triton"].version is None:
        return ChosenPath("reference", "torch operations; the kernels need Triton")
    return ChosenPath("triton", "kernels for gradients on CUDA, torch operations elsewhere")


def use_of_triton(packages: Mapping[str, Package]) -> str:
    """What gradscale.torch uses Triton for with these frameworks, in words."""
    if packages["torch"].version is None:
        return "not used: gradscale.torch needs torch"
    if not packages["torch"].devices:
        return "not used: torch finds no CUDA device"
    return "used: kernels of gradscale.torch on CUDA"


def use_of(package: Package, packages: Mapping[str, Package]) -> str:
    """What gradscale uses `package` for, or how to install or repair it, in words."""
    if package.error:
        return package.error
    if package.version is None:
        return package.remedy or ""
    if package.name == "triton":
        return use_of_triton(packages)
    if has_engine(package.name):
        return f"engine gradscale.{package.name}"
    return "policies only: this version has no engine for it"


def missing() -> dict[str, list[str]]:
    """For each extra, the packages that are not installed."""
    return {
        extra: [name for name in names if importlib.util.find_spec(name) is None]
        for extra, names in EXTRAS.items()
    }


def gather() -> dict[str, Any]:
    """The whole report, fit for JSON."""
    with ThreadPoolExecutor() as pool:  # each thread waits for its process
        packages = {package.name: package for package in pool.map(look, FRAMEWORKS)}
    return {
        "gradscale": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            package.name: {
                "version": package.version,
                "error": package.error,
                "remedy": package.remedy,
                "engine": has_engine(package.name),
                "use": use_of(package, packages),
            }
            for package in packages.values()
        },
        "path": path(packages)._asdict(),
        "cuda_devices": list(packages["torch"].devices),
        "missing": missing(),
    }
