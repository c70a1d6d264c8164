"""The wheel and the sdist: built as for a release, and installed where nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import gradscale

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]


def run(*command: Any, **kwargs: Any) -> Any:
    """The finished process; its output is text."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **kwargs)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def clean(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that contains the wheel and pip alone."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    done = run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr
    return python


def there(python: Path, *arguments: str) -> Any:
    """What a Python of the clean environment does, outside of the checkout."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return run(python, *arguments, cwd=python.parent, env=env)


def test_wheel_has_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    listed = run("git", "ls-files", "gradscale", cwd=ROOT)
    files = listed.stdout.split() if listed.returncode == 0 else []
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("gradscale/")}
    assert names == set(files)
    assert "gradscale/py.typed" in names


def test_sdist_has_what_the_tests_and_the_documentation_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"tests/test_package.py", "docs/start.md", "mkdocs.yml", "Makefile"} <= names


def test_installed_package_works_without_a_framework(clean: Path) -> None:
    code = """
import sys
import gradscale as gs
state = gs.Dynamic().update(gs.Dynamic().init(), gs.GradStats(finite=False))
assert state.scale == 2.0**15
assert not {"torch", "jax", "keras", "numpy"} & set(sys.modules)
print(gs.__version__)
"""
    done = there(clean, "-W", "error", "-c", code)
    assert (done.stdout.strip(), done.returncode) == (gradscale.__version__, 0), done.stderr


@pytest.mark.parametrize("engine", ["torch", "jax", "keras"])
def test_engine_without_its_framework_names_the_extra(clean: Path, engine: str) -> None:
    done = there(clean, "-c", f"import gradscale.{engine}")
    assert f'pip install "gradscale[{engine}]"' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [["-m", "gradscale"], ["../bin/gradscale"]])
def test_command_without_its_packages_names_the_extra(clean: Path, command: list[str]) -> None:
    done = there(clean, *command)
    assert (done.returncode, done.stderr) == (
        1,
        'The command line needs typer: pip install "gradscale[cli]".\n',
    )
