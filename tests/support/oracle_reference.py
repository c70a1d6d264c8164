"""torch.amp.GradScaler with the rows of docs/reference/differences.md applied: ours must equal it.

`Reference` is a world driven by torch's scaler. Before a call it asks the predicates, one per row
and named after it, whether the call falls under a row. If none says so, torch is simply called, and
ours has to do exactly what torch did. If one says so, the row is counted and torch is made to do
what the row's last column says (its scale set to that of the window, its scale clamped, its step
turned into a skip ...), and ours has to do exactly that. So the two worlds never part, nothing has
to be aligned again, and a row excuses one thing only.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale import CallOrderError, SettingError
from oracle_ledger import (
    SGD,
    Beyond,
    Ledger,
    Setup,
    Tag,
    Terms,
    all_finite,
    divided,
    float32,
    grad_of,
    listed,
)

CPU = torch.device("cpu")
HALF_LOSS_SCALE, FLOOR, CEILING = 2.0**15, 2.0**-14, 2.0**64
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers
PATIENCE, PERIOD = 32, 8


class Expected(NamedTuple):
    """What a call has to do: return or raise, and how many warnings ours gives."""

    value: Any = None
    error: type[Exception] | None = None
    warnings: int = 0


REFUSED = Expected(error=CallOrderError)


class Reference(Ledger):
    """A world with torch's scaler, made to do what the rows say."""

    def __init__(self, setup: Setup) -> None:
        self.rows: Counter[str] = Counter()
        if setup.device != "cpu":
            self.never_disabled(setup)
        super().__init__(setup._replace(device="cpu"), torch.amp.GradScaler)
        first = self.scaler.get_scale()
        self.limits = (min(FLOOR, first), max(CEILING, first))
        self.moved = False
        """Whether the last call may have multiplied the scale."""
        self.bad_losses = 0
        self.warned_half = False
        self.rechecks = setup.recheck

    def forget(self) -> None:
        super().forget()
        self.mixed: set[int] = set()
        """The optimizers whose unscaled gradients were added to."""
        self.left_unscaled = False
        """Whether unscaled gradients were left over an update()."""

    def renew(self) -> None:
        """A new scaler with torch's settings."""
        self.scaler = torch.amp.GradScaler("cpu")
        self.limits = (FLOOR, CEILING)
        self.bad_losses, self.warned_half, self.rechecks = 0, False, False
        self.forget()

    def count(self, row: str) -> bool:
        self.rows[row] += 1
        return True

    def shares(self, numbers: list[int]) -> bool:
        """Whether an optimizer that has one of these parameters shares any with another one."""
        mine = {k for each in self.members if not set(numbers).isdisjoint(each) for k in each}
        return sum(not mine.isdisjoint(each) for each in self.members) > 1

    # The predicates, one per row: whether a call falls under it.

    def bounds(self) -> bool:
        low, high = self.limits
        return not low <= self.scaler.get_scale() <= high and self.count("bounds")

    def nonfinite_loss(self) -> bool:
        over = self.bad_losses - PATIENCE
        counts = over > 0 and over % PERIOD == 0
        return not self.window.loss_finite and not counts and self.count("nonfinite-loss")

    def fits(self, numbers: list[int], scale: float) -> bool:
        grads = [grad_of(self.params[k]) for k in numbers]
        unfit = any(all_finite(grad) and not all_finite(divided(grad, scale)) for grad in grads)
        counted = unfit and self.count("fits")
        if unfit and self.shares(numbers):
            raise Beyond("gradients that do not fit, and those of an optimizer that shares some")
        return counted

    def counter(self, finite: bool) -> bool:
        passed = self.scaler._get_growth_tracker() >= self.scaler.get_growth_interval()
        return finite and passed and self.count("counter")

    def skipped_gradients(self, numbers: list[int]) -> bool:
        return not all(self.is_zero(k) for k in numbers) and self.count("skipped-gradients")

    def recheck(self, i: int) -> bool:
        grads = [grad_of(self.params[k]) for k in self.with_grad(i)]
        spoilt = not all(map(all_finite, grads)) and not self.found(i) and i not in self.unfit
        again = spoilt and self.rechecks and self.count("recheck")
        if again and self.shares(self.members[i]):
            raise Beyond("gradients that were edited, and those of an optimizer that shares some")
        return again

    def closure(self, i: int) -> bool:
        step, optimizer = self.scaler.step, self.optimizers[i]
        refused = self.plain(lambda: step(optimizer, closure=lambda: None)).error is RuntimeError
        return refused and self.count("closure")

    def half_gradients(self, i: int, error: type[Exception] | None) -> bool:
        half = any(grad_of(self.params[k]).dtype is torch.float16 for k in self.with_grad(i))
        return half and error is ValueError and self.count("half-gradients")

    def half_loss(self, half: bool) -> bool:
        before = self.made is not None and self.made.half
        high = self.scaler.get_scale() > HALF_LOSS_SCALE
        return (half or before) and high and self.count("half-loss")

    def shared_parameter(self, plan: dict[int, float]) -> bool:
        tags = self.window.tags
        again = any(self.same_tensor(k, tags.get(k)) and tags[k].used for k in plan)
        return again and self.count("shared-parameter")

    def no_gradients(self, i: int) -> bool:
        return not self.with_grad(i) and self.count("no-gradients")

    def stale_scale(self, scale: float) -> bool:
        return scale != self.scaler.get_scale() and self.count("stale-scale")

    def validation(self, kind: str, value: Any) -> bool:
        good = {
            "scale": lambda: SMALLEST <= float(value) <= LARGEST,
            "growth_factor": lambda: 1 < value < LARGEST,
            "backoff_factor": lambda: 0 < value < 1,
            "growth_interval": lambda: 1 <= value < 2**31,
        }
        return not good[kind]() and self.count("validation")

    def update_number(self, value: Any) -> bool:
        number = type(value) is int
        refused = number and self.plain(lambda: self.scaler.update(value)).error is AttributeError
        return refused and self.count("update-number")

    def never_disabled(self, setup: Setup) -> bool:
        settings = dict(setup.settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            enabled = torch.amp.GradScaler(setup.device, **settings).is_enabled()
        lost = settings.get("enabled", True) and not enabled and len(caught) == 1
        return lost and self.count("never-disabled")

    # What the calls of torch's scaler need.

    def plain(self, call: Callable[[], Any]) -> Expected:
        """What torch does, and nothing else."""
        try:
            return Expected(call())
        except Exception as error:
            return Expected(error=type(error))

    @contextmanager
    def at(self, scale: float) -> Iterator[None]:
        """Lets torch's scaler have another scale for one call."""
        now = self.scaler._scale
        self.scaler._scale = torch.tensor(scale)
        yield
        self.scaler._scale = now

    @property
    def live(self) -> bool:
        return self.scaler.is_enabled() and self.scaler._scale is not None

    def state(self, i: int) -> dict[str, Any]:
        return self.scaler._per_optimizer_states[id(self.optimizers[i])]

    def stage(self, i: int) -> OptState:
        known = id(self.optimizers[i]) in self.scaler._per_optimizer_states
        return self.state(i)["stage"] if known else OptState.READY

    def found(self, i: int) -> bool:
        return any(map(bool, self.state(i)["found_inf_per_device"].values()))

    def capable(self, i: int) -> bool:
        return bool(getattr(self.optimizers[i], "_step_supports_amp_scaling", False))

    def end_here(self) -> None:
        """Ends a sequence whose gradients torch's scaler cannot be made to follow."""
        window = self.opened
        if self.left_unscaled:
            raise Beyond("unscaled gradients over an update(): tests/torch/step/test_laws.py")
        moved = window is not None and window.scale != self.scaler.get_scale()
        if window is not None and not window.closed and moved and window.begun:
            raise Beyond("gradients left over a new scale: tests/torch/step/test_laws.py")

    # Scaling and unscaling.

    def scale(self, outputs: Any, losses: list[Tensor], half: bool = False) -> Expected:
        """Scales `outputs`, which hold `losses`."""
        scaler = self.scaler
        if not scaler.is_enabled():
            return self.plain(lambda: listed(scaler.scale(outputs)))
        self.end_here()
        if self.opened is None or self.opened.closed:
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(CPU)
            self.begin(half)
        self.opened.half |= half
        warned, self.warned_half = half and not self.warned_half, half or self.warned_half
        self.stale_scale(self.opened.scale)
        with self.at(self.opened.scale):
            scaled = self.plain(lambda: listed(scaler.scale(outputs)))
        return scaled._replace(warnings=int(warned))

    def begin(self, half: bool = False) -> None:
        """Opens a window, which is limited if the one before was."""
        self.clear()
        if self.half_loss(half):
            self.scaler._scale.fill_(HALF_LOSS_SCALE)
        self.opening()

    def run(self, scaled: list[Tensor], losses: list[Tensor], numbers: list[int]) -> None:
        """The backward pass of `losses`, which were just scaled."""
        for i in range(len(self.optimizers)) if self.live else ():
            if self.stage(i) is not OptState.UNSCALED:
                continue
            if not self.with_grad(i):
                raise Beyond("unscaled gradients are gone: tests/torch/step/test_laws.py")
            if not set(numbers).isdisjoint(self.members[i]):
                mine = set(self.members[i])
                self.mixed |= {j for j, ks in enumerate(self.members) if not mine.isdisjoint(ks)}
        if self.live:
            self.clear()
        if self.opened is not None:
            self.opened.loss_finite &= all(map(all_finite, losses))
        self.backward(self.opened, scaled, numbers)

    def meet(self, i: int) -> None:
        """Makes optimizer `i` known, also by a call before the first loss, which is an error."""
        if self.scaler.is_enabled():
            self.seen.add(i)

    def enter(self, i: int) -> bool:
        """Whether optimizer `i` has anything to use; gradients made by hand open a window."""
        window = self.window
        had = i in window.users
        again = self.used_at.get(i) == self.passes and self.nothing_new(i)
        if self.stage(i) is OptState.READY and not had and again:
            self.count("stale-scale")  # another optimizer has opened this window by hand
            return False
        if self.stage(i) is OptState.READY and (window.closed or had):
            if had and window.users[i] == window.begun:
                if self.opened is None or self.opened.closed:
                    self.begin()
                    self.made = window  # still the one of the last step
                if self.nothing_new(i):
                    self.count("stale-scale")
                    return False
                self.made = self.opened
                self.made.blank = all(map(self.is_zero, self.with_grad(i)))
        return True

    def plan(self, i: int) -> dict[int, float] | None:
        """What each gradient of optimizer `i` must be divided by; None if that is an error."""
        try:
            return {k: self.carried(k) for k in self.with_grad(i)}
        except CallOrderError:
            self.count("stale-scale")
            return None

    def unscaled_sum(self, i: int) -> bool:
        """Whether a pass has added to unscaled gradients; what comes after that is not compared."""
        refused = i in self.mixed and bool(self.with_grad(i)) and self.count("unscaled-sum")
        if i in self.mixed and not self.with_grad(i):
            raise Beyond("mixed gradients are gone: tests/torch/step/test_laws.py")
        return refused

    def unscale(self, i: int) -> Expected:
        if self.live and self.stage(i) is not OptState.STEPPED and self.unscaled_sum(i):
            return REFUSED
        if self.live and self.left_unscaled:
            self.end_here()
        self.meet(i)
        if not self.live or self.stage(i) is not OptState.READY:
            return self.plain(lambda: self.scaler.unscale_(self.optimizers[i]))
        plan = self.plan(i) if self.enter(i) else None
        return REFUSED if plan is None else self.divide(i, plan)

    def divide(self, i: int, plan: dict[int, float]) -> Expected:
        """torch's unscale_() at the window's scale; gradients that carry another are put aside."""
        scale = self.window.scale
        self.shared_parameter(plan)
        aside = {k: grad_of(self.params[k]) for k in plan if plan[k] != scale}
        if aside.keys() != plan.keys():
            self.stale_scale(scale)
        if self.fits([k for k in plan if k not in aside], scale):
            self.unfit.add(i)
        for k in aside:
            self.params[k].grad = None
        with self.at(scale):
            expected = self.plain(lambda: self.scaler.unscale_(self.optimizers[i]))
            if self.half_gradients(i, expected.error):
                unscale = self.scaler._unscale_grads_
                self.scaler._unscale_grads_ = lambda *args: unscale(*args[:3], True)
                expected = self.plain(lambda: self.scaler.unscale_(self.optimizers[i]))
                del self.scaler._unscale_grads_
        found = self.state(i)["found_inf_per_device"]
        for k, grad in aside.items():
            self.params[k].grad = grad
            if k in self.window.waiting:
                self.stale_scale(plan[k])
            if self.fits([k], plan[k]):
                self.unfit.add(i)
            infinite = torch.tensor(float(not all_finite(grad)))
            found[CPU] = torch.maximum(found.get(CPU, infinite), infinite)
            grad.copy_(divided(grad, plan[k]))
        self.use(i)
        return expected

    # Stepping.

    def step(self, i: int) -> Expected:
        self.meet(i)
        if not self.live or self.stage(i) is OptState.STEPPED:
            return self.plain(lambda: self.scaler.step(self.optimizers[i]))
        if self.left_unscaled:
            self.end_here()
        if self.unscaled_sum(i):
            return REFUSED
        if not self.enter(i):
            return REFUSED
        if self.no_gradients(i):
            self.plain(lambda: self.scaler.step(self.optimizers[i]))
            self.state(i)["stage"] = OptState.STEPPED
            self.window.users[i] = self.window.begun
            return Expected(warnings=1)
        if self.stage(i) is OptState.READY:
            plan = self.plan(i)
            if plan is None:
                return REFUSED
            odd = any(plan[k] != self.window.scale or k in self.window.waiting for k in plan)
            if self.capable(i) and not odd and not self.shared_parameter(plan):
                return self.step_fused(i)
            if self.capable(i) and not all(all_finite(grad_of(self.params[k])) for k in plan):
                raise Beyond("bad gradients that are shared may stay scaled until update()")
            self.divide(i, plan)
        else:
            self.divide_late(i)
        if not self.state(i)["found_inf_per_device"]:
            return Expected(error=AssertionError)  # torch's; its fused optimizers fail otherwise
        expected = self.take(i, skip=i in self.unfit or self.recheck(i))
        self.use(i)
        return expected

    def divide_late(self, i: int) -> None:
        """Unscales what a backward pass has made since unscale_(), in place of what that found."""
        window = self.window
        then = self.unscaled_in[i]
        if then is window and window.users[i] == window.begun:
            return
        late = [k for k in self.with_grad(i) if not self.same_tensor(k, then.tags.get(k))]
        found = self.state(i)["found_inf_per_device"]
        for k in late:
            self.count("stale-scale")
            grad = grad_of(self.params[k])
            if self.fits([k], window.scale):
                self.unfit.add(i)
            infinite = torch.tensor(float(not all_finite(grad)))
            found[CPU] = torch.maximum(found.get(CPU, infinite), infinite)
            grad.copy_(divided(grad, window.scale))
        found.setdefault(CPU, torch.tensor(0.0))  # another optimizer has had, and divided, them all

    def step_fused(self, i: int) -> Expected:
        """The step of an optimizer that gets scaled gradients and skips by itself."""
        scale = self.window.scale
        self.stale_scale(scale)
        unfit = self.fits(self.with_grad(i), scale)
        with self.at(scale):
            if unfit:
                self.scaler._check_inf_per_device(self.optimizers[i])
                self.state(i)["stage"] = OptState.UNSCALED
            expected = self.take(i, skip=unfit)
        self.use(i, carries=scale if unfit or self.found(i) else 1.0)
        return expected

    def take(self, i: int, skip: bool) -> Expected:
        """torch's step, or a skip that torch would not have made."""
        optimizer, state = self.optimizers[i], self.optimizers[i].state
        ready = [self.params[k] for k in self.with_grad(i)]
        bare = [param for param in ready if not state.get(param)]
        fused_sgd = self.capable(i) and isinstance(optimizer, SGD)
        if fused_sgd and 0 < len(bare) < len(ready):
            raise Beyond("torch's fused SGD fails, with any scaler, when a parameter joins later")
        flags = self.state(i)["found_inf_per_device"].values() if skip else ()
        kept = [flag.clone() for flag in flags]
        for flag in flags:
            flag.fill_(1)
        expected = self.plain(lambda: self.scaler.step(optimizer))
        for flag, value in zip(flags, kept, strict=True):
            flag.copy_(value)
        if skip or self.found(i):
            self.skips.append((i, self.window))
            if fused_sgd and bare:
                self.count("fused-momentum")
            for param in bare:  # ours does not call it at all where the host knows of the skip
                state.pop(param, None)
        return expected

    def step_closure(self, i: int, terms: Terms) -> Expected:
        """torch cannot; the same step without a closure is what ours has to be equal to."""
        self.closure(i)
        if self.stage(i) is OptState.STEPPED:
            return REFUSED
        self.zero(i, True)
        losses = self.losses(terms)
        scaled = self.scale(losses, losses)
        self.run(scaled.value, losses, [k for k, _ in terms])
        self.unscale(i)
        if not all_finite(sum(losses[1:], losses[0])):
            self.unfit.add(i)  # the loss that the closure returns
        expected = self.step(i)
        if not all(all_finite(self.params[k]) for k in self.members[i]):
            raise Beyond("ours also undoes a closure's step that leaves infinite parameters")
        return expected._replace(value=None)

    # Moving the scale.

    def update(self, value: Any = None) -> Expected:
        if not self.live:
            return self.plain(lambda: self.scaler.update(value))
        unscaled = any(self.stage(i) is OptState.UNSCALED for i in range(len(self.optimizers)))
        expected = self.move() if value is None else self.set_scale(value)
        if expected.error is None:
            self.mixed = set()
            self.left_unscaled |= unscaled
            for window in {id(w): w for w in (self.opened, self.made) if w is not None}.values():
                self.close(window)
            self.clear(edited=True)
            self.unfit, self.unscaled_in = set(), {}
        return expected

    def set_scale(self, value: Any) -> Expected:
        if self.validation("scale", value):
            return Expected(error=SettingError)
        number = float(value)
        self.limits = (min(self.limits[0], number), max(self.limits[1], number))
        given = number if self.update_number(value) else value
        return self.plain(lambda: self.scaler.update(given))

    def move(self) -> Expected:
        scaler, window = self.scaler, self.window
        states = scaler._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags and any(state["stage"] is OptState.STEPPED for state in states):
            self.count("no-gradients")
            scaler._per_optimizer_states.clear()
            return Expected()
        if not flags:
            return self.plain(scaler.update)
        before = scaler._scale.item(), scaler._growth_tracker.item()
        finite = not any(map(bool, flags))
        if self.counter(finite):
            scaler._growth_tracker.fill_(scaler.get_growth_interval() - 1)
        expected = self.plain(scaler.update)
        if window.reported is None:
            self.bad_losses = 0 if window.loss_finite else self.bad_losses + 1
            stays = self.nonfinite_loss()
        elif finite or not window.reported:
            stays = self.count("stale-scale")
        else:
            stays = not window.loss_finite
        window.reported = finite and window.reported is not False
        stays |= window.blank and self.count("dummy-step")
        if stays:
            scaler._scale.fill_(before[0])
            scaler._growth_tracker.fill_(before[1])
        elif self.bounds():
            scaler._scale.clamp_(*self.limits)
        self.moved = not stays
        return expected

    def clear(self, edited: bool = False) -> None:
        """Sets the gradients of skipped steps to 0, `edited` ones only if no pass has begun."""
        for i, window in self.skips:
            if not edited and not self.nothing_new(i):
                continue
            left = [k for k in self.with_grad(i) if self.same_tensor(k, window.tags.get(k))]
            left = [k for k in left if window.tags[k].used]
            self.skipped_gradients(left)
            for k in left:
                grad_of(self.params[k]).zero_()
                same = [j for j, seen in self.witnesses.items() if seen == (k, self.stamps[k])]
                self.write(k)
                self.witnesses |= dict.fromkeys(same, (k, self.stamps[k]))
                window.tags[k] = Tag(1.0, True, window.begun, self.stamps[k])
        self.skips = []

    # Settings and checkpoints.

    def set(self, name: str, value: Any) -> Expected:
        if self.validation(name, value):
            return Expected(error=SettingError)
        return self.plain(lambda: getattr(self.scaler, f"set_{name}")(value))

    def load(self, state: dict[str, Any], limits: tuple[float, float] | None, bad: int) -> Expected:
        """Loads a good state; the `limits` are in it if it is one of ours."""
        if not self.scaler.is_enabled() or not state:
            return self.plain(lambda: self.scaler.load_state_dict(state))
        if any(self.stage(i) is not OptState.READY for i in range(len(self.optimizers))):
            raise Beyond("a load ends the iteration, and torch's does not")
        self.limits = low, high = limits or self.limits
        self.bad_losses = bad
        scale = state["scale"]
        inside = float32(low) <= float32(scale) <= float32(high)
        clamped = scale if inside else min(max(scale, low), high)
        self.scaler.load_state_dict({**state, "scale": clamped})
        if self.opened is not None:
            self.close(self.opened)  # the next loss takes the loaded scale, if nothing is waiting
        return Expected(warnings=int(not inside and self.count("validation")))

    def copy(self, how: str) -> Expected:
        """Goes on with a copy of the scaler, unless it cannot be copied now."""
        expected = self.plain(lambda: duplicate(self.scaler, how))
        if expected.error is None:
            self.scaler = expected.value
            self.warned_half = False
            self.forget()
        return expected._replace(value=None)


def duplicate(scaler: Any, how: str) -> Any:
    return copy.deepcopy(scaler) if how == "deepcopy" else pickle.loads(pickle.dumps(scaler))
