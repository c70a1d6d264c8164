"""The two worlds of the random-sequence test in lock-step: every action in both, all compared."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale import SettingError, StateError
from gradscale.torch import GradScaler
from oracle_ledger import Beyond, Setup, Terms, World, float32, listed
from oracle_reference import Expected, Reference, duplicate

KEYS = ("growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
Action = tuple[Any, ...]


class Mismatch(AssertionError):
    """The two scalers differ where no row allows it."""


class Pair:
    """Both worlds, and every action in both."""

    def __init__(self, reference: Reference, ours: World, exact: bool) -> None:
        self.reference = reference
        self.ours = ours
        self.exact = exact
        """Whether all settings are powers of two."""
        self.slot: tuple[Any, ...] | None = None
        self.shared = len({k for each in ours.members for k in each}) < sum(map(len, ours.members))
        self.used = False
        """Whether an `update()` came since the last backward pass."""

    def do(self, action: Action) -> None:
        """Does `action` in both worlds and compares everything there is."""
        self.reference.moved = False
        if self.shared and self.used and action[0] in ("step", "unscale", "edit", "closure"):
            raise Beyond("shared gradients over an update(): tests/torch/step/test_laws.py")
        if action[0] in ("backward", "update"):
            self.used = action[0] == "update"
        getattr(self, f"do_{action[0]}")(*action[1:])
        self.reference.rows["actions"] += 1
        self.compare()

    def agree(self, expected: Expected, call: Callable[[], Any]) -> Any:
        """What our call returned; a Mismatch if it does not do what is expected."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value, error = call(), None
            except Exception as raised:
                value, error = None, raised
        wanted = expected.error
        if wanted is None and error is not None:
            raise Mismatch(f"ours raised {error!r}") from error
        if wanted is not None and not isinstance(error, wanted):
            raise Mismatch(f"{wanted.__name__} wanted, ours raised {error!r}") from error
        same("warnings", expected.warnings, len(caught))
        return value

    def compare(self) -> None:
        theirs, ours = self.reference, self.ours
        self.compare_scale()
        left, right = theirs.scaler.state_dict(), ours.scaler.state_dict()
        same("state_dict()", bool(left), bool(right))
        for key in KEYS if left else ():
            same(key, left[key], right[key])
        for k, (a, b) in enumerate(zip(theirs.params, ours.params, strict=True)):
            same_bits(f"parameter {k}", a, b)
            same_bits(f"gradient {k}", a.grad, b.grad)
        for i, numbers in enumerate(theirs.members):
            for k in numbers:
                left = theirs.optimizers[i].state.get(theirs.params[k]) or {}
                right = ours.optimizers[i].state.get(ours.params[k]) or {}
                same(f"state of {k} in optimizer {i}", left.keys(), right.keys())
                for key, value in left.items():
                    same_bits(f"{key} of {k} in optimizer {i}", value, right[key])

    def compare_scale(self) -> None:
        """The scale: equal, or with settings that are no powers of two to one rounding per move.

        A move in torch is s * f in float64, rounded to float32 once: s f (1 + a). Ours rounds the
        factor to float32 first: s f (1 + b)(1 + c). Each of a, b and c is at most 2**-24, so the
        two differ by no more than three such parts; the b is the rounding that torch does not have.
        torch is then given our scale, so that the next move is judged by itself.
        """
        theirs, ours = self.reference.scaler.get_scale(), self.ours.scaler.get_scale()
        if self.exact:
            return same("scale", theirs, ours)
        theirs, ours = float32(theirs), float32(ours)  # torch rounds at the first loss
        if not self.reference.moved:
            return same("scale", theirs, ours)
        if abs(theirs - ours) > 3 * 2.0**-24 * (1 + 2.0**-20) * theirs:
            raise Mismatch(f"scale: torch {theirs}, ours {ours}")
        self.reference.scaler._scale.fill_(ours)
        return None

    # Actions. Parameters and optimizers are numbers, taken modulo how many there are.

    def terms(self, terms: Terms) -> Terms:
        return tuple((k % len(self.ours.params), values) for k, values in terms)

    def which(self, i: int) -> int:
        return i % len(self.ours.optimizers)

    def do_scale(self, terms: Terms, form: str) -> tuple[list[Tensor], ...]:
        """Scales losses in the form of one tensor, a list ...; torch's losses, and both scaled."""
        half = form == "half"
        theirs = self.reference.losses(self.terms(terms), half)
        given = packed(theirs, form)
        several = [given] if isinstance(given, Tensor) else theirs
        expected = self.reference.scale(given, several, half)
        mine = packed(self.ours.losses(self.terms(terms), half), form)
        scaled = self.agree(expected, lambda: listed(self.ours.scaler.scale(mine)))
        for a, b in zip(expected.value, scaled, strict=True):
            same_bits("scaled loss", a, b)
        return several, expected.value, scaled

    def do_backward(self, terms: Terms, form: str) -> None:
        losses, theirs, ours = self.do_scale(terms, form)
        self.reference.run(theirs, losses, [k for k, _ in self.terms(terms)])
        torch.autograd.backward(ours)

    def do_zero(self, i: int, set_to_none: bool) -> None:
        for world in (self.reference, self.ours):
            world.zero(self.which(i), set_to_none)

    def do_clip(self, i: int, max_norm: float) -> None:
        for world in (self.reference, self.ours):
            world.clip(self.which(i), max_norm)

    def do_edit(self, k: int, value: float, how: str) -> None:
        for world in (self.reference, self.ours):
            world.edit(k % len(self.ours.params), value, how)

    def do_unscale(self, i: int) -> None:
        optimizer = self.ours.optimizers[self.which(i)]
        expected = self.reference.unscale(self.which(i))
        self.agree(expected, lambda: self.ours.scaler.unscale_(optimizer))

    def do_step(self, i: int) -> None:
        optimizer = self.ours.optimizers[self.which(i)]
        expected = self.reference.step(self.which(i))
        self.agree(expected, lambda: self.ours.scaler.step(optimizer))

    def do_closure(self, i: int, values: tuple[float, ...], keyword: bool) -> None:
        """A step with a closure, of an optimizer that cannot skip by itself, from no gradients."""
        i = self.which(i)
        reference, ours, optimizer = self.reference, self.ours, self.ours.optimizers[i]
        if reference.capable(i) or not reference.scaler.is_enabled():
            return
        if reference.stage(i) is OptState.UNSCALED:
            return
        mine = set(ours.members[i])
        if any(not mine.isdisjoint(each) for j, each in enumerate(ours.members) if j != i):
            return  # what it leaves for another optimizer is not in the ledger
        self.do_zero(i, True)
        terms = tuple((k, values) for k in ours.members[i])

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses = ours.losses(terms)
            torch.autograd.backward(ours.scaler.scale(losses))
            return sum(losses[1:], losses[0])

        args, kwargs = ((), {"closure": closure}) if keyword else ((closure,), {})
        expected = reference.step_closure(i, terms)
        self.agree(expected, lambda: ours.scaler.step(optimizer, *args, **kwargs))

    def do_update(self, value: Any = None, tensor: bool = False) -> None:
        given = torch.tensor(value) if tensor else value
        expected = self.reference.update(given)
        self.agree(expected, lambda: self.ours.scaler.update(given))

    def do_iteration(self, values: tuple[Any, ...], how: str, zero: str) -> None:
        """A whole iteration as a user writes it; None among `values` is a parameter left out."""
        chosen = ((k, values[k % len(values)]) for k in range(len(self.ours.params)))
        terms = tuple(term for term in chosen if term[1] is not None)
        self.do(("backward", terms or ((0, (1.0, 1.0, 1.0)),), "one"))
        everyone = range(len(self.ours.optimizers))
        if how == "early":
            self.do(("update", 64.0))
        for i in everyone:
            if how in ("clip", "spoil"):
                self.do(("unscale", i))
            if how == "clip":
                self.do(("clip", i, 1.0))
            if how == "spoil":
                self.do(("edit", self.ours.members[i][0], float("nan"), "fill"))
            self.do(("step", i))
        self.do(("update",))
        for i in everyone if zero != "keep" else ():
            self.do(("zero", i, zero == "none"))

    def do_set(self, name: str, value: Any) -> None:
        expected = self.reference.set(name, value)
        self.agree(expected, lambda: getattr(self.ours.scaler, f"set_{name}")(value))

    def do_get(self) -> None:
        theirs, ours = self.reference.scaler, self.ours.scaler
        same("is_enabled()", theirs.is_enabled(), ours.is_enabled())
        # A disabled torch scaler has none of these attributes, and says so by an AttributeError.
        for name in KEYS[:3] if theirs.is_enabled() else ():
            same(name, getattr(theirs, f"get_{name}")(), getattr(ours, f"get_{name}")())

    def do_construct(self, name: str, value: Any) -> None:
        """Makes another scaler, which is then forgotten."""
        expected = self.reference.plain(lambda: torch.amp.GradScaler("cpu", **{name: value}))
        if self.reference.validation(name, value):
            expected = Expected(error=expected.error or SettingError)
        self.agree(expected, lambda: type(self.ours.scaler)("cpu", **{name: value}))

    def do_save(self) -> None:
        ours = json.loads(json.dumps(self.ours.scaler.state_dict()))
        reference = self.reference
        self.slot = reference.scaler.state_dict(), ours, reference.limits, reference.bad_losses

    def do_load(self, source: str, target: str) -> None:
        """Loads what was saved, torch's or ours or each its own, into this scaler or a new one."""
        if self.slot is None:
            self.do_save()
        assert self.slot is not None
        theirs, ours, limits, bad = self.slot
        if target == "fresh":
            self.reference.renew()
            self.ours.scaler = type(self.ours.scaler)("cpu")
        if source == "torch":
            ours, limits, bad = theirs, None, 0
        elif source == "ours":
            theirs = ours
        expected = self.reference.load(theirs, limits, bad)
        self.agree(expected, lambda: self.ours.scaler.load_state_dict(ours))

    def do_load_bad(self, scale: float) -> None:
        """A state that torch takes, and is lost by it."""
        if not self.ours.scaler.is_enabled():
            return
        state = {**torch.amp.GradScaler("cpu").state_dict(), "scale": scale}
        self.reference.validation("scale", scale)
        self.agree(Expected(error=StateError), lambda: self.ours.scaler.load_state_dict(state))

    def do_copy(self, how: str) -> None:
        expected = self.reference.copy(how)
        copied = self.agree(expected, lambda: duplicate(self.ours.scaler, how))
        self.ours.scaler = copied or self.ours.scaler


