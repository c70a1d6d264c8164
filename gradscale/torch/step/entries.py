"""What is remembered of every optimizer, as long as it lives."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.policy import GradStats
from gradscale.torch.grads.collect import values_of, with_grad
from gradscale.torch.grads.dtensor import local
from gradscale.torch.grads.fields import value_at
from gradscale.torch.grads.reference import Measurement, multiply, zero
from gradscale.torch.grads.scale import Scale
from gradscale.torch.step.contract import takes_scaler

if TYPE_CHECKING:
    from gradscale.monitor import Tracker
    from gradscale.torch.distributed.consensus import Consensus
    from gradscale.torch.distributed.groups import Group
    from gradscale.torch.step.passes import Iteration, Passes
    from gradscale.torch.step.result import Step

READY, UNSCALED, STEPPED = OptState.READY, OptState.UNSCALED, OptState.STEPPED
"""How far an optimizer is in this iteration."""


class OptimizerEntry:
    """One optimizer: its stage, the scale of its gradients, what was found in them."""

    held: Any = None
    """The optimizer, from its first call in an iteration until `update()`."""
    masters: Any = None
    """What keeps float32 masters of its half parameters; None if nothing does."""
    formats: Any = None
    """How many gradients it had, and formats of some, when its settings were last checked."""
    stage = READY
    known = False
    """Whether it was there when the last pass began."""
    left: Scale | None = None
    """The scale of gradients that no step has used, from an earlier iteration; while they are
    unscaled, the one that they had."""
    unseen: tuple[Any, int] | None = None
    """The first of these, weakly, and its version, where no pass was seen that made it."""
    unscaled_in: int | None = None
    """The number of the iteration in which its gradients were unscaled; None if they are not."""
    mixed = False
    """Whether a pass has added to its unscaled gradients."""
    stats: GradStats | None = None
    """What was found in its gradients in this iteration; None before that."""
    underflow: Any = None
    """The share of its gradients that underflowed, where that was measured."""
    decision: Tensor | None = None
    """What a kernel has decided about its gradients, see `fields.DECISION`."""
    blame: Any = None
    """The parameters to blame, where they were looked for at once."""
    groups_version = -1
    """That of `Groups` when its groups were found; -1 if they must be found again."""
    counts: bool | None = None
    """Whether this rank counts its gradients in norms; None if that differs by parameter."""
    agreed = False
    """Whether its groups have agreed, in this iteration."""
    bad_rank: Any = None
    """The lowest rank that found something not finite, where ranks have agreed."""
    held_back: Any = None
    """bool: a loss with its own scale was bad on another rank, where it reached this."""
    lacking: Any = None
    """bool: a loss with its own scale is missing in gradients of an earlier iteration: it was bad;
    None without such losses."""
    row: Any = 0
    """Steps in a row that were skipped: a number on the CPU, an int32 tensor elsewhere."""
    skipped: Any = False
    """bool: the gradients that are still there are those of a step that was skipped."""
    skipped_grads: dict[int, Any] | None = None
    """These gradients, weakly, by the id of the parameter, where the host has decided."""
    stepped_at = -1
    """How many passes had begun at its last step; -1 before the first."""
    empty_at = 0
    """How many passes had begun when a droppable one last found it without gradients."""
    stepped_params: Sequence[Tensor] = ()
    """The parameters that had a gradient at its last step."""
    witness: tuple[Any, int] | None = None
    """The first gradient of its last step, weakly, and its version."""
    step: Step | None = None
    """Its last step."""
    checks = 0
    """Steps that could have measured underflow."""

    def __init__(self, optimizer: Optimizer, forget: Any) -> None:
        self.ref = weakref.ref(optimizer, forget)
        self.older = takes_scaler(optimizer)
        """Whether its `step()` takes the scaler: torch's older contract."""
        self.measured: list[Measurement] = []
        """The reads of this iteration, from which the parameters to blame are found on request."""
        self.groups: list[Group] = []
        """The groups of ranks that must agree on its gradients."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if it is gone."""
        return self.ref()

    def found(self) -> GradStats | None:
        """What was found in its gradients, also where a kernel has written it; None before that."""
        if self.stats is None and self.decision is not None:
            names = ("finite", "fits", "amax", "grad_norm")
            finite, fits, amax, norm = (value_at(self.decision, name) for name in names)
            self.stats = GradStats(finite=finite, fits=fits, amax=amax, norm=norm)
            if self.underflow is not None:
                self.underflow = value_at(self.decision, "underflow")
        self.decision = None
        return self.stats

    def param_groups(self) -> Any:
        """The parameter groups of the optimizer; none if it is gone."""
        if self.masters is not None and self.masters.in_place:
            return self.masters.weight_groups()
        optimizer = self.ref()
        return () if optimizer is None else optimizer.param_groups

    def param_ids(self) -> set[int]:
        """The ids of its parameters."""
        return {id(p) for group in self.param_groups() for p in group["params"]}

    def make_ready(self) -> None:
        """Forgets what was found: the gradients are scaled, or gone."""
        self.stage, self.mixed, self.unscaled_in = READY, False, None
        self.stats = self.blame = self.underflow = self.decision = None
        if self.measured:
            self.measured = []
        self.agreed, self.bad_rank, self.held_back = False, None, None

    def end_iteration(self, passes: Passes, iteration: Iteration | None) -> None:
        """Remembers the scale of gradients that were not stepped, and makes the entry ready."""
        self.held = None
        if self.stage is UNSCALED and not self.mixed:
            return
        if self.stage is READY and iteration is not None:
            for own in iteration.losses.values():
                if own.passes and own.reaches(self):
                    bad = own.finite ^ True
                    self.lacking = bad if self.lacking is None else self.lacking | bad
        if self.stage is READY or self.stepped_at < passes.count:
            if iteration is not None and iteration.passes and not iteration.captured:
                self.left = iteration.scale
            elif not self.known and passes.last is not None and not passes.last.captured:
                self.left = passes.last.scale
        self.known = True
        self.make_ready()
        if self.skipped is True:
            self.clear_skipped(passes.entries, alone=self.stepped_at == passes.count)

    def added(self, iteration: Iteration | None, entries: Entries) -> None:
        """A pass of `iteration` has changed its unscaled gradients."""
        if self.stage is not UNSCALED:
            return
        if iteration is None or iteration.number != self.unscaled_in:
            self.make_ready()
            self.left = None
            return
        mine = self.param_ids()
        for entry in entries.all:
            if entry is self or not mine.isdisjoint(entry.param_ids()):
                entry.mixed = True

    def rescale(self, scale: Scale, brought: set[int] | None = None) -> None:
        """Brings the gradients that were left for it to another `scale`.

        But for those of the parameters whose ids are in `brought`, to which it adds its own:
        another optimizer may have them too.
        """
        left, self.left = self.left, None
        if left is None or left is scale:
            return
        if left.number is not None and left.number == scale.number:
            return
        params = with_grad(self.param_groups())
        if brought is not None:
            params = [param for param in params if id(param) not in brought]
            brought.update(map(id, params))
        if params:
            multiply(values_of(params), scale.over(left))

    def leave_unseen(self, scale: Scale) -> None:
        """Remembers the `scale` of gradients that no step has used, made by no pass of this rank.

        What comes to the same parameters later, as they are, has another one.
        """
        params = with_grad(self.param_groups())
        if params:
            grad: Any = params[0].grad
            self.left, self.unseen = scale, (weakref.ref(grad), version_of(grad))

    def check_unseen(self) -> None:
        """Forgets the scale of unseen gradients if they have been replaced or written to."""
        (ref, version), self.unseen = self.unseen, None  # type: ignore[misc]
        grads = [param.grad for param in with_grad(self.param_groups())[:1]]
        if not grads or grads[0] is not ref() or version_of(grads[0]) != version:
            self.left = None

    def note_stepped(self, step: Step, count: int) -> None:
        """Remembers that its gradients were used when `count` passes had begun."""
        self.step, self.stage, self.stepped_at, self.left = step, STEPPED, count, None
        self.lacking = None
        self.skipped = False if step.nothing else step.skip
        params = self.stepped_params = step.grads.params
        if not params:
            self.witness = None
            return
        grad: Any = params[0].grad
        if len(step.entries) > 1:
            grad = next((p.grad for p in with_grad(self.param_groups())), None)
        self.witness = None if grad is None else (weakref.ref(grad), version_of(grad))
        self.skipped_grads = None
        if self.skipped is True:
            grads = [(id(p), p.grad) for p in params]
            self.skipped_grads = {key: weakref.ref(g) for key, g in grads if g is not None}

    def has_new_gradients(self, params: Sequence[Tensor], written: bool = True) -> bool:
        """Whether its first gradient is another than at its last step, or was `written` to."""
        if not params:
            return False
        if self.witness is None:
            return True
        ref, version = self.witness
        grad = ref()
        if grad is None or params[0].grad is not grad:
            return True
        return written and version_of(grad) != version

    def clear_skipped(self, entries: Entries, alone: bool = False) -> None:
        """Sets the gradients of a step that was skipped to 0, those that are still there.

        For others of `entries` that have had them as well, they are not new by that. With `alone`,
        no pass has begun since: who has written to them has clipped them, say for another optimizer
        that shares them.
        """
        skipped, self.skipped = self.skipped, False
        known = self.skipped_grads
        if skipped is False or self.witness is None:
            return
        if known is None and self.witness[0]() is None:
            return  # cleared, as in most loops; on a device every step may have been skipped
        params = with_grad(self.param_groups())
        if known is not None:
            params = [p for p in params if id(p) in known and known[id(p)]() is p.grad]
            # The first of them may be gone, for others to whom the parameter belongs as well.
            alone = alone or self.witness[0]() is None
        if self.has_new_gradients(params) and not alone:
            return
        if known is None and params and self.witness[0]() is not params[0].grad:
            return
        if params:
            grads = {id(p.grad): version_of(p.grad) for p in params}
            zero(values_of(params), skipped if isinstance(skipped, bool) else skipped != 0)
            for entry in entries.all:
                ref, version = entry.witness or (lambda: None, 0)
                grad = ref()
                if grad is not None and grads.get(id(grad)) == version:
                    entry.witness = ref, version_of(grad)


