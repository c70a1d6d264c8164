"""Importing the names of another library where a package is not installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest


def imported_without(monkeypatch: pytest.MonkeyPatch, module: str, missing: str) -> Any:
    """`module`, imported anew as if `missing` were not installed."""
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(module)


@pytest.mark.parametrize(
    ("name", "missing", "needed", "extra"),
    [
        ("jmp", "jax", "JAX", "jax"),
        ("flax", "jax", "JAX", "jax"),
        ("mpx", "jax", "JAX", "equinox"),
        ("mpx", "equinox", "JAX", "equinox"),
        ("mxnet", "mxnet", "MXNet", "mxnet"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(
    name: str, missing: str, needed: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = rf"gradscale\.compat\.{name} needs {needed}.*pip install \"gradscale\[{extra}\]\""
    with pytest.raises(ImportError, match=message) as caught:
        imported_without(monkeypatch, f"gradscale.compat.{name}", missing)
    assert caught.value.name == missing


def test_missing_keras_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"gradscale\.compat\.tf_keras needs Keras.*pip install \"gradscale\[keras\]\""
    with pytest.raises(ImportError, match=message) as caught:
        imported_without(monkeypatch, "gradscale.compat.tf_keras", "keras")
    assert caught.value.name == "keras"


def test_flax_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    found = imported_without(monkeypatch, "gradscale.compat.flax", "flax")
    assert float(found.DynamicScale().scale) == 65536.0
