"""The Trainer of Transformers with our scaler: the same to the bit as a loop written by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

import gradscale as gs
from gradscale.errors import SettingError
from gradscale.plugins.transformers import GradscaleTrainerCallback, use_gradscale
from gradscale.torch import GradScaler
from ranks import everyone, on_ranks, run_check

STEPS, BAD, BATCH = 6, 3, 4
HUGE = 2.0**120
"""What makes scaled gradients overflow, in float32 too, and the loss not."""
SCALE = {"init_scale": 2.0**10, "growth_interval": 2}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def data() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    rows = torch.randint(32, (2 * STEPS * BATCH, 8), generator=made)
    return [{"input_ids": row, "labels": row} for row in rows]


class Planted(Trainer):
    """A Trainer that takes the data in order, and one step of which overflows."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * (HUGE if self.state.global_step == BAD else 1.0)


def trainer_in(folder: Path, **changes: Any) -> Planted:
    """A Trainer without our scaler."""
    settings: dict[str, Any] = {
        "optim": "adamw_torch_fused",
        "fp16": True,
        "max_grad_norm": 0.1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(str(folder), **(settings | changes))
    trainer = Planted(gpt2(), args, train_dataset=data())
    trainer.remove_callback(PrinterCallback)
    return trainer


def state_of(trainer: Trainer) -> list[Any]:
    """What a step can move."""
    return [
        *trainer.model.parameters(),
        *values(trainer.optimizer.state_dict()),
        trainer.lr_scheduler.last_epoch,
        trainer.accelerator.scaler.state_dict(),
    ]


def values(state: dict[str, Any]) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    return [each for param in state["state"].values() for each in param.values()]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether both have the same values, to the bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def by_hand(trainer: Trainer, autocast: bool = True) -> list[Any]:
    """What a loop with our scaler and the settings of `trainer` ends with."""
    args, model = trainer.args, gpt2().train()
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    decayed = trainer.get_decay_parameter_names(model)
    named = list(model.named_parameters())
    groups = [[p for n, p in named if (n in decayed) == decays] for decays in (True, False)]
    optimizer = kind([{"params": each, "weight_decay": 0.0} for each in groups], **settings)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    scaler = GradScaler("cpu", **SCALE)
    rows = [data()[i : i + BATCH] for i in range(0, len(data()), BATCH)]
    count = args.gradient_accumulation_steps
    for step in range(STEPS):
        several = [default_data_collator(each) for each in rows[step * count : (step + 1) * count]]
        items = sum(each["labels"].ne(-100).sum() for each in several)
        for batch in several:
            with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
                loss = model(**batch, num_items_in_batch=items).loss
            scaler.scale(loss.float() * (HUGE if step == BAD else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
        scaler.step(optimizer)
        scaler.update()
        if scaler.outcome().applied:
            scheduler.step()
        optimizer.zero_grad()
    state = values(optimizer.state_dict())
    return [*model.parameters(), *state, scheduler.last_epoch, scaler.state_dict()]


CASES = [
    {"optim": "adamw_torch_fused", "gradient_accumulation_steps": 1},
    {"optim": "adamw_torch", "gradient_accumulation_steps": 2},
    {"optim": "adamw_torch_fused", "gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
    {"optim": "adamw_torch", "fp16": False},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_training_equals_a_loop_by_hand(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, **changes)
    scaler = use_gradscale(trainer, **SCALE)
    trainer.train()
    wanted = by_hand(trainer, autocast=trainer.args.fp16)
    assert same(state_of(trainer), wanted)
    assert trainer.lr_scheduler.last_epoch == STEPS - 1  # all but the skipped one
    trainer.args.max_grad_norm = 0.2
    assert not same(wanted, by_hand(trainer, autocast=trainer.args.fp16))
    logs = [each for each in trainer.state.log_history if "loss" in each]
    assert [each["skipped_steps"] for each in logs] == [0, 0, 0, 1, 1, 1]
    assert [each["loss_scale"] for each in logs] == [1024, 2048, 2048, 1024, 1024, 2048]
    assert scaler is trainer.accelerator.scaler


@pytest.mark.gpu
def test_skip_of_a_fused_optimizer_on_a_gpu_is_seen(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, use_cpu=False)
    scaler = use_gradscale(trainer, **SCALE)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert scaler.history[0][2] == "grow"
    assert trainer.state.log_history[BAD]["skipped_steps"] == 1


def test_checkpoint_resumes_to_the_bit(tmp_path: Path) -> None:
    policy = gs.Headroom(memory=3)
    saves = {"save_strategy": "steps", "save_steps": BAD + 1}
    whole = trainer_in(tmp_path, **saves)
    use_gradscale(whole, policy=policy)
    whole.train()
    resumed = trainer_in(tmp_path)
    use_gradscale(resumed, policy=policy)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{BAD + 1}"))
    assert same(state_of(resumed), state_of(whole))
    anew = trainer_in(tmp_path)
    use_gradscale(anew, policy=gs.Headroom())
    anew.train()
    assert not same(state_of(anew), state_of(whole))


def test_accelerator_of_a_trial_gets_the_scaler_too(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    first = use_gradscale(trainer, **SCALE)
    trainer.create_accelerator_and_postprocess()  # as hyperparameter_search() does
    trainer.train()
    (callback,) = [
        each
        for each in trainer.callback_handler.callbacks
        if isinstance(each, GradscaleTrainerCallback)
    ]
    assert trainer.accelerator.scaler is callback.scaler is not first
    assert callback.skipped == 1
    assert same(state_of(trainer), by_hand(trainer))


def test_second_call_replaces_the_first(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_steps=1)
    use_gradscale(trainer)
    second = use_gradscale(trainer, policy=gs.Static(8.0))
    trainer.train()
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert names.count("GradscaleTrainerCallback") == 1
    assert second.outcome().scale == 8.0
    assert trainer.state.log_history[0]["loss_scale"] == 8.0


def test_refusal_names_the_cause() -> None:
    with pytest.raises(SettingError, match=r"takes a Trainer, got Linear\. For an Accelerator"):
        use_gradscale(nn.Linear(1, 1))


def check_ddp() -> None:
    """Raises if ranks part."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    trainer = trainer_in(Path.cwd(), gradient_accumulation_steps=2, max_steps=4)
    scaler = use_gradscale(trainer, **SCALE)
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    told = everyone(
        [each.detach() if isinstance(each, Tensor) else each for each in state_of(trainer)]
    )
    assert same(told[0], told[1])
    assert not scaler.outcome().applied
    assert trainer.lr_scheduler.last_epoch == 3


@pytest.mark.parametrize(("check", "world"), on_ranks(2, "ddp"))
def test_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