class Entries:
    """The entries of all optimizers that a scaler has met, in that order."""

    def __init__(self, consensus: Consensus, tracker: Tracker) -> None:
        self.consensus = consensus
        self._tracker = tracker
        self.all: list[OptimizerEntry] = []
        """Another list when one comes or goes, so that loops over this one go on."""
        self.rows: list[int] = []
        """Steps in a row that were skipped before a checkpoint, for optimizers not met yet."""
        self.gone: list[tuple[int, tuple[Any, int]]] = []
        """Of optimizers that are gone, until the next pass: when they stepped, and the witness."""
        # By id, because an optimizer, or a wrapper of one, need not be hashable.
        self._by_id: dict[int, OptimizerEntry] = {}

    def find(self, optimizer: Any) -> OptimizerEntry | None:
        """The entry of `optimizer`; None if it has none."""
        entry = self._by_id.get(id(optimizer))
        return entry if entry is not None and entry.ref() is optimizer else None

    def of(self, optimizer: Any, call: str) -> OptimizerEntry:
        """The entry of `optimizer`, made if there is none."""
        entry = self._by_id.get(id(optimizer))
        if entry is not None and entry.ref() is optimizer:
            return entry
        if not hasattr(optimizer, "param_groups"):
            raise SettingError(f"{call}() takes an optimizer, got {type(optimizer).__name__}.")
        key, entries = id(optimizer), weakref.ref(self)

        def forget(ref: Any) -> None:
            here = entries()
            entry = None if here is None else here._by_id.get(key)
            if here is not None and entry is not None and entry.ref is ref:
                del here._by_id[key]
                here.all = list(here._by_id.values())
                here._tracker.drop(key)
                if entry.witness is not None:
                    here.gone.append((entry.stepped_at, entry.witness))

        entry = self._by_id[key] = OptimizerEntry(optimizer, forget)
        if self.rows:
            entry.row = self.rows.pop(0)
        self.all = list(self._by_id.values())
        return entry

    def inherit(self, entry: OptimizerEntry, params: Sequence[Tensor], count: int) -> None:
        """Marks a new entry as stepped if another optimizer has stepped its gradients before."""
        others = [(e.stepped_at, e.witness) for e in self.sharing(entry) if e.stage is READY]
        for stepped_at, witness in [*others, *self.gone]:
            if stepped_at != count or witness is None or not params:
                continue
            ref, version = witness
            grads = [p.grad for p in params if p.grad is ref()]
            if grads and ref() is not None and version_of(grads[0]) == version:
                entry.stepped_at, entry.witness = count, witness

    def watch(self, optimizer: Any, masters: Any = None) -> None:
        """Makes `optimizer` known before its first step, with what keeps its masters, if given."""
        entry = self.of(optimizer, "watch")
        entry.known = True
        if masters is not None:
            entry.masters = masters

    def release(self, optimizer: Any) -> None:
        """Drops the masters of `optimizer`, which keep it alive: it takes no further step."""
        entry = self.find(optimizer)
        if entry is not None:
            entry.masters = None

    def is_unscaled(self, optimizer: Any) -> bool:
        """Whether the gradients of `optimizer` are unscaled and wait for its step."""
        entry = self.find(optimizer)
        return entry is not None and entry.stage is UNSCALED

    def in_use(self) -> list[OptimizerEntry]:
        """The entries whose gradients have been read in this iteration."""
        return [
            entry
            for entry in self.all
            if entry.held is not None
            and (entry.stage is not READY or entry.stats is not None or entry.decision is not None)
        ]

    def sharing(self, entry: OptimizerEntry) -> list[OptimizerEntry]:
        """Other entries that have a parameter of `entry`."""
        mine = entry.param_ids()
        others = [each for each in self.all if each is not entry]
        return [each for each in others if not mine.isdisjoint(each.param_ids())]

    def params_in(self, ids: Any) -> list[Tensor]:
        """The parameters of all entries whose id is in `ids`."""
        found = (p for entry in self.all for group in entry.param_groups() for p in group["params"])
        return list({id(p): p for p in found if id(p) in ids}.values())

    def mark_mixed(self, params: list[Tensor]) -> None:
        """Marks the entries of `params`: a pass has added to gradients that are unscaled."""
        ids = set(map(id, params))
        for entry in self.all:
            if entry.stage is not STEPPED and not ids.isdisjoint(entry.param_ids()):
                entry.mixed = True

    def skipped_rows(self) -> list[int]:
        """Steps in a row that were skipped, of every optimizer. Waits for the device."""
        return [*(int(entry.row) for entry in self.all), *self.rows]

    def restore_rows(self, rows: Sequence[int]) -> None:
        """Goes on with such counts, in place on a device; optimizers met later take theirs then."""
        self.rows = list(rows)
        for entry in self.all:
            row = self.rows.pop(0) if self.rows else 0
            if isinstance(entry.row, Tensor):
                entry.row.fill_(row)
            else:
                entry.row = row

    def as_torch(self, device: torch.device | None) -> dict[Any, dict[str, Any]]:
        """Torch's `_per_optimizer_states`: a copy; writing to it has no effect."""
        states = {
            id(entry.held): {
                "stage": entry.stage,
                "found_inf_per_device": found_inf_per_device(entry, device),
            }
            for entry in self.in_use()
        }
        return defaultdict(_refresh_per_optimizer_state, states)


