"""Uneven data: a rank that has run out of it keeps taking part in the decisions.

Inside torch's `Join` such a rank shadows the collectives of the others. DDP's own hook does that
for DDP's collectives; the gather of a scaler is another one, and the others would wait for it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from gradscale.errors import SettingError
from gradscale.torch.step.contract import as_optimizers


class JoinableStep(Joinable):
    """Keeps a rank without data in the steps of the others, for torch's `Join`; after the model.

        def step():
            return scaler.apply(optimizer, clip_norm=1.0)

        with Join([model, JoinableStep(step, optimizer, model)]):
            for inputs, targets in data:  # some ranks have more batches than others
                scaler.backward(loss_fn(model(inputs), targets))
                step()

    A rank without data has no gradients; it receives the result of the others and moves its scale
    as they do. At the end DDP broadcasts the parameters of the last rank, and JoinableStep
    broadcasts the state of its optimizers, **through host memory**, so that moments match.

    Args:
        step: Called after every backward pass whose gradients are reduced, so not for those inside
            `no_sync()`: `apply()`, or `step()`, `update()` and `zero_grad()`.
        optimizers: The optimizers that `step` steps, one or several; `ZeroRedundancyOptimizer` is
            not supported.
        model: The DDP model, which comes before this object in the list.
    """

    def __init__(
        self, step: Callable[[], object], optimizers: Optimizer | Iterable[Optimizer], model: Any
    ) -> None:
        super().__init__()
        if not callable(step):
            raise SettingError(f"step must be a function, got {type(step).__name__}.")
        if not isinstance(model, Joinable):
            raise SettingError(
                f"model must be the DDP model, got {type(model).__name__}. Wrap it in "
                "DistributedDataParallel first."
            )
        self.optimizers = as_optimizers(optimizers, "JoinableStep")
        self.step, self.model = step, model

    def join_hook(self, **_: Any) -> JoinHook:
        """Returns the hook that steps on a rank after it has run out of data."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return self.model.join_device

    @property
    def join_process_group(self) -> Any:
        """The process group of the model."""
        # Read when Join begins. The first in its list notifies, before every forward pass, the
        # ranks that have run out that there is another step: DDP does so, and this does not.
        if self._join_config.enable and self._join_config.is_first_joinable:
            raise SettingError(
                "JoinableStep must come after the DDP model, but is the first. Write Join([model, "
                "JoinableStep(step, optimizer, model)])."
            )
        return self.model.join_process_group


class _Shadow(JoinHook):
    """Steps without gradients while others have some; then loads the state of the last rank."""

    def __init__(self, owner: JoinableStep) -> None:
        self.owner = owner

    def main_hook(self) -> None:
        """Steps as the others do, if they do after this pass."""
        # DDP has asked them whether they reduce gradients, and stores the answer here.
        if not getattr(self.owner.model, "require_forward_param_sync", True):
            return
        for optimizer in self.owner.optimizers:
            # Left from the last batch, or never reduced.
            optimizer.zero_grad(set_to_none=True)
        self.owner.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Loads the state of the rank whose parameters DDP broadcasts into all optimizers."""
        group, device = self.owner.join_process_group, self.owner.join_device
        # Of several that were last, the highest, as DDP has it.
        last = torch.tensor(dist.get_rank(group) if is_last_joiner else -1, device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
        source = dist.get_global_rank(group, int(last))
        for optimizer in self.owner.optimizers:
            file = io.BytesIO()
            if dist.get_rank() == source:
                torch.save(optimizer.state_dict(), file)
            # As bytes: tensors of a GPU would all come to the GPU that they were on.
            box = [file.getvalue()]
            dist.broadcast_object_list(box, source, group=group, device=device)
            if dist.get_rank() != source:
                state = torch.load(io.BytesIO(box[0]), map_location="cpu", weights_only=False)
                optimizer.load_state_dict(state)
