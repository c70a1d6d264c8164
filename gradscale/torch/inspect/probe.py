"""The hooks of one sampled iteration: what they see is counted on the device at once.

Modules have hooks only while a probe is open, and tensors hooks that end with it, so an iteration
that is not sampled costs nothing. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.errors import SettingError
from gradscale.monitor.samples import ACTIVATION, ACTIVATION_GRAD, WEIGHT_GRAD
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.inspect.counts import MOST, Counts, flat, gradient, step_for
from gradscale.torch.inspect.trail import GRAD, INPUT, INPUT_GRAD, OUTPUT, Made, Trail
from gradscale.torch.mixed_precision.containers import mapped
from gradscale.torch.telemetry.names import bare

Key = tuple[str, str]
"""A kind of a `TensorSample`, and the name of a module or parameter."""
Keep = Callable[[str, str, Tensor], None]
"""Called with a kind, a name and the flat values of every tensor that is counted."""


class Subject:
    """A model: its modules and parameters by name.

    Args:
        model: The model, also inside of DDP, `torch.compile` and the like.

    Raises:
        SettingError: It is no module.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise SettingError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        inner = bare(model)
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        for name, module in inner.named_modules():
            self.modules.setdefault(plain(name), module)
        self.params = {plain(name): param for name, param in inner.named_parameters()}
        keys: list[Key] = [
            (kind, n) for n in self.modules for kind in (ACTIVATION, ACTIVATION_GRAD)
        ]
        keys += [(WEIGHT_GRAD, name) for name in self.params]
        self.rows = {key: row for row, key in enumerate(keys)}
        """The row of every kind and name in a table of `Counts`."""

    def owner(self, param: str) -> str:
        """The name of the module that has this parameter."""
        return param.rpartition(".")[0]