def packed(losses: list[Tensor], form: str) -> Any:
    """`losses` as the user hands them over: by default as their sum."""
    forms = {"list": list, "tuple": tuple, "map": lambda several: map(torch.clone, several)}
    return forms.get(form, lambda several: sum(several[1:], several[0]))(losses)


def same(what: str, theirs: Any, ours: Any) -> None:
    if theirs != ours:
        raise Mismatch(f"{what}: torch {theirs}, ours {ours}")


def same_bits(what: str, theirs: Tensor | None, ours: Tensor | None) -> None:
    """Equal bit for bit, except that NaN is NaN whatever its payload."""
    if theirs is None or ours is None:
        return same(what, theirs, ours)
    same(what, theirs.dtype, ours.dtype)
    a, b = theirs.detach().float(), ours.detach().float()  # exact, and numpy has no bfloat16
    if a.numpy().tobytes() != b.numpy().tobytes():
        equal = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        if not bool(equal.all()):
            raise Mismatch(f"{what}: torch {a.tolist()}, ours {b.tolist()}")
    return None


def check(
    setup: Setup,
    actions: list[Action],
    reference: type[Reference] = Reference,
    scaler: type[GradScaler] = GradScaler,
    exact: bool = True,
) -> Counter[str]:
    """Runs a sequence in both worlds; how often each row was exercised."""
    ours: Any = partial(scaler, recheck=setup.recheck)
    pair = Pair(reference(setup), World(setup, ours), exact)
    try:
        pair.compare()
        for action in actions:
            pair.do(action)
    except Beyond as reason:
        pair.reference.rows[f"ended: {reason}"] += 1
    return pair.reference.rows
