"""MXNet's AMP for Gluon trainers, with the scale moved by a policy of gradscale.

    from gradscale.compat import mxnet as amp  # was: from mxnet.contrib import amp

    amp.init()
    amp.init_trainer(trainer, policy="headroom")
    for data, label in batches:
        with autograd.record():
            loss = loss_fn(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(batch_size)

`Trainer.step` and `Trainer.update` call `has_overflow` of the trainer's `_amp_loss_scaler` and skip
the step if it returns True. `init_trainer` puts a `LossScaler` of this module there; nothing of
MXNet is replaced.
docs/move/mxnet.md has what differs. MXNet 1.x.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

try:
    from mxnet import autograd, gluon, nd
    from mxnet.contrib.amp import amp as _theirs
except ImportError as error:
    raise ImportError(
        'gradscale.compat.mxnet needs MXNet 1.x: pip install "gradscale[mxnet]".', name="mxnet"
    ) from error
except AttributeError as error:  # np.bool
    raise ImportError(
        "MXNet 1.x uses names that numpy 1.24 removed, so it cannot be imported with the "
        'installed numpy: pip install "gradscale[mxnet]", which requires numpy < 1.24.',
        name="mxnet",
    ) from error

from mxnet.contrib.amp import (
    convert_hybrid_block,
    convert_model,
    convert_symbol,
    init,
    list_conditional_fp32_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
)

from gradscale.checkpoints.numbers import Counts, restored, written
from gradscale.errors import CallOrderError, SettingError
from gradscale.formats import FLOAT32
from gradscale.policy import Dynamic, GradStats, Policy, as_policy, scalars
from gradscale.policy.losses import with_patience

__all__ = [
    "MXNET_POLICY",
    "LossScaler",
    "Outcome",
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
    "init",
    "init_trainer",
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
    "scale_loss",
    "unscale",
]

MXNET_POLICY = Dynamic(init_scale=2.0**16, growth_interval=2000, max_scale=2.0**24)
"""The settings of MXNet's own scaler."""

_CHUNK = 200
"""Arrays in one call of `multi_all_finite`, as MXNet calls it."""
_CHECKED = ("float16", "float32", "float64")
"""The types that `multi_all_finite` has kernels for; bfloat16 is none of them (MXNet 1.9.1)."""


class Outcome(NamedTuple):
    """The result of one step of a trainer: plain values."""

    applied: bool
    """The parameters were updated; if not, the step was skipped."""
    finite: bool
    """Every scaled gradient element was finite; if not, the scale was too high."""
    fits: bool
    """Every unscaled element was finite; if not, the scale was too low."""
    loss_finite: bool
    """The losses were finite."""
    scale: float
    """The scale that the gradients were made with."""
    amax: float | None
    """The largest magnitude among the scaled gradients; None if the policy does not need it."""
    skipped_in_a_row: int
    """How many steps in a row have been skipped, this one included."""


class _Measured(NamedTuple):
    """What was found in the gradients of a trainer."""

    finite: bool
    fits: bool
    amax: float | None


