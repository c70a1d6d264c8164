"""Methods of a scaler that torch.compile cannot trace: they are graph breaks; results are the same.

With `fullgraph=True` the compiler's error quotes the reason in disabled.py.
"""

from __future__ import annotations

from typing import Any


def outside(scaler: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """What the method called `name` returns, called outside of the graph."""
    from gradscale.torch.compile import disabled  # loads Dynamo, which is there by now

    return disabled.call(scaler, name, *args, **kwargs)
