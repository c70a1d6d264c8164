"""The Trainer of Transformers with our scaler inside, by one call.

    trainer = Trainer(model, TrainingArguments(fp16=True), train_dataset=data)
    use_gradscale(trainer, policy=gs.Headroom())
    trainer.train()

For every class derived from Trainer. The Trainer has an Accelerator, so this
is `gradscale.plugins.accelerate` and two numbers more in its logs.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    message = "gradscale.plugins.transformers needs Transformers: pip install transformers."
    raise ImportError(message) from error

from gradscale.errors import SettingError
from gradscale.plugins import accelerate
from gradscale.policy import Policy
from gradscale.torch import GradScaler


def use_gradscale(
    trainer: Trainer, policy: Policy | str | None = None, **settings: Any
) -> GradScaler:
    """The scaler that `trainer` has from here on; it is also `trainer.accelerator.scaler`.

    Call it before `trainer.train()`. With `fp16=True` the model runs in float16 on a CPU as well.
    The logs get a `loss_scale` and the number of `skipped_steps`.

    Args:
        trainer: Where `fp16=True`, and no DeepSpeed.
        policy: The rule that moves the scale, or its name; without it torch's.
        settings: Those of `GradScaler`.

    Raises:
        SettingError: It is no Trainer, or one whose losses are scaled by DeepSpeed or torch_xla.
    """
    if not isinstance(trainer, Trainer):
        raise SettingError(
            f"use_gradscale() takes a Trainer, got {type(trainer).__name__}. For an Accelerator, "
            "use gradscale.plugins.accelerate.use_gradscale()."
        )
    callback = GradscaleTrainerCallback(trainer, policy, **settings)
    trainer.remove_callback(GradscaleTrainerCallback)
    # First of all, so that those which print and send the logs have its numbers.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback.scaler


class GradscaleTrainerCallback(TrainerCallback):
    """Keeps the scaler in the trainer, and its numbers in the logs; `use_gradscale()` adds it.

    Args:
        trainer: Which gets the scaler at once.
        policy: As for `use_gradscale()`.
        settings: As for `use_gradscale()`.
    """

    def __init__(
        self, trainer: Trainer, policy: Policy | str | None = None, **settings: Any
    ) -> None:
        self._trainer = trainer
        self._settings = {"policy": policy, **settings}
        self._attach()

    def _attach(self) -> None:
        """Makes the scaler, and gives it to the accelerator that the trainer has now."""
        accelerator = self._trainer.accelerator
        self.scaler = accelerate.use_gradscale(accelerator, **self._settings)
        self.skipped = 0
        """Steps that were skipped since the scaler was made."""
        self.scaler.on("skip", self._count)

    def _count(self, _: Any) -> None:
        self.skipped += 1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Goes on in the accelerator that `hyperparameter_search()` makes for every trial."""
        if self._trainer.accelerator.scaler is not self.scaler:
            self._attach()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Adds the scale and the number of skipped steps where the training loss is logged."""
        if logs is not None and "loss" in logs:
            self.scaler.flush()
            numbers = {"loss_scale": self.scaler.get_scale(), "skipped_steps": self.skipped}
            logs.update(numbers)
            state.log_history[-1].update(numbers)
