"""A training loop with torch.amp, as the documentation of torch writes it."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=25)

factor = float(sys.stdin.readline())  # of the loss of one batch, which overflows by that
for step in range(int(sys.argv[1])):
    inputs = torch.randn(32, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    loss = (outputs.float() - inputs.sum(dim=1, keepdim=True)).square().mean()
    if step == 40:
        loss = loss * factor
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

print(*(value.hex() for weight in model.parameters() for value in weight.flatten().tolist()))
print(scaler.state_dict()["scale"], scaler.state_dict()["_growth_tracker"])
sys.exit(3)
