"""A training loop with Apex, as its documentation writes it."""

import torch
from apex import amp
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

for step in range(30):
    inputs = torch.randn(32, 8)
    loss = (model(inputs).float() - inputs.sum(dim=1, keepdim=True)).square().mean()
    if step == 10:
        loss = loss * 1e37
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

print(*(value.hex() for weight in model.parameters() for value in weight.flatten().tolist()))
