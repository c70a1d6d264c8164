"""What the tests of the torch engine share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from gradscale.torch.grads import dispatch

try:
    import gradscale.torch.grads.triton  # noqa: F401
except ImportError as error:
    NO_KERNELS = str(error)

    @pytest.fixture(autouse=True)
    def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
        """Skips a test where it would launch a kernel."""

        def module(name: str) -> None:
            pytest.skip(NO_KERNELS)

        monkeypatch.setattr(dispatch, "module", module)


@contextmanager
def _no_sync() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the debug mode a prototype
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_sync() -> Callable[[], AbstractContextManager[None]]:
    """A context in which waiting for the CUDA device is an error."""
    return _no_sync