_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain(name: str) -> str:
    """`name` without the modules that only wrap others."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


class Probe:
    """The hooks of one sample, and what they have counted.

    Args:
        subject: What to look at.
        tables: Where to count, by device; made when they are missing.
        at_pass: Called when a backward pass begins, before it adds to a gradient.
        after_pass: Called after every backward pass, when gradients are complete.
        most: Elements of an activation that are counted at most.
        keep: Also given everything that is counted.
    """

    def __init__(
        self,
        subject: Subject,
        tables: dict[torch.device, Counts],
        at_pass: Callable[[], None] = lambda: None,
        after_pass: Callable[[], None] = lambda: None,
        most: int = MOST,
        keep: Keep | None = None,
    ) -> None:
        self.subject = subject
        self.tables = tables
        self.trail = Trail()
        self.calls: dict[str, int] = {}
        """How often every module was called."""
        self.formats: dict[str, torch.dtype] = {}
        """The format of the outputs of every module."""
        self.passes = 0
        """Backward passes that have ended."""
        self.with_grad: set[str] = set()
        """The parameters that had a gradient after one of them."""
        self._at_pass, self._after_pass = at_pass, after_pass
        self._most, self._keep = most, keep
        self.aside: Callable[[], bool] = lambda: False
        """Returns whether gradients of earlier passes are set aside for the present one."""
        self._task = -1
        self._made: dict[int, Made] = {}
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Adds the hooks."""
        for name, module in self.subject.modules.items():
            before, after = Hook(self.before, name), Hook(self.after, name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def close(self) -> None:
        """Removes every hook, also those of tensors whose graphs are still there."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._made = {}

    def before(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes what enters a module."""
        if _recomputes() or self._leaves_out():
            return
        self.calls[name] = self.calls.get(name, 0) + 1
        events: list[int] = []
        for tensor in _tensors((args, kwargs)):
            made = self._known(tensor)
            if made is not None:
                # The innermost of nested modules that take it comes last.
                made.consumers.append(name)
                events += [] if made.event is None else [made.event]
                continue
            value = flat(tensor)
            if value is None:
                continue
            event = self.trail.note(INPUT, name, value)
            events += [] if event is None else [event]
            if tensor.requires_grad:
                self._hook(tensor, partial(self.on_input_grad, name))
        self.trail.inputs[name] = tuple(events)

    def after(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        """Counts what a module returns."""
        if self._leaves_out():
            return
        again = _recomputes()
        for tensor in _tensors(output):
            made = self._known(tensor)
            if made is None:
                made = self._take(name, tensor, again)
            if made is not None and name == "" and made.event is not None:
                self.trail.outputs.append(made.event)

    def _leaves_out(self) -> bool:
        """Whether this call is none of the training: an evaluation, or a capture."""
        evaluates = not torch.is_grad_enabled() and not self.subject.modules[""].training
        return evaluates or capturing()

    def _take(self, name: str, tensor: Tensor, again: bool) -> Made | None:
        """Counts one output; None if it has no numbers. One that is recomputed is not counted."""
        value = flat(tensor)
        if value is None:
            return None
        event = None
        if not again:
            event = self.trail.note(OUTPUT, name, value, self.trail.inputs.get(name, ()))
            self._count(ACTIVATION, name, tensor, value)
            self.formats[name] = value.dtype
        made = self._made[id(tensor)] = Made(tensor, name, event)
        if tensor.requires_grad:
            self._hook(tensor, partial(self.on_grad, made))
        return made

    def on_grad(self, made: Made, grad: Tensor) -> None:
        """Counts the gradient of an output."""
        value = self._of_pass(grad)
        if value is not None:
            self.trail.note(GRAD, made.name, value, made=made)
            self._count(ACTIVATION_GRAD, made.name, grad, value)

    def on_input_grad(self, name: str, grad: Tensor) -> None:
        """Notes the gradient of an input that no module has returned."""
        value = self._of_pass(grad)
        if value is not None:
            self.trail.note(INPUT_GRAD, name, value)

    def _of_pass(self, grad: Tensor) -> Tensor | None:
        """The numbers of `grad`, after noticing that a backward pass has begun."""
        if capturing():
            return None
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._at_pass()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_soon)
        return flat(grad)

    def _end_soon(self) -> None:
        """Ends the pass after the callbacks of DDP and FSDP2, which copy gradients."""
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Counts the gradients of weights: sums of all passes so far, where these are added up."""
        if not self._handles or capturing():
            return  # it was closed in the middle of the pass
        self.passes += 1
        for name, param in self.subject.params.items():
            if param.grad is None:
                continue
            self.with_grad.add(name)
            value = gradient(param)
            if value is not None:
                row = self.subject.rows[WEIGHT_GRAD, name]
                if not self.aside():
                    self._table(value.device).clear_row(row)
                self._count(WEIGHT_GRAD, name, None, value)
        self._after_pass()

    def _count(self, kind: str, name: str, shaped: Tensor | None, value: Tensor) -> None:
        """Adds `value` to its row; weights, which are not `shaped`, as a whole."""
        step = 1 if shaped is None or not shaped.dim() else step_for(shaped, self._most)
        with torch.no_grad():
            self._table(value.device).add(self.subject.rows[kind, name], value, step)
            if self._keep is not None:
                self._keep(kind, name, value)

    def _table(self, device: torch.device) -> Counts:
        """The table of a device."""
        table = self.tables.get(device)
        if table is None:
            table = self.tables[device] = Counts(len(self.subject.rows), device)
        return table

    def _known(self, tensor: Tensor) -> Made | None:
        """What is known of a tensor that a module has returned."""
        made = self._made.get(id(tensor))
        return made if made is not None and made.ref() is tensor else None

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Calls `hook` with the gradient of `tensor`."""
        self._handles.append(tensor.register_hook(hook))


class Hook:
    """A hook of a module. A copy of the module has one that removes itself."""

    __slots__ = ("_call", "_name")

    def __init__(self, call: Callable[..., None] | None = None, name: str = "") -> None:
        self._call, self._name = call, name

    def __call__(self, *args: Any) -> None:
        """Passes on what torch gives it, outside of compiled graphs."""
        if torch.compiler.is_compiling():
            return
        if self._call is not None:
            self._call(self._name, *args)
        else:
            self._leave(args[0])

    def _leave(self, module: nn.Module) -> None:
        """Removes this hook from a copied module."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook is self]:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def _recomputes() -> bool:
    """Whether this is inside of a backward pass: a checkpoint computes its activations again."""
    return torch._C._current_graph_task_id() >= 0


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in arguments or outputs that have numbers to look at."""
    found: dict[int, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                found[id(tensor)] = tensor
        return tensor

    mapped(value, take, deep=True)
    return list(found.values())
