"""What some versions of torch and Triton warn of in their own modules, unlike the pinned torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings

_PINNED = "2.13."
_IGNORED: list[tuple[str, type[Warning]]] = [
    (r".torch\.cpu\.amp\.autocast.args", FutureWarning),  # torch 2.4: checkpoint()
    ("Skipping serialization of skipfiles_inline", UserWarning),  # torch 2.6: Inductor
    ("Converting a tensor with requires_grad", UserWarning),  # torch 2.8: LBFGS
    (r"The \.grad attribute of a Tensor that is not", UserWarning),  # torch 2.11: compile()
    ("Conversion of an array with ndim > 0 to a scalar", DeprecationWarning),  # Triton 3.6
    ("Guards may run slower on Python 3.13.0", RuntimeWarning),  # torch 2.15: compile()
]


def lines() -> list[str]:
    """The filters, as pytest takes them; none with the pinned torch."""
    return [f"ignore:{message}:{kind.__name__}" for message, kind in _filters()]


def ignore() -> None:
    """Sets the filters in this process."""
    for message, kind in _filters():
        warnings.filterwarnings("ignore", message, kind)


def _filters() -> list[tuple[str, type[Warning]]]:
    if importlib.util.find_spec("torch") is None:
        return []
    return [] if importlib.metadata.version("torch").startswith(_PINNED) else _IGNORED
