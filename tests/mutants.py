"""Plants faults in our own code, one at a time, and shows that a test notices each: `make mutants`.

A fault is a text that stands exactly once in a file, and what to put in its place. Each is planted
in a copy of the tree, so nothing here is touched. What fails: a fault that no test notices, one
whose text is gone, and a test that fails without any fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    """One planted fault and the test file that must notice it."""

    what: str
    file: str
    old: str
    new: str
    test: str


FAULTS = [
    Fault(
        "loaded masters are rounded to their weights",
        "torch/optim/masters.py",
        "optimizer.state[param][name] = _copied(value, param.device)",
        "pass",
        "tests/torch/test_masters.py",
    ),
    Fault(
        "calibration leaves the statistics of batch norms behind",
        "torch/calibrating.py",
        "moment = Moment([] if model is None else [model])",
        "moment = Moment([])",
        "tests/torch/test_calibrating.py",
    ),
    Fault(
        "a weight is cast that float16 does not have",
        "torch/master/casting.py",
        "if formats[name] is torch.float16 and bool(_overflows(param)):",
        "if False:",
        "tests/torch/test_master.py",
    ),
    Fault(
        "a kept module runs under autocast",
        "torch/master/casting.py",
        "put_around(module, Inside(module, torch.float32, None))",
        "put_around(module, Inside(module, torch.float32, torch.bfloat16))",
        "tests/torch/test_master.py",
    ),
    Fault(
        "outputs leave in float16",
        "torch/master/casting.py",
        "Inside(model, dtype, dtype, torch.float32)",
        "Inside(model, dtype, dtype)",
        "tests/torch/test_master.py",
    ),
    Fault(
        "masters are rounded when they are loaded",
        "torch/master/masters.py",
        "        masters.take_unrounded(optimizer, self._saved)\n",
        "",
        "tests/torch/test_master.py",
    ),
    Fault(
        "gradients of a second pass replace those of the first",
        "torch/master/masters.py",
        "stand.grad = wide if stand.grad is None else stand.grad + wide",
        "stand.grad = wide",
        "tests/torch/test_master.py",
    ),
    Fault(
        "a master does not hear of what is written to its weight",
        "torch/master/masters.py",
        "            masters.follow(weight, state)\n",
        "            pass\n",
        "tests/torch/test_master.py",
    ),
    Fault(
        "averages of half weights stay half",
        "torch/master/masters.py",
        "return value.float() if half else value",
        "return value",
        "tests/torch/test_master.py",
    ),
    Fault(
        "masters begin with rounded weights",
        "torch/precision/models.py",
        "begin(param, owner.state[param], whole, self.mode.master)",
        "pass",
        "tests/torch/test_precision.py",
    ),
    Fault(
        "an optimizer moves weights without their masters",
        "torch/precision/models.py",
        "        optimizer.register_step_pre_hook(_guard(masters))\n",
        "",
        "tests/torch/test_precision.py",
    ),
    Fault(
        "gradients that were left are divided by the scale of another pass",
        "torch/precision/steps.py",
        "stand.grad.mul_(window.scale if rest is None else rest * window.scale)",
        "pass",
        "tests/torch/test_precision_masters.py",
    ),
    Fault(
        "a retry has another random state",
        "torch/precision/mixed.py",
        "            self.retries += 1\n            moment.restore()",
        "            self.retries += 1",
        "tests/torch/test_precision_runs.py",
    ),
    Fault(
        "patience holds up a retry",
        "torch/moving.py",
        'range(getattr(self._policy, "hysteresis", 1) - 1)',
        "range(0)",
        "tests/torch/test_precision_runs.py",
    ),
    Fault(
        "micro-batches that are left out are not made up for",
        "torch/losses.py",
        "multiply(values_of(new), (window.spared / rest).to(torch.float32))",
        "pass",
        "tests/torch/test_precision_runs.py",
    ),
    Fault(
        "micro-batches that overflow do not lower the scale",
        "torch/moving.py",
        "                finite = finite & (window.dropped == 0)",
        "                pass",
        "tests/torch/test_precision_runs.py",
    ),
    Fault(
        "a step of nothing but bad micro-batches is applied",
        "torch/checking.py",
        "            finite = finite & (window.dropped < window.spared)",
        "            pass",
        "tests/torch/test_precision_runs.py",
    ),
    Fault(
        "a checkpoint is written over the old one",
        "torch/checkpoint.py",
        'part = target.with_name(f".{target.name}.{platform.node()}.{os.getpid()}.part")',
        "part = target",
        "tests/torch/test_checkpoint.py",
    ),
    Fault(
        "buffers that were made anew are not put back",
        "torch/moment.py",
        "module._buffers[name] = buffer.copy_(kept)",
        "buffer.copy_(kept)",
        "tests/torch/test_moment.py",
    ),
    Fault(
        "a full log of replays goes on past its end",
        "torch/replays.py",
        "torch.arange(parts, device=log.device)) % len(ring)",
        "torch.arange(parts, device=log.device)).clamp(max=len(ring) - 1)",
        "tests/torch/test_replays.py",
    ),
    Fault(
        "eager events are told before those of the replays that came first",
        "torch/events.py",
        "if step > self._step + 1 and",
        "if step > self._step + 1000000 and",
        "tests/torch/test_scaler_graphs.py",
    ),
    Fault(
        "a second iteration in a graph has the scale of the first",
        "torch/stepping.py",
        "self._window = self._made = None",
        "pass",
        "tests/torch/test_scaler_graphs.py",
    ),
    Fault(
        "a load takes the counters of skips away from the graphs",
        "torch/scaler.py",
        "for row in self._rows.values():\n                row.zero_()",
        "self._rows.clear()\n            for row in ():\n                row.zero_()",
        "tests/torch/test_scaler_graphs.py",
    ),
    Fault(
        "the scale grows one step late, as in Flax and DeepSpeed",
        "policy/dynamic.py",
        "grow = good_steps >= ",
        "grow = good_steps > ",
        "tests/test_policy.py",
    ),
    Fault(
        "the scale has no floor, as in torch",
        "policy/dynamic.py",
        "constant(self.backoff_factor), constant(self.min_scale))",
        "constant(self.backoff_factor), constant(0.0))",
        "tests/test_policy_laws.py",
    ),
    Fault(
        "hysteresis counts all bad steps, as in Megatron",
        "policy/dynamic.py",
        "bad_steps = xp.where(finite, zero, ",
        "bad_steps = xp.where(finite, state.bad_steps, ",
        "tests/test_policy_laws.py",
    ),
    Fault(
        "a loss that is not finite moves the scale",
        "policy/dynamic.py",
        "always & stats.finite, always & stats.loss_finite",
        "always & stats.finite, always",
        "tests/test_policy_laws.py",
    ),
    Fault(
        "constants are left to be promoted",
        "policy/dynamic.py",
        "return xp.full_like(state.scale, value)",
        "return value",
        "tests/test_policy.py",
    ),
    Fault(
        "the counter of finite steps is not saved",
        "states.py",
        '"_growth_tracker": state.pop("good_steps", 0),',
        '"_growth_tracker": 0 * state.pop("good_steps", 0),',
        "tests/test_states.py",
    ),
    Fault(
        "minus infinity is overlooked",
        "torch/unscale.py",
        "for end in torch.aminmax(piece)])",
        "for end in torch.aminmax(piece)][1::2])",
        "tests/torch/test_unscale.py",
    ),
    Fault(
        "values that do not fit once unscaled are let through, as in torch",
        "torch/unscale.py",
        "fits = fits & move(torch.isfinite(unscaled.to(dtype)), fits.device)",
        "pass",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "the factor is rounded to the gradients' format, as in MindSpore",
        "torch/unscale.py",
        "value.copy_(value.float().mul_(here))",
        "value.mul_(here.to(dtype))",
        "tests/torch/test_unscale.py",
    ),
    Fault(
        "bad gradients are cleared by multiplication",
        "torch/unscale.py",
        "value.masked_fill_(here, 0)",
        "value.mul_(~here)",
        "tests/torch/test_unscale.py",
    ),
    Fault(
        "a norm whose square overflows is infinite",
        "torch/unscale.py",
        "amax > _LARGE, one / _SHIFT,",
        "amax > _LARGE, one,",
        "tests/torch/test_unscale.py",
    ),
    Fault(
        "gradients are divided by the scale of now, as in DeepSpeed",
        "torch/scaling.py",
        "scale = state.scale.clone()",
        "scale = state.scale",
        "tests/torch/test_scaling.py",
    ),
    Fault(
        "a parameter of two optimizers is divided twice, as in torch",
        "torch/window.py",
        "if mark.begun == self.begun or mark.untouched():\n                return mark",
        "if mark.begun == self.begun or mark.untouched():\n                return None",
        "tests/torch/test_scaling.py",
    ),
    Fault(
        "gradients of two scales are added up without a word",
        "torch/window.py",
        "conflict = left.ne(self.inv_scale)",
        "conflict = left.ne(left)",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "edits after unscale_() are not looked at, as in torch",
        "torch/checking.py",
        "if then is window and not window.edited(params):",
        "if then is window:",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "bad gradients of a skipped step stay, as in torch",
        "torch/scaling.py",
        "clear(values_of(params), skipped)",
        "pass",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "a float16 loss gets any scale",
        "torch/scaling.py",
        "                scale.clamp_(max=_HALF_LOSS_SCALE)",
        "                scale.clamp_(max=2.0**24)",
        "tests/torch/test_scaling.py",
    ),
    Fault(
        "every update() of one window counts, as in accelerate",
        "torch/moving.py",
        "if window.finite is None or window.captured:",
        "if True:",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "a backward pass after update() is divided by the scale of now",
        "torch/checking.py",
        "if window is None or fresh or (had and not window.begun_since(optimizer)):",
        "if window is None or fresh or had:",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "gradients made after unscale_() are taken for unscaled, as in torch",
        "torch/checking.py",
        "if then is not window or window.begun_since(optimizer):",
        "if False:",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "the flag for fused optimizers is a sum, as in torch",
        "torch/contract.py",
        "skipped.to(torch.float32)",
        "2.0 * skipped.to(torch.float32)",
        "tests/torch/test_contract.py",
    ),
    Fault(
        "fused SGD keeps an uninitialised buffer, as in torch",
        "torch/contract.py",
        "buffer.masked_fill_(move(skipped, buffer.device) != 0, 0)",
        "pass",
        "tests/torch/test_contract.py",
    ),
    Fault(
        "one good optimizer of several is enough to step",
        "torch/applying.py",
        "self._skipped(optimizer) for optimizer in optimizers]).any()",
        "self._skipped(optimizer) for optimizer in optimizers]).all()",
        "tests/torch/test_losses.py",
    ),
    Fault(
        "fused optimizers are not told of clipping",
        "torch/applying.py",
        "window.scale if clip_norm is None else factor.reciprocal()",
        "window.scale",
        "tests/torch/test_applying.py",
    ),
    Fault(
        "a parameter of two optimizers is divided by each step",
        "torch/applying.py",
        "if scaled and capable and unshared:",
        "if scaled and capable:",
        "tests/torch/test_applying.py",
    ),
    Fault(
        "followers move with skipped steps, as in Lightning",
        "torch/follow.py",
        "if bool(applied) if ref is None else id(ref()) in applied:",
        "if True:",
        "tests/torch/test_follow.py",
    ),
    Fault(
        "followers come after the next step",
        "torch/stepping.py",
        "        self._followers.catch_up()\n        if not self._enabled:",
        "        if not self._enabled:",
        "tests/torch/test_follow.py",
    ),
    Fault(
        "a callback that raises loses events",
        "torch/events.py",
        "                self._due.popleft()()\n",
        "                due, self._due = self._due, deque()\n"
        "                [call() for call in due]\n",
        "tests/torch/test_events.py",
    ),
    Fault(
        "being stuck is told again and again",
        "torch/events.py",
        "if self._down.get(key, 0) < self.stuck_after <= row:",
        "if self.stuck_after <= row:",
        "tests/torch/test_events.py",
    ),
    Fault(
        "a loss of its own is added at its own scale",
        "torch/losses.py",
        "multiply(values, window.scale / own.scale)",
        "multiply(values, torch.ones_like(own.scale))",
        "tests/torch/test_losses.py",
    ),
    Fault(
        "an overflow of one loss is blamed on all",
        "torch/losses.py",
        "    clear(values, ~own.finite)\n",
        "",
        "tests/torch/test_losses.py",
    ),
    Fault(
        "an overflow of one loss does not skip",
        "torch/checking.py",
        "                finite = finite & own.finite\n",
        "                pass\n",
        "tests/torch/test_losses.py",
    ),
    Fault(
        "a dummy step counts, as in accelerate",
        "torch/moving.py",
        "if window.blank is not None:",
        "if False:",
        "tests/torch/test_checking.py",
    ),
    Fault(
        "NaN is taken for an overflow",
        "torch/outcome.py",
        '            return "NaN at any scale"',
        '            return "scale too high"',
        "tests/torch/test_stepping.py",
    ),
    Fault(
        "DeepSpeed's counter is taken as it is",
        "foreign.py",
        "(good - 1) %",
        "good %",
        "tests/test_foreign_rules.py",
    ),
    Fault(
        "the kernel overlooks NaN",
        "torch/_triton/chunks.py",
        "tl.where(peak == peak, peak, INFINITY), 0), tl.sum",
        "tl.where(peak == peak, peak, 0.0), 0), tl.sum",
        "tests/torch/test_triton.py",
    ),
    Fault(
        "the kernel's norm is infinite where its square is",
        "torch/_triton/chunks.py",
        "    elif amax > _HIGH:\n        exponent = _DOWN",
        "    elif amax > INFINITY:\n        exponent = _DOWN",
        "tests/torch/test_triton.py",
    ),
    Fault(
        "the kernel grows one step late",
        "torch/_triton/deciding.py",
        "grow = new_good >= growth_interval",
        "grow = new_good > growth_interval",
        "tests/torch/test_triton.py",
    ),
    Fault(
        "the kernel counts bad losses for ever",
        "torch/_triton/deciding.py",
        "bad_losses = tl.where(loss_finite, 0, tl.load(bad_losses_at) + 1)",
        "bad_losses = tl.load(bad_losses_at) + 1",
        "tests/torch/test_fast.py",
    ),
    Fault(
        "a skipped step is taken",
        "torch/_triton/adam.py",
        "    if SKIP:\n        if tl.load(skip_at) != 0:\n            return\n",
        "",
        "tests/torch/test_optim.py",
    ),
    Fault(
        "steps are counted once for every piece",
        "torch/_triton/pieces.py",
        'sem="acq_rel") == pieces - 1:',
        'sem="acq_rel") >= 0:',
        "tests/torch/test_optim.py",
    ),
    Fault(
        "arrivals are counted on from step to step",
        "torch/_triton/reading.py",
        "        tl.store(arrivals + 1 + before + owner, 0)\n",
        "",
        "tests/torch/test_triton.py",
    ),
    Fault(
        "AdamW decays as Adam does",
        "torch/optim/adam.py",
        'group["decoupled_weight_decay"]',
        "False",
        "tests/torch/test_optim.py",
    ),
    Fault(
        "SGD dampens its first step",
        "torch/_triton/sgd.py",
        "taken = tl.where(tl.load(count_at) == 0, 1.0, taken)",
        "taken = taken",
        "tests/torch/test_optim.py",
    ),
    Fault(
        "a split master is cut off instead of rounded",
        "torch/_triton/pieces.py",
        "high = (bits + 0x8000) >> 16",
        "high = bits >> 16",
        "tests/torch/test_masters.py",
    ),
    Fault(
        "what others write to a weight is lost",
        "torch/optim/onepass.py",
        "                    self._follow_edits(plan)\n",
        "                    pass\n",
        "tests/torch/test_masters.py",
    ),
    Fault(
        "states that are replaced are not noticed",
        "torch/optim/plan.py",
        "if not all(some.stand() for some in self.members):",
        "if False:",
        "tests/torch/test_optim.py",
    ),
    Fault(
        "gradients marked at once are never edited",
        "torch/window.py",
        "return not self._at_once.untouched(params)",
        "return False",
        "tests/torch/test_scaler.py",
    ),
    Fault(
        "a step with a closure is not undone",
        "torch/closure.py",
        "except _Undo:\n            undo()",
        "except _Undo:",
        "tests/torch/test_closure.py",
    ),
    Fault(
        "closures see scaled gradients, as in torch",
        "torch/closure.py",
        "self.reading = unscale(values, window.inv_scale, ",
        "self.reading = unscale(values, window.inv_scale * 2, ",
        "tests/torch/test_closure.py",
    ),
    Fault(
        "a compiler's copies are written over the result of a step",
        "torch/compiled.py",
        "        given.copy_(mine.detach())",
        "        pass",
        "tests/torch/test_compiled.py",
    ),
    Fault(
        "what a graph did before a step is lost",
        "torch/compiled.py",
        "        mine.data.copy_(given)",
        "        pass",
        "tests/torch/test_compiled.py",
    ),
    Fault(
        "a compiled backward pass does not say which window it belongs to",
        "torch/compiled.py",
        "    owner._begin_pass(mine, loss, grad)",
        "    pass",
        "tests/torch/test_compiled.py",
    ),
    Fault(
        "the compiler looks into step()",
        "torch/stepping.py",
        'return compiled.outside(self, "step", optimizer, *args, **kwargs)',
        "pass",
        "tests/torch/test_outside.py",
    ),
    Fault(
        "bad steps that no scale can cure widen the margin for ever",
        "policy/headroom.py",
        "spread = xp.where(incurable | explained, state.kept, state.spread)",
        "spread = state.spread",
        "tests/test_policy_sized.py",
    ),
    Fault(
        "one spike moves the level of gradients",
        "policy/headroom.py",
        "level = xp.maximum(low, xp.minimum(high, second))",
        "level = exponent",
        "tests/test_policy_sized.py",
    ),
    Fault(
        "a long run of bad steps is taken for larger gradients",
        "policy/logmax.py",
        "most = state.mean + number(4.0)",
        "most = state.mean + number(4e9)",
        "tests/test_policy_sized.py",
    ),
    Fault(
        "a policy is told the size of gradients at another scale",
        "torch/checking.py",
        "amax = amax * (scale / move(window.scale, scale.device))",
        "pass",
        "tests/torch/test_moving.py",
    ),
    Fault(
        "the kernel of Headroom forgets that overflows were explained",
        "torch/_triton/headroom.py",
        "spread = tl.where(incurable | explained, s_kept, s_spread)",
        "spread = tl.where(incurable, s_kept, s_spread)",
        "tests/torch/test_triton.py",
    ),
    Fault(
        "calibration leaves its gradients behind",
        "torch/calibrating.py",
        "param.grad = grad\n",
        "param.grad = param.grad if grad is None else grad.clone()\n",
        "tests/torch/test_calibrating.py",
    ),
    Fault(
        "a simulated overflow is the weights' alone",
        "simulate/walk.py",
        "finite[step] = (amax + history.above[step] < ceiling)",
        "finite[step] = (amax < ceiling)",
        "tests/test_simulate.py",
    ),
    Fault(
        "a negative number in a state is refused or cut off",
        "states.py",
        "if not -(2**31) <= number < 2**31:",
        "if not 0 <= number < 2**31:",
        "tests/test_states.py",
    ),
    Fault(
        "a rank that has run out of data steps with gradients of its last batch",
        "torch/joining.py",
        "            optimizer.zero_grad(set_to_none=True)\n",
        "            pass\n",
        "tests/torch/test_joining.py",
    ),
    Fault(
        "moments of a rank that ran out of data stay behind",
        "torch/joining.py",
        "                optimizer.load_state_dict(state)\n",
        "                pass\n",
        "tests/torch/test_joining.py",
    ),
    Fault(
        "a rank that never had a loss raises alone",
        "torch/checking.py",
        "if groups and self._state is None:",
        "if False:",
        "tests/torch/test_joining.py",
    ),
    Fault(
        "gradients are divided by the number of ranks before they are added up",
        "torch/reducing.py",
        "return 1 << (ranks - 1).bit_length()",
        "return ranks",
        "tests/torch/test_reducing.py",
    ),
    Fault(
        "the mean is rounded to float16",
        "torch/reducing.py",
        "sums.value()[0].float().div_(",
        "sums.value()[0].div_(",
        "tests/torch/test_reducing.py",
    ),
    Fault(
        "copies count as often in the norm as there are ranks",
        "torch/agree.py",
        "        if first != dist.get_rank() and first not in others:\n",
        "        if False:\n",
        "tests/torch/test_agree_cases.py",
    ),
    Fault(
        "experts are taken for copies",
        "torch/agree.py",
        "return self.shards and (self.of is None or param in self.of)",
        "return self.shards and self.of is None",
        "tests/torch/test_agree_cases.py",
    ),
    Fault(
        "ranks that gather later do not hear of scales that differ",
        "torch/telling.py",
        "mark=marks[0] if all(mark == marks[0] for mark in marks) else -1.0,",
        "mark=marks[0],",
        "tests/torch/test_drift.py",
    ),
    Fault(
        "a rank that a loss has not reached steps where others do not",
        "torch/settling.py",
        "            if losses:\n                self._held_back[key] = held_back\n",
        "",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "a rank without a loss that others have sends fewer words",
        "torch/settling.py",
        "            if loss_id not in window.losses:\n",
        "            if False:\n",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "the common scale grows where no rank had a loss of it",
        "torch/settling.py",
        "            window.common = told.common > 0\n",
        "            window.common = told.common >= 0\n",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "the share near the ceiling is that of one rank",
        "torch/settling.py",
        "measured.upper = told.near / told.elements.clamp(min=1)",
        "pass",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "a penalty is judged by one rank alone",
        "torch/settling.py",
        "        window.penalty_finite = told.bad_penalty == 0\n",
        "",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "a pass is left out by one rank alone",
        "torch/losses.py",
        "        finite = agreed(finite, made)\n",
        "",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "gradients that FSDP has put elsewhere are not brought to the common scale",
        "torch/losses.py",
        "    others = [param for param in known if id(param) not in inside]\n",
        "    others: list[Tensor] = []\n",
        "tests/torch/test_settling.py",
    ),
    Fault(
        "summands are taken for the sum",
        "torch/shards.py",
        "        if grad.placements != wanted:\n",
        "        if False:\n",
        "tests/torch/test_agree.py",
    ),
    Fault(
        "a part of a DTensor that stood in for it is not seen to have changed",
        "torch/optim/onepass.py",
        "            torch.autograd.graph.increment_version([param])\n",
        "            pass\n",
        "tests/torch/test_shards.py",
    ),
    Fault(
        "the kernel takes the lowest rank for the highest",
        "torch/_triton/agreeing.py",
        "        lowest = tl.minimum(lowest, tl.load(row + 11))\n",
        "        lowest = tl.load(row + 11)\n",
        "tests/torch/test_agreeing.py",
    ),
    Fault(
        "the kernel forgets ranks but the last in the norm",
        "torch/_triton/agreeing.py",
        "        squares += part * part\n",
        "        squares = part * part\n",
        "tests/torch/test_agreeing.py",
    ),
    Fault(
        "a checkpoint without a scaler loads in silence",
        "torch/checkpoint.py",
        "        if key in there:\n            continue\n",
        "        continue\n",
        "tests/torch/test_checkpoint.py",
    ),
    Fault(
        "gradients that were left for an optimizer that never stepped are forgotten",
        "torch/precision/models.py",
        "            self.scaler._watch(optimizer)\n",
        "            pass\n",
        "tests/torch/test_precision_masters.py",
    ),
]


def passes(test: str, tree: Path) -> tuple[bool, str]:
    """Whether the tests in `test` pass in `tree`, and what they printed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--hypothesis-profile=fixed", test],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode > 1:  # below 0, the fault has crashed it
        raise RuntimeError(f"pytest {test} ended with {run.returncode}: {run.stdout}{run.stderr}")
    return run.returncode == 0, run.stdout[-2000:]


def wrong_with(fault: Fault, tree: Path) -> str | None:
    """None if a test fails because of `fault`, else what is wrong."""
    path = tree / "gradscale" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        return f"its text stands {text.count(fault.old)} times in {fault.file}, not once"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        unnoticed, _ = passes(fault.test, tree)
    finally:
        path.write_text(text)
    return f"{fault.test} passes all the same" if unnoticed else None


def main() -> int:
    """How many faults went unnoticed."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("gradscale", "tests", "docs", "pyproject.toml"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, tree / name)
        for test in sorted({fault.test for fault in FAULTS}):
            sound, printed = passes(test, tree)
            if not sound:
                missed += 1
                print(f"{test} fails without any fault:\n{printed}")
        for fault in FAULTS:
            wrong = wrong_with(fault, tree)
            missed += wrong is not None
            print(f"{'noticed' if wrong is None else 'MISSED '}  {fault.what}", flush=True)
            if wrong is not None:
                print(f"         {wrong}")
    print(f"{max(len(FAULTS) - missed, 0)} passed, {missed} failed")
    return missed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
