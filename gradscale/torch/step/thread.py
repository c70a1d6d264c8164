"""One thread per iteration: two would read and write each other's gradients."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from gradscale.errors import CallOrderError

if TYPE_CHECKING:
    from gradscale.torch.step.passes import Iteration, Passes


def claim(passes: Passes, half: bool = False) -> Iteration:
    """The iteration of now, for this thread alone; `half` if one of its losses is float16.

    A CallOrderError if it is another thread's.
    """
    with passes.lock:
        iteration, thread = passes.current(half), threading.get_ident()
        owner = iteration.thread
        if owner == thread or torch._C._current_graph_task_id() >= 0:  # a hook in a pass
            return iteration
        if owner is not None and any(each.ident == owner for each in threading.enumerate()):
            raise CallOrderError(
                "The scaler was used by a second thread, before the first has ended its iteration "
                "with update() or apply(). Let them take turns by whole iterations, or give each "
                "thread a scaler of its own."
            )
        iteration.thread = thread
        return iteration
