from __future__ import annotations

from gradscale.torch.beside import Beside


class Owner:
    """Neither hashable nor comparable by identity."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_a_value_lives_as_long_as_its_owner() -> None:
    beside: Beside[str] = Beside()
    first, second = Owner(), Owner()
    beside.set(first, "a")
    assert beside.get(first) == "a"
    assert beside.get(second) is None
    beside.set(first, "b")
    beside.set(second, "c")
    assert (beside.get(first), beside.get(second)) == ("b", "c")
    assert list(beside.values()) == ["b", "c"]
    del first
    assert list(beside.values()) == ["c"]


def test_an_owner_with_the_id_of_a_dead_one_has_no_value() -> None:
    beside: Beside[int] = Beside()
    for number in range(100):  # ids are used again
        owner = Owner()
        assert beside.get(owner) is None
        beside.set(owner, number)
        assert beside.get(owner) == number
        del owner
    assert not list(beside.values())
