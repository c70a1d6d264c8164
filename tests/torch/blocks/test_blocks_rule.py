"""Where the rule puts the scales of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradscale.errors import SettingError
from gradscale.torch.blocks import BlockPolicy
from gradscale.torch.blocks.rule import MAX_EXPONENT, TINY, VANISHED, BlockState, _merged


def state_of(*exponents: int, resting: int = 0) -> BlockState:
    numbers = torch.tensor(exponents, dtype=torch.int32)
    return BlockState(numbers, torch.full_like(numbers, resting))


def moved(rows: list[list[float]], *exponents: int, resting: int = 0) -> list[int]:
    """The exponents after entering, leaving and weights."""
    rows = [*rows, [0.0] * len(exponents)]  # nothing is small
    new = BlockPolicy(grid=1).update(state_of(*exponents, resting=resting), torch.tensor(rows))
    return new.exponents.tolist()


inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("rows", "before", "after"),
    [
        ([[1.0], [0.0], [0.0]], [0], [0]),  # just high enough
        ([[0.99], [0.0], [0.0]], [0], [6]),
        ([[4095.0], [0.0], [16380.0]], [5], [5]),  # just low enough
        ([[4096.0], [0.0], [0.0]], [5], [-2]),
        ([[1.0], [4096.0], [0.0]], [0], [-7]),
        ([[1.0], [0.0], [16384.0]], [0], [-7]),
        ([[2.0**-30, 2.0**-10], [0.0, 0.0], [0.0, 0.0]], [0, 0], [35, 15]),
        ([[0.0, 0.0, 2.0**-10], [0.0] * 3, [0.0] * 3], [3, 1, 0], [18, 16, 15]),  # follow
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [3, -4], [3, -4]),
        ([[nan, inf], [nan, inf], [nan, inf]], [3, -4], [3, -4]),  # not for a block to cure
        ([[nan, 64.0], [nan, inf], [nan, 1.0]], [3, 4], [-5, -4]),
        ([[8.0], [1.0], [inf]], [0], [-8]),
        ([[2.0**20], [nan], [nan]], [0], [-15]),  # falls further from further up
        ([[2.0**-12], [nan], [nan]], [0], [-3]),  # and not below the normal numbers
        ([[2.0**-20], [nan], [nan]], [0], [0]),
        ([[2.0**-100], [0.0], [0.0]], [0], [60]),
    ],
)
def test_rule_places_blocks(rows: Any, before: list[int], after: list[int]) -> None:
    assert moved(rows, *before) == after


def test_block_stays_lower_for_a_while_after_a_fault() -> None:
    rule = BlockPolicy(rest=3, grid=1)
    fault = torch.tensor([[64.0], [inf], [1.0], [0.0]])
    quiet = torch.tensor([[0.01], [0.01], [0.01], [0.01]])
    state = rule.update(state_of(0), fault)
    assert (state.exponents.item(), state.resting.item()) == (-8, 3)
    for resting in (2, 1, 0):
        state = rule.update(state, quiet)
        assert (state.exponents.item(), state.resting.item()) == (-8, resting)
    assert rule.update(state, quiet).exponents.item() == 0  # at 2.56, as what comes after it


def test_resting_block_is_placed_lower() -> None:
    assert moved([[2.0**-9], [0.0], [0.0]], 0, resting=9) == [6]  # at 2**-2, not 2**6
    assert moved([[2.0**14], [0.0], [0.0]], 0, resting=9) == [-17]
    assert moved([[2.0**-15], [0.0], [0.0]], 0, resting=128) == [6]  # after four faults at 2**-8
    assert moved([[2.0**-14], [0.0], [0.0]], 0, resting=128) == [0]


def placed(rows: list[list[float]], *exponents: int, resting: int = 0) -> list[int]:
    """The exponents after entering, leaving, weights and the smallest, on the grid."""
    new = BlockPolicy().update(state_of(*exponents, resting=resting), torch.tensor(rows))
    return new.exponents.tolist()


@pytest.mark.parametrize(
    ("found", "before", "after"),
    [
        (2.0**-30, 0, 32),  # to 2**6, or up to four binades beside it
        (2.0**-31, 0, 40),
        (2.0**-23, 0, 32),
        (2.0**-22, 0, 24),
        (2.0**-28, 4, 40),  # at 2**-32 without the scale
        (2.0**13, 5, 0),
        (2.0**15, 0, -8),
        (0.5, 7, 16),
        (64.0, 7, 7),  # in its place
    ],
)
def test_blocks_that_move_come_to_lie_on_the_grid(found: float, before: int, after: int) -> None:
    assert placed([[found], [0.0], [0.0], [0.0]], before) == [after]
    amax = found * 2.0 ** (after - before)
    assert 1 <= amax < 4096


def test_grid_is_no_wider_than_the_room_of_the_policy() -> None:
    rule = BlockPolicy(target=2, high=12)
    rows = torch.tensor([[2.0**-31], [0.0], [0.0], [0.0]])
    assert rule.update(state_of(0), rows).exponents.tolist() == [32]  # a grid of 4


def test_block_falls_onto_the_grid() -> None:
    assert placed([[8.0], [inf], [1.0], [1.0]], 12) == [0]
    assert placed([[2.0**-14], [inf], [1.0], [1.0]], 8) == [0]
    assert placed([[2.0**-15], [inf], [1.0], [1.0]], 8) == [8]  # cannot fall


@pytest.mark.parametrize(
    ("smallest", "before", "after", "resting"),
    [
        (0.0, 0, 0, 0),  # there is none
        (2.0**-9, 0, 0, 0),
        (2.0**-10, 0, 6, 0),
        (2.0**-15, 0, 6, 0),  # as far as there is room: 2**6 may become 2**12
        (2.0**-15, 1, 7, 0),
        (VANISHED, 1, 7, 0),
        (VANISHED, 1, 1, 1),  # it overflowed not long ago
        (inf, 0, 0, 0),
    ],
)
def test_block_in_which_gradients_vanish_rises(
    smallest: float, before: int, after: int, resting: int
) -> None:
    rows = [[32.0], [32.0], [32.0], [smallest]]
    assert placed(rows, before, resting=resting) == [after]


def test_blocks_below_one_that_rises_follow() -> None:
    zero, alive = VANISHED, 32.0
    rows = [[0.0, zero, alive, alive], [0.0, zero, zero, alive], [0.0, zero, zero, alive]]
    assert placed([*rows, [0.0, zero, zero, alive]], 30, 24, 24, 0) == [36, 30, 30, 0]
    # Two passes without a gradient add up to no gradient.
    rows = [[2 * zero, alive], [2 * zero, 2 * zero], [zero, zero], [zero, zero]]
    assert placed(rows, 30, 24) == [36, 30]


@pytest.mark.parametrize(
    ("found", "smallest", "before", "after", "resting"),
    [
        ([64.0, 64.0, 64.0], 0.0, [8, 6, 8], [8, 8, 8], 0),
        ([64.0, 64.0, 64.0], 0.0, [17, 20, 17], [17, 17, 17], 0),
        ([1023.0, 64.0], 0.0, [6, 8], [6, 8], 0),  # not higher than a move puts it
        ([511.0, 64.0], 0.0, [7, 8], [8, 8], 0),
        ([2.0, 64.0], 0.0, [9, 8], [9, 8], 0),  # not to the edge of its place
        ([4.0, 64.0], 0.0, [9, 8], [8, 8], 0),
        ([64.0, 64.0], 2.0**-9, [9, 8], [9, 8], 0),  # not where something is faint
        ([64.0, 64.0], 2.0**-8, [9, 8], [8, 8], 0),
        ([64.0, 64.0], 0.0, [8, 7], [8, 7], 1),  # it overflowed not long ago
        ([0.0, 64.0], 0.0, [9, 8], [9, 8], 0),  # there was nothing to see
        ([inf, 64.0], 0.0, [9, 8], [9, 8], 0),
        ([16.0, 64.0], 0.0, [3, 4], [0, 0], 0),  # what comes after the last block
    ],
)
def test_block_takes_the_exponent_of_the_next_one(
    found: list[float], smallest: float, before: list[int], after: list[int], resting: int
) -> None:
    none = [0.0] * len(found)
    assert placed([found, none, none, [smallest] * len(found)], *before, resting=resting) == after


@given(st.data(), st.integers(1, 40))
def test_blocks_are_merged_as_by_a_loop(data: st.DataObject, num: int) -> None:
    numbers = st.lists(st.integers(-9, 9), min_size=num, max_size=num)
    own, least, most = (torch.tensor(data.draw(numbers)) for _ in range(3))
    above, want = 0, []
    for place in reversed(range(num)):
        above = above if least[place] <= above <= most[place] else int(own[place])
        want.insert(0, above)
    assert _merged(own, least, most).tolist() == want


@given(st.lists(st.tuples(st.integers(-40, 9), st.integers(-20, 0)), min_size=1, max_size=30))
def test_merged_blocks_stay_in_their_places(natural: list[tuple[int, int]]) -> None:
    """Gradients as they are at the scale 1, and by how much the smallest is smaller."""
    rule, num = BlockPolicy(), len(natural)

    def rows_at(exponents: Tensor) -> Tensor:
        found = torch.tensor([2.0**n for n, _ in natural]) * 2.0**exponents
        small = found * torch.tensor([2.0**less for _, less in natural])
        return torch.stack([found, found, found, small])

    state = rule.init(num, torch.device("cpu"))
    rows = rows_at(state.exponents)
    placed_alone = [rule.update(state_of(0), rows[:, [n]]).exponents for n in range(num)]
    state = rule.update(state, rows)
    found, smallest = rows_at(state.exponents)[0], rows_at(state.exponents)[3]
    assert ((found >= 1) & (found < 4096)).all()
    alone = rows_at(torch.cat(placed_alone))[3]
    assert ((smallest >= 2.0**-9) | (smallest >= alone)).all()
    for _ in range(3):
        again = rule.update(state, rows_at(state.exponents))
        assert torch.equal(again.exponents, state.exponents)
        state = again


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
        ({"low": 7}, "must rise from -14 to 16, got 7, 6, 12"),
        ({"high": 17}, "must rise from -14 to 16, got 0, 6, 17"),
        ({"drop": 0}, "drop must be >= 1, got 0"),
        ({"rest": 0}, "rest must be >= 1, got 0"),
        ({"grid": 0}, "grid must be >= 1, got 0"),
    ],
)
def test_settings_of_the_rule_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        BlockPolicy(**settings)


def test_the_old_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match="called BlockPolicy now"):
        from gradscale.torch.blocks import Placing  # type: ignore[attr-defined]
    assert Placing is BlockPolicy
