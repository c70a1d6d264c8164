"""The worlds of the random-sequence test, and what is known of the gradients in one of them.

The ledger says what a gradient must be divided by according to docs/reference/differences.md, rows
`stale-scale` and `shared-parameter`, from the calls made so far alone. It never looks at ours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale import CallOrderError

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
# An epsilon that float16 can hold: with torch's, AdamW divides half parameters by 0.
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.25, momentum=0.5),
    "sgd-fused": lambda params: SGD(params, lr=0.25, momentum=0.5, fused=True),
    "adamw": lambda params: ADAMW(params, lr=0.125, eps=2**-10, foreach=False),
    "adamw-foreach": lambda params: ADAMW(params, lr=0.125, eps=2**-10, foreach=True),
    "adamw-fused": lambda params: ADAMW(params, lr=0.125, eps=2**-10, fused=True),
}
Terms = tuple[tuple[int, tuple[float, ...]], ...]
"""A loss: the numbers of parameters, each with the coefficients that will be its gradient."""


class Beyond(Exception):
    """The sequence left what can be compared, and ends; the message says why."""


class Setup(NamedTuple):
    """How both worlds begin."""

    optimizers: tuple[str, ...] = ("sgd",)
    params_each: int = 1
    shared: bool = False
    """Whether the last optimizer also has the first one's first parameter."""
    dtype: str = "float32"
    """Of the last parameter; all others are float32."""
    settings: tuple[tuple[str, Any], ...] = ()
    device: str = "cpu"
    recheck: bool = False
    """Whether ours reads gradients again after unscale_()."""


