"""Plants faults in our own code, one at a time, and shows that a test notices each: `make mutants`.

The faults are in mutants.toml: a text that stands exactly once in a file, and what to put in its
place. Each is planted in a copy of the tree, so nothing here is touched. What fails: a fault that
no test notices, one whose text is gone, and a test that fails without any fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    """One planted fault and the test file that must notice it."""

    file: str
    """In gradscale/."""
    what: str
    old: str
    new: str
    test: str


def faults() -> list[Fault]:
    """All of mutants.toml."""
    tables = tomllib.loads((ROOT / "tests/mutants.toml").read_text(encoding="utf-8"))
    return [Fault(file, **entry) for file, entries in tables.items() for entry in entries]


def planted(fault: Fault, tree: Path) -> str:
    """The text of the file with the fault in it. Raises ValueError if it cannot be planted."""
    path = tree / "gradscale" / fault.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(fault.old) != 1:
        raise ValueError(f"its text stands {text.count(fault.old)} times in {fault.file}, not once")
    return text.replace(fault.old, fault.new)


def passes(test: str, tree: Path) -> tuple[bool, str]:
    """Whether the tests in `test` pass in `tree`, and what they printed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--hypothesis-profile=mutants", test],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode > 1:  # below 0, the fault has crashed it
        raise RuntimeError(f"pytest {test} ended with {run.returncode}: {run.stdout}{run.stderr}")
    return run.returncode == 0, run.stdout[-2000:]


def wrong_with(fault: Fault, tree: Path) -> str | None:
    """None if a test fails because of `fault`, else what is wrong."""
    try:
        text = planted(fault, tree)
    except ValueError as error:
        return str(error)
    path = tree / "gradscale" / fault.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        unnoticed, _ = passes(fault.test, tree)
    finally:
        path.write_text(sound, encoding="utf-8")
    return f"{fault.test} passes all the same" if unnoticed else None


def main() -> int:
    """How many faults went unnoticed."""
    missed, known = 0, faults()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("gradscale", "tests", "docs", "pyproject.toml"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, tree / name)
        for test in sorted({fault.test for fault in known}):
            sound, printed = passes(test, tree)
            if not sound:
                missed += 1
                print(f"{test} fails without any fault:\n{printed}")
        for fault in known:
            wrong = wrong_with(fault, tree)
            missed += wrong is not None
            print(f"{'noticed' if wrong is None else 'MISSED '}  {fault.what}", flush=True)
            if wrong is not None:
                print(f"         {wrong}")
    print(f"{max(len(known) - missed, 0)} passed, {missed} failed")
    return missed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
