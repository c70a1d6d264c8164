"""Handles: what `amp.init` returns, the API before `amp.initialize`, and `_amp_state.handle`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from gradscale.compat.apex.amp_optimizer import amp_optimizer, scaled_pass
from gradscale.compat.apex.cast_mode import CastMode
from gradscale.compat.apex.functions import REGISTRY
from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.compat.apex.session import SESSION, disable_casts
from gradscale.errors import CallOrderError, SettingError

__all__ = ["AmpHandle", "NoOpHandle", "OptimWrapper"]


class OptimWrapper:
    """An optimizer with `scale_loss`, for several losses that have a scale each.

    Everything else is the optimizer's.

    Args:
        optimizer: Whose steps are skipped after an overflow.
        amp_handle: Nothing is scaled while it is not active.
        num_loss: How many losses there are between two steps.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int = 1) -> None:
        if num_loss < 1:
            raise SettingError(f"num_loss must be > 0, got {num_loss!r}.")
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]
        self._loss_idx = 0

    @contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Gives the scaled loss; the first one since a step has the first scale, and so on."""
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= len(self._loss_scaler):
            raise CallOrderError(
                f"scale_loss() was called {self._loss_idx + 1} times since the last step(), but "
                f"num_loss is {len(self._loss_scaler)}. Pass a larger num_loss to wrap_optimizer()."
            )
        scaler = self._loss_scaler[self._loss_idx]
        with scaled_pass([amp_optimizer(self._optimizer)], scaler, loss) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Steps, unless a gradient was not finite."""
        self._loss_idx = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if "_optimizer" not in vars(self):  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)


class AmpHandle:
    """Whether functions cast their arguments, and the scale of one loss.

    Args:
        loss_scale: "dynamic", or the scale.
        enable_caching: Not used: casts of weights are not kept.
        verbose: Not used: nothing is printed.
    """

    has_cache = False

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        self.verbose = verbose
        self._default_scaler: LossScaler | None = LossScaler(loss_scale)
        self._is_active = True
        self._casts: CastMode | None = None

    def activate(self, casts: CastMode | None = None) -> None:
        """Has registered and decorated functions cast from here on, and torch's by `casts`."""
        SESSION.drop_handle()
        SESSION.handle = self
        REGISTRY.apply()
        self._casts = casts
        if casts is not None:
            casts.begin()

    def _deactivate(self) -> None:
        """Has all functions do what they did before."""
        self._is_active = False
        REGISTRY.restore()
        if self._casts is not None:
            self._casts.end()
            self._casts = None

    def is_active(self) -> bool:
        """Whether functions cast now."""
        return self._is_active and not SESSION.suspended

    def _disable_casts(self) -> AbstractContextManager[None]:
        """As `amp.disable_casts()`."""
        return disable_casts()

    def _clear_cache(self) -> None:
        """Does nothing: there is none."""

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """`optimizer` with `scale_loss`, for `num_loss` losses."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Gives the scaled loss; afterwards the gradients of its backward pass are unscaled.

        If a gradient is not finite, the next `step()` of `optimizer` does nothing.
        """
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise CallOrderError(
                "scale_loss() of a handle was called after its wrap_optimizer(). Call "
                "scale_loss(loss) of the optimizer that wrap_optimizer() returned."
            )
        with scaled_pass([amp_optimizer(optimizer)], self._default_scaler, loss) as scaled:
            yield scaled


class NoOpHandle:
    """The handle of `amp.init(enabled=False)`: nothing is cast or scaled."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """False."""
        return False

    def _deactivate(self) -> None:
        """Does nothing."""

    def _clear_cache(self) -> None:
        """Does nothing."""

    def _disable_casts(self) -> AbstractContextManager[None]:
        """As `amp.disable_casts()`."""
        return disable_casts()

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        """`optimizer` with a `scale_loss` that does nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Gives the loss."""
        yield loss