class LossScaler:
    """The scale of one trainer; `init_trainer` returns it.

    `Trainer.step` and `Trainer.update` call `has_overflow`. An iteration lasts from one of them to
    the next, and has one scale.
    """

    def __init__(self, policy: Policy | str = MXNET_POLICY) -> None:
        self.policy: Any = as_policy(policy)
        """The rule that moves the scale."""
        self.state: Any = self.policy.init()
        """The state of the policy, in plain numbers."""
        self.outcome: Outcome | None = None
        """The result of the last step; None before the first."""
        self._counts = Counts()
        self._stage: Literal["ready", "scaled", "unscaled"] = "ready"
        self._loss_flags: list[Any] = []
        self._before_unscaling: _Measured | None = None
        self._output_functions: Any = None

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return float(self.state.scale)

    def has_overflow(self, params: Sequence[Any]) -> bool:
        """Whether the trainer must skip this step; moves the scale. **Waits for the device**.

        Args:
            params: The parameters of the trainer.
        """
        if self._stage == "ready":
            raise CallOrderError(
                "Trainer.step() or update() was called without scale_loss() since the last step, "
                "so the scale of the gradients is unknown. Run the backward pass inside "
                "`with scale_loss(loss, trainer) as scaled_loss:` before every step."
            )
        fresh = _fresh(params)
        if not fresh:
            # Nothing was measured, so nothing moves. The trainer raises, or has nothing to update.
            self._begin()
            return False
        scale, before = self.loss_scale, self._before_unscaling
        found = self._measured([grad for _, grad in fresh], 1.0 if before else scale)
        if before is not None:
            # The sum over devices and what was done to the gradients since can add infinities.
            found = before._replace(
                finite=before.finite and found.finite, fits=before.fits and found.fits
            )
        loss_finite = _all(self._loss_flags)
        stats = GradStats(
            finite=found.finite,
            amax=found.amax,
            loss_finite=loss_finite,
            fits=found.fits,
            exponent=math.frexp(found.amax or 0.0)[1] if found.finite else 0,
        )
        seen, bad_losses = with_patience(stats, self._counts.bad_losses, scalars)
        self._set(self.policy.update(self.state, seen))
        applied = found.finite and found.fits and loss_finite
        skipped = 0 if applied else self._counts.skipped_in_a_row + 1
        self._counts = Counts(skipped, self._counts.steps + 1, bad_losses)
        self.outcome = Outcome(applied, *found[:2], loss_finite, scale, found.amax, skipped)
        if not applied:
            # Else an infinity would be found again in each later step that does not use the
            # parameter (`ignore_stale_grad=True`).
            for data, _ in fresh:
                data._fresh_grad = False
        self._begin()
        return not applied

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint: numbers, strings and dicts, which every engine of gradscale reads."""
        return written(self.policy, self.state._asdict(), self._counts)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Sets the state to that of a checkpoint of any engine, or of a peer that gradscale reads.

        Settings stay those of `policy`. Of a checkpoint of another policy only the scale is used.

        Raises:
            StateError: The checkpoint cannot be read; nothing was loaded.
        """
        state, self._counts = restored(self.policy, saved)
        self._set(state)

    def _set(self, state: Any) -> None:
        """Sets the policy's state, and the scale of MXNet's output functions where it is ours."""
        self.state = state
        if self._output_functions is not None:
            self._output_functions._loss_scale = self.loss_scale

    def _begin(self) -> None:
        """Begins the next iteration."""
        self._stage, self._loss_flags, self._before_unscaling = "ready", [], None

    def _scaled(self, losses: Sequence[Any], trainer: Any) -> list[Any]:
        """The losses times the scale, in float32 where they are narrower."""
        if self._stage == "unscaled":
            if any(param.grad_req == "add" for param in trainer._params):
                raise CallOrderError(
                    'scale_loss() was called after unscale(), and with grad_req="add" its scaled '
                    "gradients would be added to unscaled ones. Call unscale() once per step, "
                    "after the last backward pass."
                )
            self._begin()
        _check_kvstore(trainer, self.policy)
        if not trainer._distributed:
            # One worker's NaN is in every worker's gradients, and their scales must stay the same.
            with autograd.pause():
                for loss in losses:
                    self._loss_flags += _finite_flags([loss])
        trainer._scale = trainer._amp_original_scale / self.loss_scale
        self._stage = "scaled"
        return [_widened(loss) * self.loss_scale for loss in losses]

    def _unscale(self, trainer: Any) -> None:
        """Multiplies the gradients by what the trainer would multiply them by."""
        if self._stage != "scaled":
            state = "no loss was scaled" if self._stage == "ready" else "it was already called"
            raise CallOrderError(
                f"unscale() was called, but {state} since the last step. Call it once per step, "
                "after the backward pass and before Trainer.step() or update()."
            )
        grads = [grad for _, grad in _fresh(trainer._params)]
        self._before_unscaling = self._measured(grads, self.loss_scale)
        for grad in grads:
            grad[:] = grad * trainer._scale
        trainer._scale = 1.0
        self._stage = "unscaled"

    def _measured(self, grads: Sequence[Any], scale: float) -> _Measured:
        """What is in gradients of which `scale` has to be taken out."""
        finite = _all(_finite_flags(grads))
        # Only division by a number below 1 makes a gradient larger.
        fits = not finite or scale >= 1 or _all(_finite_flags([grad / scale for grad in grads]))
        amax = None
        if self.policy.goes_by and self._before_unscaling is None:
            amax = _amax(grads) if finite else math.inf
        return _Measured(finite, fits, amax)


def init_trainer(trainer: Any, policy: Policy | str = MXNET_POLICY) -> LossScaler:
    """Gives a Gluon `Trainer` a scale of its own that `policy` moves, and returns its scaler.

    A second call begins anew. The trainer may have MXNet's own scaler, which is replaced.

    Args:
        trainer: A `mxnet.gluon.Trainer` with `update_on_kvstore=False` if it has several devices:
            otherwise it updates parameters before gradients can be checked.
        policy: The rule that moves the scale, or its name; MXNet's settings unless given.
    """
    _check_trainer(trainer, "init_trainer()")
    scaler = LossScaler(policy)
    present = getattr(trainer, "_amp_loss_scaler", None)
    if present is None:
        trainer._amp_original_scale = trainer._scale
    if isinstance(present, LossScaler):
        scaler._output_functions = present._output_functions
    elif _theirs._amp_initialized and (
        present is _theirs._loss_scaler or not _theirs._amp_loss_scale_initialized
    ):
        # SoftmaxOutput and others scale their own gradients, by the scaler that MXNet gives to the
        # first trainer.
        _theirs._amp_loss_scale_initialized = True
        scaler._output_functions = _theirs._loss_scaler
    scaler._set(scaler.state)
    trainer._amp_loss_scaler = scaler
    return scaler


