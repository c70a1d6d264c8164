"""What the tests of the compatibility layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# A script that imports `apex`, which is there only after `install()`: the doctest collector would
# import it.
collect_ignore = ["apex_script.py"]


@pytest.fixture
def fresh_amp() -> Iterator[None]:
    """An `amp` that was never initialized, before and after: it is one for the whole process."""
    from gradscale.compat.apex import uninstall
    from gradscale.compat.apex.session import SESSION, Session

    vars(SESSION).clear()
    vars(SESSION).update(vars(Session()))
    yield
    uninstall()
    vars(SESSION).clear()
    vars(SESSION).update(vars(Session()))
