"""The step of our optimizers on the CPU without kernels: what it checks, and how little it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradscale
from gradscale import StateError
from gradscale.torch import optim

ROOT = str(Path(gradscale.__file__).parent)


def weights(number: int = 3) -> list[Tensor]:
    made = [torch.arange(4.0 + n).requires_grad_() for n in range(number)]
    for w in made:
        w.grad = torch.ones_like(w)
    return made


def test_a_step_runs_few_functions_of_two_files() -> None:
    optimizer = optim.AdamW(weights())
    calls: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename.startswith(ROOT):
            calls.append(Path(frame.f_code.co_filename).name)

    for _ in range(3):
        before = sys.gettrace()
        calls.clear()
        sys.settrace(trace)
        try:
            optimizer.step()
        finally:
            sys.settrace(before)
    assert len(calls) <= 10
    assert set(calls) == {"adam.py", "fused.py"}


def test_a_group_that_is_added_is_stepped() -> None:
    ours, theirs = weights(), weights()
    for some, kind in ((ours, optim.AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind(some[:2], fused=True)
        optimizer.step()
        optimizer.add_param_group({"params": some[2:], "lr": 0.5})
        optimizer.step()
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        optimizer.step()
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("kind", "setting", "name"),
    [
        (optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (optim.SGD, {"momentum": 0.5}, "momentum_buffer"),
    ],
)
def test_a_setting_that_takes_other_states_is_heeded(kind: Any, setting: Any, name: str) -> None:
    some = weights()
    optimizer = kind(some, lr=0.1)
    for _ in range(2):
        optimizer.step()
    optimizer.param_groups[0].update(setting)
    optimizer.step()
    assert all(optimizer.state[w][name].all() for w in some)


def test_a_state_that_is_dropped_begins_again() -> None:
    some = weights()
    optimizer = optim.AdamW(some)
    for _ in range(3):
        optimizer.step()
    del optimizer.state[some[0]]["exp_avg"]
    optimizer.state[some[1]].clear()
    optimizer.step()
    assert optimizer.state[some[0]]["exp_avg"].tolist() == [pytest.approx(0.1)] * 4
    assert [float(optimizer.state[w]["step"]) for w in some] == [4.0, 1.0, 4.0]


def test_a_parameter_of_another_size_does_not_step_with_old_states() -> None:
    some = weights()
    optimizer = optim.AdamW(some)
    optimizer.step()
    some[1].grad = None
    some[1].data = torch.zeros(64)
    some[1].grad = torch.ones(64)
    with pytest.raises(StateError, match="shape"):
        optimizer.step()


def test_a_step_that_is_skipped_leaves_no_trace() -> None:
    some = weights()
    optimizer: Any = optim.AdamW(some)
    optimizer.step()
    before = [[w.tolist(), *(v.tolist() for v in optimizer.state[w].values())] for w in some]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [[w.tolist(), *(v.tolist() for v in optimizer.state[w].values())] for w in some]
    assert after == before
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert [float(optimizer.state[w]["step"]) for w in some] == [2.0] * 3
