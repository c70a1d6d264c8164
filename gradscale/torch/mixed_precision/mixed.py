"""One object for the whole of mixed precision: formats, masters, scale, steps and retries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.policy import Policy
from gradscale.torch.mixed_precision import state
from gradscale.torch.mixed_precision.accumulation import Accumulation
from gradscale.torch.mixed_precision.casting import Keep, device_of
from gradscale.torch.mixed_precision.conversion import convert, has_gradients, masters_of
from gradscale.torch.mixed_precision.modes import mode_named, policy_for
from gradscale.torch.mixed_precision.pretrained import Embeddings
from gradscale.torch.mixed_precision.recomputation import Recomputation, as_retries
from gradscale.torch.scaler import GradScaler
from gradscale.torch.step.apply import check_limits
from gradscale.torch.step.checks import refuse_others
from gradscale.torch.step.contract import as_optimizers, check_closure
from gradscale.torch.step.snapshot import Snapshot
from gradscale.torch.telemetry.outcome import StepOutcome

_WORDS = (
    ("before scale()", "before mp.backward()"),
    (" or scaler.scale(loss).backward()", ""),
    ("apply()", "mp.step()"),
    ("scaler.", "mp."),
)
"""The scaler's calls in its messages, and ours."""


class MixedPrecision:
    """Trains models in a mode: casts them, keeps masters, scales losses, steps and retries.

        mp = MixedPrecision(model, AdamW(model.parameters(), lr=3e-4), "fp16")
        for batch in data:
            with mp.autocast():
                loss = loss_fn(model, batch)
            mp.backward(loss)
            outcome = mp.step(clip_norm=1.0)

    To compute a batch again if it overflows: `outcome = mp.run(lambda: loss_fn(model, batch))`.

    The modes, all of which skip steps whose gradients are not finite:

    | mode | passes | weights | masters |
    |---|---|---|---|
    | "fp32", "O0" | float32 | float32 | |
    | "bf16" | bfloat16, autocast | float32 | |
    | "fp16", "O1" | float16, autocast | float32 | |
    | "bf16-master" | bfloat16 | bfloat16 | float32 |
    | "fp16-master", "O2" | float16 | float16 | float32 |
    | "fp16-pure", "O3" | float16 | float16 | the 16 bits lost in rounding |

    Args:
        model: The model, or several, on the device for training. Wrap it in DDP afterwards if the
            mode casts weights. It is changed in place.
        optimizer: The optimizer, or several. gradscale.torch.optim takes fewer passes over memory.
        mode: One of the above.
        policy: A policy or its name, such as "dynamic". Default: `Headroom()` in float16,
            otherwise a scale of 1.
        keep_float32: Modules that stay in float32, in addition to norms: names with wildcards,
            modules, classes.
        retries: How often `run()` recomputes a batch that overflows; a lone spike then does not
            move the scale. At most one batch in 17, and four more, are recomputed.
        **settings: Keyword-only arguments of `GradScaler`, such as `on_stuck`.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer],
        mode: str = "fp16",
        *,
        policy: Policy | str | None = None,
        keep_float32: Iterable[Keep] = (),
        retries: int | None = None,
        **settings: Any,
    ) -> None:
        self.mode = mode_named(mode)
        several = isinstance(model, Iterable) and not isinstance(model, nn.Module)
        self.models: list[nn.Module] = list(model) if several else [model]  # type: ignore[arg-type,list-item]
        self.optimizers = as_optimizers(optimizer, "MixedPrecision")
        if not self.models or not all(isinstance(each, nn.Module) for each in self.models):
            odd = [type(each).__name__ for each in self.models if not isinstance(each, nn.Module)]
            raise SettingError(
                "MixedPrecision takes one or more models, each a torch.nn.Module, got "
                f"{'none' if not odd else odd[0]}."
            )
        policy = policy_for(self.mode, policy)
        self._device = device_of(self.models[0]).type
        self._dtype = None if self.mode.passes == "float32" else self.mode.dtype
        self.scaler = GradScaler(self._device, policy=policy, format=self.mode.passes, **settings)
        self._recomputation = Recomputation(self.scaler, retries)
        self._embeddings = Embeddings(self.models)
        self._embeddings.refuse_stale(self.optimizers)
        self._masters = convert(self.models, self.optimizers, self.mode, list(keep_float32))
        self._accumulation: Accumulation | None = None
        self._followed: list[tuple[Any, dict[str, Any]]] = []
        """What `follow()` was given that can be saved, and with which settings."""
        self._attach()

    def _attach(self) -> None:
        """Makes models, optimizers and masters known to the scaler."""
        for optimizer, masters in zip(self.optimizers, self._masters, strict=True):
            # Gradients may be left for it before its first step.
            self.scaler._pipeline.entries.watch(optimizer, masters)
        for model in self.models:
            self.scaler.name(model)

    # Passes.

    def autocast(self) -> torch.autocast:
        """Returns a context in which operations run in the format of the mode."""
        return torch.autocast(self._device, dtype=self._dtype, enabled=self._dtype is not None)

    def backward(self, loss: Any, **settings: Any) -> None:
        """Scales `loss`, a tensor or several, and runs its backward pass; gradients accumulate.

        Within `accumulate()` the loss is divided by the number of passes. `settings` are those of
        `GradScaler.backward`.
        """
        accumulation = self._accumulation
        if accumulation is not None:
            loss = accumulation.part(loss)
            settings = {"droppable": accumulation.drop == "micro", **settings}
        with _in_our_words():
            self.scaler.backward(loss, **settings)

    @contextmanager
    def accumulate(self, passes: int, *, drop: str = "window") -> Iterator[None]:
        """Makes `passes` backward passes one step, whose gradients are their mean.

            with mp.accumulate(4):
                for micro in batch:
                    mp.backward(loss_fn(model, micro))
            outcome = mp.step()

        Args:
            passes: Number of passes; losses are divided by it.
            drop: What is skipped if the gradients of a pass are not finite: the "window", which is
                the whole step, or the "micro" batch only. In the second case the others are scaled
                up, `outcome.dropped` is the number of passes left out, and every pass takes a copy
                of the gradients.
        """
        accumulation = Accumulation(passes, drop)
        if self._accumulation is not None:
            raise CallOrderError("accumulate() was called inside accumulate(). Remove one of them.")
        self._refuse_other_threads()
        self._accumulation = accumulation
        try:
            yield
            accumulation.check_complete()
        except BaseException:
            self.zero_grad()
            raise
        finally:
            self._accumulation = None

    def grad(self, outputs: Any, inputs: Any, **settings: Any) -> tuple[Tensor | None, ...]:
        """Returns the unscaled result of `torch.autograd.grad` for scaled `outputs`."""
        return self.scaler.grad(outputs, inputs, **settings)

    def zero_grad(self) -> None:
        """Clears all gradients, and discards the losses that produced them."""
        self._refuse_other_threads()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler.abandon()

    def _refuse_other_threads(self) -> None:
        """Raises if another thread is in the middle of an iteration, whose gradients these are."""
        with _in_our_words():
            refuse_others(self.scaler._pipeline.passes)

    # Steps.

    def step(
        self,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> StepOutcome:
        """Unscales, checks, clips, steps or skips, and clears the gradients; returns the outcome.

        If an optimizer raises, the gradients are kept and `step()` can be called again.

        Args:
            optimizer: Which of several optimizers to step. Default: all, as one step.
            clip_norm: Largest 2-norm of all gradients together.
            clip_value: Largest magnitude of an element; applied before `clip_norm`.
            closure: For optimizers such as LBFGS: computes the loss, calls `mp.backward(loss)` and
                returns the loss.
        """
        if self._accumulation is not None:
            raise CallOrderError("step() was called inside accumulate(). Call it after the block.")
        if self._embeddings.shapes:
            self._embeddings.refuse_replaced(self.optimizers)
        chosen: Any = self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
        if optimizer is not None:
            chosen = as_optimizers(optimizer, "step()")
            for each in chosen:
                if all(each is not own for own in self.optimizers):
                    raise SettingError(
                        "step() takes the optimizers that were passed to MixedPrecision, got "
                        f"another {type(each).__name__}."
                    )
        with _in_our_words():
            return self.scaler.apply(
                chosen, clip_norm=clip_norm, clip_value=clip_value, closure=closure
            )

    def run(
        self,
        closure: Callable[[], Any],
        *,
        retries: int | None = None,
        accumulate: int = 1,
        drop: str = "window",
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> StepOutcome:
        """Runs the whole step, and again at a lower scale if it overflows; returns the outcome.

            outcome = mp.run(lambda: loss_fn(model, batch), clip_norm=1.0)

        The random state of torch and Python and the buffers of the models are restored before each
        retry, so dropout repeats and batch norms count once. A loss that is not finite is not
        retried. `outcome.loss` is the value `closure` returned, `outcome.earlier` the outcomes of
        the earlier attempts; `mp.retries` counts retries, and `mp.recomputed` is the share of
        batches that needed one.

        **Waits for the device** once per attempt.

        Args:
            closure: Computes the loss and returns it; for several micro-batches, an iterable of
                losses, best a generator, all of which are recomputed in a retry. It runs under
                `autocast()`. Take the batch from the data outside of it.
            retries: Largest number of retries. None: that of the constructor, within the share that
                it allows; without one, two.
            accumulate: Number of losses, if there are several: see `accumulate()`.
            drop: See `accumulate()`.
            clip_norm: See `step()`.
            clip_value: See `step()`.
        """
        if retries is not None:
            as_retries(retries)
        check_limits(clip_norm, clip_value)
        check_closure(closure)
        self._refuse_other_threads()
        if has_gradients(self.optimizers):
            raise CallOrderError(
                "run() was called while the parameters have gradients, which a retry would lose. "
                "Call step() or zero_grad() first, or return all losses of the step from the "
                "closure."
            )
        snapshot = Snapshot(self.models)

        def attempt() -> StepOutcome:
            try:
                made = self._compute(closure, accumulate, drop)
            except BaseException:
                self.zero_grad()
                snapshot.restore()
                raise
            return self.step(clip_norm=clip_norm, clip_value=clip_value).with_(loss=made)

        return self._recomputation.run(attempt, snapshot.restore, retries)

    @property
    def retries(self) -> int:
        """The number of times that `run()` has recomputed a step."""
        return self._recomputation.tries

    @property
    def recomputed(self) -> float:
        """The share of the batches of `run()` that were recomputed."""
        return self._recomputation.recomputed / max(self._recomputation.batches, 1)

    def _compute(self, closure: Callable[[], Any], passes: int, drop: str) -> Any:
        """What `closure` returned, after the backward passes of its losses."""
        with self.accumulate(passes, drop=drop):
            with self.autocast():
                made = closure()
            if not isinstance(made, Iterable):  # a tensor is one, too
                what = type(made).__name__
                raise SettingError(
                    f"closure must return the loss, got {what}. Check that it has a return "
                    "statement."
                )
            if isinstance(made, Tensor):
                self.backward(made)
                return made.detach()
            losses: list[Tensor] = []
            remaining = iter(made)
            while True:
                with self.autocast():
                    loss = next(remaining, None)
                if loss is None:
                    return losses
                self.backward(loss)
                losses.append(loss.detach())

    # The scaler's other calls.

    def follow(self, *things: Any, **settings: Any) -> None:
        """Steps schedulers, averages or counters after applied steps only: `GradScaler.follow`.

        Objects that have a state are saved in `state_dict()` and followed by copies of this object.
        """
        self.scaler.follow(*things, **settings)
        self._followed += [(one, settings) for one in things if hasattr(one, "load_state_dict")]

    def calibrate(self, closure: Callable[[], Tensor]) -> float:
        """Finds a scale for the gradients of `closure`, sets it and returns it.

        `closure` runs under `autocast()`; see `GradScaler.calibrate`.
        """
        check_closure(closure)

        def cast() -> Tensor:
            with self.autocast():
                return closure()

        return self.scaler.calibrate(cast, self.optimizers, nn.ModuleList(self.models))

    def name(self, model: nn.Module) -> None:
        """Registers the process groups of a model that was wrapped in DDP afterwards."""
        self.scaler.name(model)

    def log_to(self, path: Any, **settings: Any) -> None:
        """Writes what every step does to a folder: `GradScaler.log_to`."""
        further = {"mode": self.mode.name, **(settings.pop("settings", None) or {})}
        self.scaler.log_to(path, settings=further, **settings)

    def flush(self) -> None:
        """Delivers all events and makes all pending calls; **waits for the device**."""
        self.scaler.flush()

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run: weights, masters, averages, scale, schedulers.

        Objects passed to `follow()` are included if they have a state; functions are not, nor are
        random state and the position in the data: see gradscale.torch.checkpoint. **Waits for the
        device.**
        """
        return state.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict()` returned.

        Raises:
            StateError: It is of another mode or of other models; nothing was loaded.
        """
        state.check(self, state_dict)
        self._refuse_other_threads()
        state.load(self, state_dict)

    def float32_model_state(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Returns the `state_dict()` of a model in float32, with the values of masters, for export.

        Args:
            model: Which of several models. Default: the only one.
        """
        if model is None and len(self.models) > 1:
            raise SettingError(
                f"MixedPrecision has {len(self.models)} models. Pass model= to choose one of them."
            )
        if model is not None and all(model is not each for each in self.models):
            raise SettingError("model must be one of those that were passed to MixedPrecision.")
        chosen = self.models[0] if model is None else model
        return state.float32_state(chosen, self.optimizers, self._masters)

    @contextmanager
    def float32_weights(self) -> Iterator[None]:
        """Returns a context in which the weights of the models are float32: the masters, if any.

            with mp.float32_weights():
                model.save_pretrained("trained")

        For libraries that read the format from the model when they save it. These are other
        parameters: changes to them are lost, and the model cannot be trained in this context.
        """
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(state.in_float32(model, self.optimizers, self._masters))
            yield

    def __getstate__(self) -> dict[str, Any]:
        masters = [None if own is None else own.store.pairs() for own in self._masters]
        return {**vars(self), "_masters": masters}

    def __setstate__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)
        self._masters = [masters_of(optimizer, self.mode) for optimizer in self.optimizers]
        for own, pairs in zip(self._masters, values["_masters"], strict=True):
            if own is not None:
                own.store.set_pairs(pairs)
        self._attach()
        for each, settings in self._followed:
            self.scaler.follow(each, **settings)

    def __repr__(self) -> str:
        # The scaler's, which has the scale, the policy and the last outcome and waits for nothing.
        inner = repr(self.scaler).partition("(")[2]
        return f"{type(self).__name__}(mode={self.mode.name!r}, {inner}"


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Names the calls of `MixedPrecision`, and not the scaler's, in errors of call order."""
    try:
        yield
    except CallOrderError as error:
        text = str(error)
        for theirs, ours in _WORDS:
            text = text.replace(theirs, ours)
        if text == str(error):
            raise
        raise type(error)(text) from None