@contextlib.contextmanager
def scale_loss(loss: Any, trainer: Any) -> Iterator[Any]:
    """Gives the loss, or the list of losses, times the trainer's scale.

        with scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)

    Args:
        loss: An array, or a list of them such as one for each device; best float32, because in
            float16 the backward pass begins with the scale, and 2**16 is infinite.
        trainer: A trainer for which `init_trainer` was called.
    """
    scaler = _scaler_of(trainer, "scale_loss()")
    if not autograd.is_recording():
        raise CallOrderError(
            "scale_loss() was called outside of autograd.record(), so the multiplication by the "
            "scale would not be differentiated. Call it inside the autograd.record() block in "
            "which the loss is computed."
        )
    if isinstance(loss, list | tuple):
        yield scaler._scaled(loss, trainer)
    else:
        yield scaler._scaled([loss], trainer)[0]


def unscale(trainer: Any) -> None:
    """Takes the scale out of the trainer's gradients, so that they can be clipped or read.

    `Trainer.step` and `Trainer.update` then divide by the batch size alone. **Waits for the
    device.**
    """
    _scaler_of(trainer, "unscale()")._unscale(trainer)


def _check_trainer(trainer: Any, call: str) -> None:
    """Raises a TypeError if `trainer` is not a Gluon trainer."""
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(f"{call} needs a mxnet.gluon.Trainer, got {type(trainer).__name__}.")


def _scaler_of(trainer: Any, call: str) -> LossScaler:
    """The scaler that `init_trainer` gave to `trainer`."""
    _check_trainer(trainer, call)
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(scaler, LossScaler):
        return scaler
    cause = "has no scaler" if scaler is None else "has MXNet's own scaler"
    raise CallOrderError(
        f"{call} was called with a trainer that {cause}. Call gradscale.compat.mxnet.init_trainer"
        "(trainer) once, before the first iteration."
    )


def _check_kvstore(trainer: Any, policy: Any) -> None:
    """Raises a SettingError if the trainer's kvstore leaves no room for a check of gradients."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()  # as step() would; only then is it known who updates
    if trainer._update_on_kvstore:
        raise SettingError(
            "The trainer updates its parameters on the kvstore before the gradients can be "
            "checked, so steps could not be skipped. Create it with update_on_kvstore=False."
        )
    if trainer._distributed and policy.goes_by:
        raise SettingError(
            f"policy must depend only on overflows if the kvstore is distributed, got {policy!r}, "
            "because workers may measure gradients before they are summed. Use Dynamic or Static."
        )


def _fresh(params: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Data and gradient, on every device, where a backward pass has run since the last step."""
    found = []
    for param in params:
        if param.grad_req != "null" and param._data is not None:
            pairs = zip(param.list_data(), param.list_grad(), strict=True)
            found += [(data, grad) for data, grad in pairs if data._fresh_grad]
    return found


def _widened(array: Any) -> Any:
    """`array` in float32 if it is narrower: products with the scale overflow in float16."""
    return array if _type_name(array) in ("float32", "float64") else array.astype("float32")


def _type_name(array: Any) -> str:
    """The name of the array's type; MXNet's bfloat16 is a structure with a field of that name."""
    dtype = array.dtype
    names = getattr(dtype, "names", None)
    return str(names[0]) if names else str(getattr(dtype, "__name__", dtype))


def _values(array: Any) -> Any:
    """The stored elements of an array, which of a sparse one are some of its rows."""
    return array.data if getattr(array, "stype", "default") == "row_sparse" else array


def _finite_flags(arrays: Sequence[Any]) -> list[Any]:
    """One array per device with a 1 if all elements of all `arrays` there are finite, else 0."""
    by_device: dict[Any, list[Any]] = {}
    for array in map(_values, arrays):
        if array.size:
            kept = array if _type_name(array) in _CHECKED else array.astype("float32")
            by_device.setdefault(array.context, []).append(_plain(kept))
    flags = []
    for device, there in by_device.items():
        flag = nd.ones((1,), ctx=device)
        for start in range(0, len(there), _CHUNK):
            some = there[start : start + _CHUNK]
            # Not initialized: it stays 0 once it is 0.
            nd.multi_all_finite(*some, num_arrays=len(some), init_output=False, out=flag)
        flags.append(flag)
    return flags


def _plain(array: Any) -> Any:
    """The array for functions of `mxnet.nd`, where it is one of `mxnet.np`."""
    return array.as_nd_ndarray() if hasattr(array, "as_nd_ndarray") else array


def _all(flags: Sequence[Any]) -> bool:
    """Whether all flags are 1."""
    return all(float(flag.asscalar()) for flag in flags)


def _amax(grads: Sequence[Any]) -> float:
    """The largest magnitude, as a float32 number; all elements are finite."""
    stored = (_plain(_widened(values)) for values in map(_values, grads) if values.size)
    each = [nd.max(nd.abs(values)) for values in stored]
    largest = max((float(amax.asscalar()) for amax in each), default=0.0)
    return min(largest, FLOAT32.max)
