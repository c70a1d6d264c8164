"""MXNet, imported here because it and numpy 1.23 warn of what numpy was going to remove."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# A script that test_amp_script.py runs: MXNet's init() changes the whole process.
collect_ignore = ["amp_script.py"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import mxnet  # noqa: F401
    except ImportError:
        collect_ignore.append("trainers.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Exempts from "warnings are errors" what MXNet does at every call."""
    ignored = pytest.mark.filterwarnings("ignore:`np.:DeprecationWarning:mxnet")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(ignored)
