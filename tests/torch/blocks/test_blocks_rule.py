"""Where the rule puts the scales of blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradscale.errors import SettingError
from gradscale.torch.blocks import BlockPolicy
from gradscale.torch.blocks.rule import MAX_EXPONENT, TINY, VANISHED, BlockState, _in_runs


def state_of(*exponents: int, resting: int = 0) -> BlockState:
    numbers = torch.tensor(exponents, dtype=torch.int32)
    return BlockState(numbers, torch.full_like(numbers, resting))


def moved(rows: list[list[float]], *exponents: int, resting: int = 0) -> list[int]:
    """The exponents after entering, leaving, weights and, if there is a fourth row, smallest."""
    rows = [*rows, [0.0] * len(exponents)][:4]  # nothing is small
    new = BlockPolicy().update(state_of(*exponents, resting=resting), torch.tensor(rows))
    return new.exponents.tolist()


inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("rows", "before", "after"),
    [
        ([[2.0**-6], [0.0], [0.0]], [0], [0]),  # just high enough
        ([[2.0**-6 * 0.99], [0.0], [0.0]], [0], [10]),
        ([[4095.0], [0.0], [16380.0]], [25], [25]),  # just low enough
        ([[4096.0], [0.0], [0.0]], [25], [16]),
        ([[1.0], [4096.0], [0.0]], [0], [-9]),
        ([[1.0], [0.0], [16384.0]], [0], [-9]),
        ([[2.0**-30, 2.0**-10], [0.0, 0.0], [0.0, 0.0]], [0, 0], [33, 13]),
        ([[0.0, 0.0, 2.0**-10], [0.0] * 3, [0.0] * 3], [3, 1, 0], [16, 14, 13]),  # follow
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [3, -4], [3, -4]),
        ([[nan, inf], [nan, inf], [nan, inf]], [3, -4], [3, -4]),  # not for a block to cure
        ([[nan, 64.0], [nan, inf], [nan, 1.0]], [3, 4], [-5, -4]),
        ([[8.0], [1.0], [inf]], [0], [-8]),
        ([[2.0**20], [nan], [nan]], [0], [-17]),  # falls further from further up
        ([[2.0**-12], [nan], [nan]], [0], [-3]),  # and not below the normal numbers
        ([[2.0**-20], [nan], [nan]], [0], [0]),
        ([[2.0**-100], [0.0], [0.0]], [0], [60]),
    ],
)
def test_rule_places_blocks(rows: Any, before: list[int], after: list[int]) -> None:
    assert moved(rows, *before) == after


def test_block_stays_lower_for_a_while_after_a_fault() -> None:
    rule = BlockPolicy(rest=3)
    fault = torch.tensor([[64.0], [inf], [1.0], [0.0]])
    quiet = torch.tensor([[0.01], [0.01], [0.01], [0.01]])
    state = rule.update(state_of(0), fault)
    assert (state.exponents.item(), state.resting.item()) == (-8, 3)
    for resting in (2, 1, 0):
        state = rule.update(state, quiet)
        assert (state.exponents.item(), state.resting.item()) == (-8, resting)
    assert rule.update(state, quiet).exponents.item() == 0  # at 2.56, as what comes after it


def test_resting_block_is_placed_lower() -> None:
    for resting in (9, 128):  # also after four faults
        assert moved([[2.0**-13], [0.0], [0.0]], 0, resting=resting) == [0]
        assert moved([[2.0**-16], [0.0], [0.0]], 0, resting=resting) == [11]  # not 2**4
    assert moved([[2.0**14], [0.0], [0.0]], 25, resting=9) == [6]
    assert moved([[64.0], [0.0], [0.0]], -8, resting=9) == [-8]  # it does not rise


@pytest.mark.parametrize(
    ("smallest", "before", "after", "resting"),
    [
        (0.0, 0, 0, 0),  # there is none
        (2.0**-11, 0, 0, 0),
        (2.0**-12, 0, 5, 0),
        (2.0**-15, 0, 5, 0),  # as far as there is room: 2**6 becomes 2**11
        (2.0**-15, 1, 6, 0),
        (VANISHED, 1, 6, 0),
        (VANISHED, 0, 0, 1),  # it overflowed not long ago
        (inf, 0, 0, 0),
    ],
)
def test_block_in_which_gradients_vanish_rises(
    smallest: float, before: int, after: int, resting: int
) -> None:
    rows = [[32.0], [32.0], [32.0], [smallest]]
    assert moved(rows, before, resting=resting) == [after]


def test_blocks_below_one_that_rises_follow() -> None:
    zero, alive = VANISHED, 32.0
    rows = [[0.0, zero, alive, alive], [0.0, zero, zero, alive], [0.0, zero, zero, alive]]
    assert moved([*rows, [0.0, zero, zero, alive]], 30, 24, 24, 0) == [35, 29, 29, 0]
    # Two passes without a gradient add up to no gradient.
    rows = [[2 * zero, alive], [2 * zero, 2 * zero], [zero, zero], [zero, zero]]
    assert moved(rows, 30, 24) == [35, 29]


@pytest.mark.parametrize(
    ("found", "smallest", "before", "after"),
    [
        ([64.0, 64.0, 64.0], 0.0, [18, 18, 18], [18, 18, 18]),
        ([64.0, 64.0, 64.0], 0.0, [17, 20, 17], [16, 16, 16]),  # fewer changes
        ([64.0, 64.0], 0.0, [0, 1], [0, 0]),
        ([64.0, 64.0], 0.0, [12, 29], [12, 29]),
        ([16.0, 64.0], 0.0, [3, 4], [0, 0]),  # as what comes after the last block
        ([2.0**-28, 2.0**-15, 2.0**-10], 0.0, [0, 0, 0], [31, 16, 16]),
        ([2.0**-6, 1.0], 0.0, [0, 0], [0, 0]),  # all are in their places
        ([2.0**-7, 2.0**-5], 0.0, [0, 0], [10, 0]),
        ([0.0, 64.0], 0.0, [19, 18], [19, 18]),  # there was nothing to see
        ([inf, 64.0], 0.0, [19, 18], [19, 18]),
    ],
)
def test_blocks_have_one_scale_where_they_can(
    found: list[float], smallest: float, before: list[int], after: list[int]
) -> None:
    none = [0.0] * len(found)
    assert moved([found, none, none, [smallest] * len(found)], *before) == after


def in_runs(least: list[int], most: list[int], bias: int) -> list[int]:
    """What `_in_runs()` finds, one block after the other."""
    want: list[int] = []
    size, low, high = 1, 0, 0
    for a, b in zip([*reversed(least), 99], [*reversed(most), -99], strict=True):
        if max(low, a) > min(high, b):
            want += [min(max((low + high) // 2 + bias, low), high)] * size
            size, low, high = 0, -1000, 1000
        size, low, high = size + 1, max(low, a), min(high, b)
    return want[:0:-1]


intervals = st.tuples(st.integers(-30, 30), st.integers(0, 9))


@given(st.lists(intervals, min_size=1, max_size=40), st.integers(-3, 3))
def test_runs_are_those_of_a_loop(drawn: list[tuple[int, int]], bias: int) -> None:
    least, most = [a for a, _ in drawn], [a + more for a, more in drawn]
    found = _in_runs(torch.tensor(least), torch.tensor(most), bias).tolist()
    assert found == in_runs(least, most, bias)
    assert all(a <= e <= b for a, e, b in zip(least, found, most, strict=True))


@given(st.lists(intervals, min_size=1, max_size=6))
def test_there_are_no_exponents_with_fewer_changes(drawn: list[tuple[int, int]]) -> None:
    least, most = [a for a, _ in drawn], [a + more for a, more in drawn]

    def changes(exponents: list[int]) -> int:
        return sum(a != b for a, b in itertools.pairwise([*exponents, 0]))

    # Bounds of blocks are exponents enough: a run can always move to the nearest.
    fewest = {0: 0}
    for a, b in reversed(list(zip(least, most, strict=True))):
        choices = {e for e in (0, *least, *most) if a <= e <= b}
        fewest = {e: min(n + (e != last) for last, n in fewest.items()) for e in choices}
    found = _in_runs(torch.tensor(least), torch.tensor(most), 0).tolist()
    assert changes(found) == min(fewest.values())


@given(st.lists(st.tuples(st.integers(-40, 9), st.integers(-20, 0)), min_size=1, max_size=30))
def test_blocks_of_a_run_are_in_their_places(natural: list[tuple[int, int]]) -> None:
    """Gradients as they are at the scale 1, and by how much the smallest is smaller."""
    rule, num = BlockPolicy(), len(natural)

    def rows_at(exponents: Tensor) -> Tensor:
        found = torch.tensor([2.0**n for n, _ in natural]) * 2.0**exponents
        small = found * torch.tensor([2.0**less for _, less in natural])
        return torch.stack([found, found, found, small])

    state = rule.init(num, torch.device("cpu"))
    state = rule.update(state, rows_at(state.exponents))
    found, smallest = rows_at(state.exponents)[0], rows_at(state.exponents)[3]
    assert ((found >= 2.0**-6) & (found < 4096)).all()
    assert ((smallest >= 2.0**-11) | (found >= 2.0**6)).all()
    for _ in range(3):
        again = rule.update(state, rows_at(state.exponents))
        assert torch.equal(again.exponents, state.exponents)
        state = again


def test_sixty_blocks_over_47_binades_have_four_changes() -> None:
    """Those of the benchmark: weights have larger gradients, and inputs smaller ones."""
    natural = 2.0 ** torch.linspace(-47, 0, 60)
    rows = torch.stack([natural, natural / 2, natural * 16, natural / 2])
    exponents = BlockPolicy().update(state_of(*[0] * 60), rows).exponents
    assert int((exponents.diff() != 0).sum()) <= 4


@given(st.integers(-1, 1), st.integers(0, 2**30))
def test_blocks_stay_where_gradients_waver(drift: int, seed: int) -> None:
    """By half a binade to and fro, and one binade all together."""
    natural = 2.0 ** torch.linspace(-47, 0, 60)
    wave = torch.rand(60, generator=torch.Generator().manual_seed(seed)) - 0.5
    rows = torch.stack([natural, natural / 2, natural * 16, natural / 2])
    state = BlockPolicy().update(state_of(*[0] * 60), rows)
    again = BlockPolicy().update(state, rows * 2.0 ** (state.exponents + wave))
    assert torch.equal(again.exponents, state.exponents)


@pytest.mark.parametrize("fall", [12, 20, 100])
def test_batch_with_small_gradients_raises_no_block_far(fall: int) -> None:
    """After the early updates: those of the next batch must not overflow."""
    natural = 2.0 ** torch.linspace(-20, 5, 30)
    rows = torch.stack([natural, natural / 2, natural, natural / 2])
    rule = BlockPolicy()
    state = rule.update(state_of(*[0] * 30), rows)
    small = rows * 2.0 ** (state.exponents - fall)
    small[1:, :20] = VANISHED
    assert rule.update(state, small).exponents[-1] > 5
    later = rule.update(state, small, early=False)
    assert torch.equal(later.exponents, state.exponents + 2)


@pytest.mark.parametrize("shrink", [1, 7, 13, 20])
@pytest.mark.parametrize("num", [3, 60])
def test_no_block_waits_for_ever(shrink: int, num: int) -> None:
    """Every block takes `shrink` binades from gradients, until exponents have no room left."""
    num = min(num, 48 // shrink + 1)
    state = BlockPolicy().init(num, torch.device("cpu"))
    for _ in range(num + 3):
        rows, alive = _simulate(state.exponents.tolist(), shrink)
        state = BlockPolicy().update(state, torch.tensor(rows))
    assert alive


def _simulate(exponents: list[int], shrink: int) -> tuple[list[list[float]], bool]:
    """What meters show in float16, and whether every gradient is there."""
    columns = []
    grad = 2.0**5
    for exponent in reversed(exponents):
        entering = _half(grad * 2.0**exponent)
        leaving = _half(entering * 2.0**-shrink)
        columns.append([entering or VANISHED, *[leaving or VANISHED] * 3])
        grad = leaving / 2.0**exponent
    rows = [list(row) for row in zip(*reversed(columns), strict=True)]
    return rows, all(found > TINY for row in rows for found in row)


def _half(x: float) -> float:
    return torch.tensor(x).half().item()


amaxes = st.one_of(
    st.sampled_from([0.0, inf, nan]), st.floats(2.0**-149, 2.0**127, width=32, allow_nan=False)
)


@given(st.data(), st.integers(1, 6))
def test_rule_keeps_its_bounds(data: st.DataObject, num: int) -> None:
    rows = data.draw(st.lists(st.lists(amaxes, min_size=num, max_size=num), min_size=4, max_size=4))
    bounded = st.integers(-MAX_EXPONENT, MAX_EXPONENT)
    before = data.draw(st.lists(bounded, min_size=num, max_size=num))
    amax = torch.tensor(rows)
    new = BlockPolicy().update(state_of(*before), amax)
    again = BlockPolicy().update(state_of(*before), amax)
    assert all(map(torch.equal, new, again))
    assert [number.dtype for number in new] == [torch.int32, torch.int32]
    assert new.exponents.abs().max() <= MAX_EXPONENT
    assert new.resting.min() >= 0
    # Once moved, a block whose gradients move along and are finite stays.
    if amax.isfinite().all() and (new.exponents.abs() < MAX_EXPONENT).all():
        shifted = amax.double() * 2.0 ** (new.exponents - torch.tensor(before)).double()
        if (shifted < 2.0**127).all() and ((shifted > 2.0**-120) | (amax == 0)).all():
            assert torch.equal(BlockPolicy().update(new, shifted.float()).exponents, new.exponents)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 6.0}, "target must be a whole number, got 6.0"),
        ({"low": True}, "low must be a whole number, got True"),
        ({"low": 7}, "must increase and lie between -14 and 16, got 7, 4, 12"),
        ({"high": 17}, "must increase and lie between -14 and 16, got -6, 4, 17"),
        ({"low": 3, "high": 8}, "high must be at least low \\+ 6, got 3 and 8"),
        ({"drop": 0}, "drop must be >= 1, got 0"),
        ({"rest": 0}, "rest must be >= 1, got 0"),
    ],
)
def test_settings_of_the_rule_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        BlockPolicy(**settings)


def test_the_old_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match="called BlockPolicy now"):
        from gradscale.torch.blocks import Placing  # type: ignore[attr-defined]
    assert Placing is BlockPolicy
