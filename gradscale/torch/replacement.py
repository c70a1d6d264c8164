"""Our scaler under torch's names, for code that cannot be changed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from gradscale.torch.construction import observed

_lock = Lock()
_blocks = 0
"""Blocks that are active, in all threads."""
_replaced: list[tuple[Any, str, Any]] = []
"""Modules, names in them, and what the names were before the first block."""


@contextmanager
def replace(
    *, policy: str | None = None, on_new: Callable[[Any], object] | None = None
) -> Iterator[None]:
    """Replaces torch's scaler classes by gradscale's inside a `with` block.

        with gradscale.torch.replace():
            import their_trainer  # contains: from torch.amp import GradScaler

    `GradScaler` in `torch`, `torch.amp`, `torch.cuda.amp` and `torch.cpu.amp`, and FSDP's
    `ShardedGradScaler` are replaced, in all threads. A module that was imported before the block
    and holds the class under a name of its own keeps torch's class; a module imported inside the
    block keeps gradscale's afterwards. `isinstance` and `issubclass` give the same results for both
    classes, inside and outside. Blocks may be nested; the names are restored when the outermost
    block ends, also by an exception.

    Args:
        policy: Name of the policy for every scaler that is created inside without a policy, such as
            "headroom". Settings of torch's rule that the policy also has, such as `init_scale`, are
            kept; others are ignored.
        on_new: Called with every `GradScaler` that is created inside, at the end of its
            constructor, such as `lambda scaler: scaler.log_to("runs/first")`.
    """
    global _blocks
    # Here, because it imports FSDP, which takes longer than the rest of the package.
    from gradscale.torch.drop_in import CLASSES

    places = [place.rpartition(".") for place in CLASSES]
    modules = [(importlib.import_module(module), name) for module, _, name in places]
    with _lock:
        if _blocks == 0:
            _replaced.extend([(module, name, getattr(module, name)) for module, name in modules])
            for (module, name), kind in zip(modules, CLASSES.values(), strict=True):
                setattr(module, name, kind)
        _blocks += 1
    try:
        with observed(policy, on_new):
            yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                while _replaced:
                    setattr(*_replaced.pop())