def found_inf_per_device(
    entry: OptimizerEntry, device: torch.device | None
) -> dict[torch.device, Tensor]:
    """Torch's flags: float32, 1 if a gradient on that device is not finite."""
    stats = entry.found()
    if stats is None or device is None:
        return {}
    finite = stats.finite
    params = with_grad(entry.param_groups())
    devices = dict.fromkeys([param.device for param in params] or [device])
    flag = (
        (~finite).float()
        if isinstance(finite, Tensor)
        else torch.full((), float(not finite), dtype=torch.float32, device="cpu")
    )
    return {each: flag.to(each) for each in devices}


def version_of(grad: Any) -> int:
    """What changes with every write to a gradient; that of a DTensor is of its local tensor."""
    return int(grad._version if type(grad) is Tensor else local(grad)._version)


def refuse_stage(entry: OptimizerEntry, call: str, unscaled: bool) -> None:
    """Raises a CallOrderError if `call` cannot come now; `unscaled` if it may after unscale_()."""
    if entry.mixed and not with_grad(entry.param_groups()):
        entry.make_ready()
    if entry.stage is STEPPED:
        raise CallOrderError(
            f"{call}() was called after step() for the same optimizer, without update() in "
            "between. Call update() once per iteration, after the last step()."
        )
    if entry.mixed:
        raise CallOrderError(
            f"{call}(): a backward pass has added scaled gradients to the unscaled ones of this "
            "optimizer, after unscale_() and before step(). Call unscale_() after the last "
            "backward pass of an iteration, or optimizer.zero_grad() in between."
        )
    if entry.stage is UNSCALED and not unscaled:
        raise CallOrderError(
            f"{call}() was called twice for the same optimizer: the gradients are unscaled "
            "already. Call step() and update() before the next one."
        )
