"""LoRA with the Trainer of Transformers: a frozen base in float16, adapters in float32.

PEFT makes the adapters of a float16 model float32, and fp16=True runs both in float16. Only the
line with use_gradscale() is added. It also works on a CPU, where the Trainer alone would train in
float32.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gradscale as gs
from gradscale.plugins.transformers import use_gradscale

STEPS = 24
WORDS = 32


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Texts in which each word follows the previous one by three places."""
    rows = (torch.randint(WORDS, (count, 1)) + 3 * torch.arange(16)) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


def pretrained() -> Any:
    """A small Llama, as `from_pretrained(..., dtype=torch.float16)` would load a large one."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).to(torch.float16)


def main() -> None:
    if find_spec("peft") is None:
        print("This example needs PEFT: pip install peft")
        return
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(pretrained(), adapters)
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            fp16=True,
            optim="adamw_torch_fused",
            learning_rate=1e-2,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            logging_steps=STEPS // 4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(model, settings, train_dataset=sentences(16 * STEPS))
        use_gradscale(trainer, policy=gs.for_short_runs())  # the only line of gradscale
        trainer.train()

    logs = [each for each in trainer.state.log_history if "loss" in each]
    start, end = logs[0]["loss"], logs[-1]["loss"]
    scale, skipped = logs[-1]["loss_scale"], logs[-1]["skipped_steps"]
    print(f"loss {start:.3f} -> {end:.3f}, scale {scale:g}, {skipped} of {STEPS} steps skipped")
    for name, param in model.named_parameters():
        if param.requires_grad != (param.dtype == torch.float32):
            raise SystemExit(f"{name} is {param.dtype}.")
        if not param.requires_grad and not torch.equal(param, base[name]):
            raise SystemExit(f"{name}, of the base, has changed.")
    if not end < 0.5 * start:
        raise SystemExit("The adapters have not learned.")


if __name__ == "__main__":
    main()
