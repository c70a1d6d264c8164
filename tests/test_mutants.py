"""The faults of `make mutants` can be planted: their texts have not gone with a change of the code.

Whether tests notice them takes a run of the tests for each, which is what `make mutants` is for.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).with_name("mutants.py")


def load() -> ModuleType:
    """The script; the name of its folder is no package."""
    spec = importlib.util.spec_from_file_location("planted_faults", FILE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["planted_faults"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutants = load()
FAULTS = mutants.faults()


def test_every_fault_can_be_planted() -> None:
    stale = {}
    for fault in FAULTS:
        try:
            mutants.planted(fault, mutants.ROOT)
        except ValueError as error:
            stale[fault.what] = str(error)
    assert not stale, "edit tests/mutants.toml"


def test_every_fault_changes_code_that_still_compiles() -> None:
    for fault in FAULTS:
        assert fault.new != fault.old, fault.what
        compile(mutants.planted(fault, mutants.ROOT), fault.file, "exec", dont_inherit=True)


def test_every_fault_has_a_name_of_its_own_and_a_test_that_exists() -> None:
    names = [fault.what for fault in FAULTS]
    assert len(set(names)) == len(names) > 0
    missing = {fault.test for fault in FAULTS if not (mutants.ROOT / fault.test).is_file()}
    assert not missing


def test_a_text_that_is_gone_or_repeated_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "gradscale").mkdir()
    path = tmp_path / "gradscale/one.py"
    fault = mutants.Fault("one.py", "a fault", "x = 1\n", "x = 2\n", "tests/test_mutants.py")
    for text, count in (("x = 1\nx = 1\n", 2), ("y = 1\n", 0)):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"stands {count} times in one.py, not once"):
            mutants.planted(fault, tmp_path)
    path.write_text("x = 1\n")
    assert mutants.planted(fault, tmp_path) == "x = 2\n"
    with pytest.raises(ValueError, match="stands 0 times"):
        mutants.planted(fault._replace(file="gone.py"), tmp_path)
