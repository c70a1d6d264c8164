"""A training with the Trainer of Transformers and `fp16=True`."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
rows = torch.randint(64, (96, 32), generator=torch.Generator().manual_seed(1))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=sys.argv[1],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=12,
        fp16=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
print(*(value.hex() for value in model.lm_head.weight.flatten().tolist()))
