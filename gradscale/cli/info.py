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


def is_installed(name: str) -> bool:
    """Whether there is a module `name`; does not import it."""
    return importlib.util.find_spec(name) is not None


def look(name: str) -> Package:
    """The framework `name`; imports it in another process."""
    if not is_installed(name):
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


def path(packages: Mapping[str, Package]) -> dict[str, str]:
    """The code that gradscale.torch runs on gradients ("triton", "reference", "none"), and why."""
    if packages["torch"].version is None:
        return {"name": "none", "why": "gradscale.torch needs torch"}
    if not packages["torch"].devices:
        return {"name": "reference", "why": "torch finds no CUDA device, which the kernels need"}
    if packages["triton"].version is None:
        return {"name": "reference", "why": "the kernels need Triton"}
    return {"name": "triton", "why": "kernels on CUDA, torch operations elsewhere"}


def use_of(package: Package, packages: Mapping[str, Package]) -> str:
    """What gradscale uses `package` for, or how to install or repair it, in words."""
    if package.version is None:
        return package.error or package.remedy or ""
    if package.name == "triton":
        chosen = path(packages)
        return f"{'used' if chosen['name'] == 'triton' else 'not used'}: {chosen['why']}"
    if is_installed(f"gradscale.{package.name}"):
        return f"engine gradscale.{package.name}"
    return "policies only: this version has no engine for it"


def gather() -> dict[str, Any]:
    """The whole report, fit for JSON."""
    with ThreadPoolExecutor() as pool:  # each thread waits for its process
        packages = {package.name: package for package in pool.map(look, FRAMEWORKS)}
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
                "use": use_of(package, packages),
            }
            for name, package in packages.items()
        },
        "path": path(packages),
        "cuda_devices": list(packages["torch"].devices),
        "missing": {
            extra: [name for name in names if not is_installed(name)]
            for extra, names in EXTRAS.items()
        },
    }
