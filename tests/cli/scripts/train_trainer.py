"""A training with the Trainer of Transformers, whose Accelerate makes the scaler.

On a GPU `fp16=True` is what makes it; without one Accelerate refuses that, so it is asked directly.
"""

import sys

import torch
from accelerate.utils.modeling import get_grad_scaler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
rows = torch.randint(32, (48, 8), generator=torch.Generator().manual_seed(1))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=sys.argv[1],
        per_device_train_batch_size=4,
        max_steps=8,
        max_grad_norm=0.0,  # Accelerate unscales before it clips only where it has asked for fp16
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.accelerator.scaler = get_grad_scaler()
trainer.train()
print(*(value.hex() for value in model.lm_head.weight.flatten().tolist()))
