"""How far an iteration goes through the package: bounds on calls, files and jumps between files."""

from __future__ import annotations

import calls
import pytest

BOUNDS = {
    "drop-in": calls.Count(calls=110, files=10, jumps=50),
    "apply": calls.Count(calls=100, files=14, jumps=60),
    "ddp": calls.Count(calls=160, files=16, jumps=70),
}


@pytest.mark.parametrize("loop", calls.LOOPS)
def test_calls_of_an_iteration_are_counted_and_it_stays_short(loop: str) -> None:
    found, most = calls.count(loop), BOUNDS[loop]
    assert found.calls > found.files > 1
    assert found.jumps >= found.files - 1
    for name in calls.Count._fields:
        assert 0 < getattr(found, name) <= getattr(most, name), (name, found)