class World:
    """Parameters, optimizers and a scaler, and what a user does without the scaler."""

    def __init__(self, setup: Setup, scaler: type[torch.amp.GradScaler]) -> None:
        count = len(setup.optimizers) * setup.params_each
        values = [torch.tensor([0.5, -1.25, 2.0]) * (k + 1) for k in range(count)]
        values[-1] = values[-1].to(getattr(torch, setup.dtype))
        self.params = [torch.nn.Parameter(value) for value in values]
        starts = range(0, count, setup.params_each)
        self.members = [list(range(k, k + setup.params_each)) for k in starts]
        if setup.shared and len(self.members) > 1:
            self.members[-1].append(0)
        self.optimizers = [
            OPTIMIZERS[kind]([self.params[k] for k in numbers])
            for kind, numbers in zip(setup.optimizers, self.members, strict=True)
        ]
        self.scaler = scaler(setup.device, **dict(setup.settings))

    def losses(self, terms: Terms, half: bool = False) -> list[Tensor]:
        """One loss per term: a parameter times coefficients, which will be its gradient."""
        sums = [(self.params[k].float() * torch.tensor(values)).sum() for k, values in terms]
        return [loss.half() for loss in sums] if half else sums

    def with_grad(self, i: int) -> list[int]:
        """The numbers of the parameters of optimizer `i` that have a gradient."""
        return [k for k in self.members[i] if self.params[k].grad is not None]

    def zero(self, i: int, set_to_none: bool) -> None:
        self.optimizers[i].zero_grad(set_to_none=set_to_none)

    def clip(self, i: int, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_([self.params[k] for k in self.members[i]], max_norm)

    def edit(self, k: int, value: float, how: str) -> None:
        """What a user may do to a gradient by hand."""
        param = self.params[k]
        values = torch.full((3,), value).to(param.dtype)
        if how == "new":
            param.grad = values
        elif param.grad is not None and how == "fill":
            param.grad.copy_(values)
        elif param.grad is not None:
            param.grad[0].mul_(values[0])


@dataclass(eq=False)
class Tag:
    """What is known of a gradient since an optimizer had it or an update() passed it by."""

    carries: float
    """What it must still be divided by; NaN if it is a sum of several scales."""
    used: bool
    """Whether an optimizer had it; else it was passed by."""
    begun: int
    """How many backward passes of its window had begun by then."""
    stamp: tuple[int, int]
    """Which tensor it was, and how often that had been written to."""


@dataclass(eq=False)
class Window:
    """The backward passes between two steps."""

    scale: float
    waiting: dict[int, Tag] = field(default_factory=dict)
    """Gradients that were made in an earlier window, passed by, and are as they were then."""
    mixed: dict[int, Tag] = field(default_factory=dict)
    """Those that a backward pass of this window added to."""
    tags: dict[int, Tag] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    """The optimizers that used it, and how many backward passes had begun by then."""
    begun: int = 0
    half: bool = False
    closed: bool = False
    loss_finite: bool = True
    blank: bool = False
    """Whether no loss was scaled, and the gradients that were used are all 0."""
    reported: bool | None = None
    """Whether all gradients that an update() was told of were finite; None before the first."""


class Ledger(World):
    """A world that remembers what its gradients carry."""

    def __init__(self, setup: Setup, scaler: type[torch.amp.GradScaler]) -> None:
        super().__init__(setup, scaler)
        self.stamps = [(0, 0) for _ in self.params]
        self.forget()

    def forget(self) -> None:
        """What a new scaler knows of the iterations: nothing."""
        self.opened: Window | None = None
        """Where the next loss goes, while it is open."""
        self.made: Window | None = None
        """Where the last backward pass came from."""
        self.seen: set[int] = set()
        """The optimizers that the scaler has met."""
        self.witnesses: dict[int, tuple[int, tuple[int, int]] | None] = {}
        """The first gradient that each optimizer has had in its last step."""
        self.skips: list[tuple[int, Window]] = []
        """The optimizers whose skipped gradients are still there."""
        self.unfit: set[int] = set()
        """The optimizers with gradients that do not fit, in this iteration."""
        self.unscaled_in: dict[int, Window] = {}
        """The windows in which optimizers had their gradients, in this iteration."""
        self.passes = 0
        """How many backward passes of windows there were."""
        self.used_at: dict[int, int] = {}
        """How many there were when an optimizer last had its gradients."""
        self.left: dict[int, float] = {}
        """The optimizers whose passes nobody used in an earlier iteration, with their scale."""

    @property
    def window(self) -> Window:
        """Whose gradients are there."""
        window = self.opened if self.made is None else self.made
        assert window is not None
        return window

    # What happens to gradients.

    def zero(self, i: int, set_to_none: bool) -> None:
        super().zero(i, set_to_none)
        for k in self.members[i]:
            self.write(k, new=set_to_none)

    def clip(self, i: int, max_norm: float) -> None:
        super().clip(i, max_norm)
        for k in self.members[i]:
            self.write(k)

    def edit(self, k: int, value: float, how: str) -> None:
        super().edit(k, value, how)
        self.write(k, new=how == "new")

    def write(self, k: int, new: bool = False) -> None:
        """Somebody has written to a gradient, or made a new one."""
        tensor, version = self.stamps[k]
        self.stamps[k] = (tensor + 1, 0) if new else (tensor, version + 1)

    def same_tensor(self, k: int, tag: Tag | None) -> bool:
        return tag is not None and tag.stamp[0] == self.stamps[k][0]

    def untouched(self, k: int, tag: Tag | None) -> bool:
        return tag is not None and tag.stamp == self.stamps[k]

    def opening(self) -> Window:
        """A new window with the scale of now."""
        window = Window(self.scaler.get_scale())
        if self.opened is not None:
            last = self.window
            if last.users:
                self.made = last
            tags = {**last.waiting, **last.mixed, **last.tags}.items()
            window.waiting = {k: t for k, t in tags if not t.used and self.untouched(k, t)}
        self.opened = window
        return window

    def backward(self, window: Window | None, scaled: list[Tensor], numbers: list[int]) -> None:
        """A backward pass of `window` that adds to the gradients of the parameters `numbers`."""
        if window is not None:
            self.made = window
            self.passes += 1
            window.begun += 1
            window.blank = False
            waiting = window.waiting.items()
            window.waiting = {k: tag for k, tag in waiting if self.untouched(k, tag)}
            # Those of every known optimizer are, whether the pass adds to them or not, and
            # whether they were edited or replaced by hand since.
            moved = [i for i, scale in self.left.items() if scale != window.scale]
            if any(not self.is_zero(k) for i in moved for k in self.with_grad(i)):
                raise Beyond("left-over gradients are rescaled: tests/torch/step/test_laws.py")
            self.left = {}
        for k in set(numbers):
            loaded = self.params[k].grad is not None and not self.is_zero(k)
            older = None if window is None else window.waiting.pop(k, None)
            if older is not None:
                window.mixed[k] = older
                if loaded and older.carries != window.scale:
                    raise Beyond("left-over gradients are rescaled: tests/torch/step/test_laws.py")
                older.carries = window.scale
            else:
                older = None if window is None else window.mixed.get(k)
                older = older if self.untouched(k, older) else None
            self.write(k, new=self.params[k].grad is None)
            if older is not None:
                older.stamp = self.stamps[k]
        torch.autograd.backward(scaled)

    def use(self, i: int, carries: float = 1.0) -> None:
        """Optimizer `i` has had its gradients."""
        window = self.unscaled_in[i] = self.window
        window.users[i] = window.begun
        self.used_at[i] = self.passes
        self.note_witness(i)
        for k in self.with_grad(i):
            window.tags[k] = Tag(carries, True, window.begun, self.stamps[k])

    def close(self, window: Window) -> None:
        """What moves the scale ends a window, and passes by what nobody used.

        But for passes of which no optimizer is known yet: there is nobody to keep their scale.
        """
        if window.begun and not self.seen:
            return
        window.closed = True
        done = {i for i, begun in window.users.items() if begun == window.begun}
        self.left |= dict.fromkeys(self.seen - done, window.scale) if window.begun else {}
        for k in {k for i in self.seen - done for k in self.with_grad(i)}:
            tag = window.tags.get(k)
            if tag is not None and self.same_tensor(k, tag) and tag.begun == window.begun:
                continue
            older = window.waiting.get(k) or window.mixed.get(k)
            if older is None or not self.untouched(k, older):
                older = Tag(window.scale, False, window.begun, self.stamps[k])
            window.tags[k] = older

    # What the rows make of it.

    def carried(self, k: int) -> float:
        """What a gradient must be divided by; a CallOrderError if nothing would be right."""
        window = self.window
        tag = window.tags.get(k)
        if tag is None or not self.same_tensor(k, tag):
            tag = window.mixed.get(k) or window.waiting.get(k)
            if tag is None or not self.untouched(k, tag):
                return window.scale
        if self.untouched(k, tag):
            refused = isnan(tag.carries)
        else:
            refused = tag.used and tag.begun != window.begun
        if refused:
            raise CallOrderError
        return window.scale if isnan(tag.carries) else tag.carries  # NaN: cleared by the user

    def nothing_new(self, i: int) -> bool:
        """Whether the first gradient of optimizer `i`, its witness, is as it was at its use."""
        return all(self.witnesses.get(i) == (k, self.stamps[k]) for k in self.with_grad(i)[:1])

    def note_witness(self, i: int) -> None:
        """Remembers the first gradient of optimizer `i`, which it has had."""
        self.witnesses[i] = next(((k, self.stamps[k]) for k in self.with_grad(i)), None)

    def is_zero(self, k: int) -> bool:
        return not bool(grad_of(self.params[k]).any())


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def divided(grad: Tensor, scale: float) -> Tensor:
    """As both scalers do it: times the float32 reciprocal, rounded once."""
    return (grad.float() * float32(1 / scale)).to(grad.dtype)


def all_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def listed(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
