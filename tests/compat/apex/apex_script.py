"""An autoencoder of handwritten digits, trained with Apex: two models, two losses, checkpoints.

python apex_script.py --data digits.gz --opt-level O2 --steps 40 --log curve.json
"""

import argparse
import gzip
import json

import torch
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--log", required=True)
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--loss-scale", default=None)
parser.add_argument("--keep-batchnorm-fp32", default=None)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--clip", type=float, default=0.05)
parser.add_argument("--bad-batch", type=int, default=-1, help="a step whose images are too bright")
parser.add_argument("--checkpoint", default=None)
parser.add_argument("--save-at", type=int, default=-1)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

with gzip.open(args.data) as file:
    pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
images = pixels.view(-1, 64).float().div(16).to(device)

encoder = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
decoder = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 64))
encoder, decoder = encoder.to(device), decoder.to(device)
optimizer_e = torch.optim.SGD(encoder.parameters(), lr=0.5, momentum=0.9)
optimizer_d = torch.optim.SGD(decoder.parameters(), lr=0.5, momentum=0.9)

[encoder, decoder], [optimizer_e, optimizer_d] = amp.initialize(
    [encoder, decoder],
    [optimizer_e, optimizer_d],
    opt_level=args.opt_level,
    keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    loss_scale=args.loss_scale,
    num_losses=2,
    verbosity=0,
)
if torch.distributed.is_initialized():
    encoder, decoder = DDP(encoder), DDP(decoder)
schedulers = [
    torch.optim.lr_scheduler.StepLR(optimizer, 15, gamma=0.5)
    for optimizer in (optimizer_e, optimizer_d)
]

first_step = 0
if args.resume:
    checkpoint = torch.load(args.checkpoint)
    encoder.load_state_dict(checkpoint["encoder"])
    decoder.load_state_dict(checkpoint["decoder"])
    optimizer_e.load_state_dict(checkpoint["optimizer_e"])
    optimizer_d.load_state_dict(checkpoint["optimizer_d"])
    for i, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(checkpoint["schedulers"][i])
    amp.load_state_dict(checkpoint["amp"])
    first_step = checkpoint["step"]

criterion = nn.MSELoss()
log = {"losses": [], "scales": []}
for step in range(first_step, args.steps):
    generator = torch.Generator().manual_seed(step)
    picked = torch.randint(len(images), (args.batch_size,), generator=generator).to(device)
    batch = images[picked]
    seen = batch * 1e6 if step == args.bad_batch else batch

    code = encoder(seen)
    restored = decoder(code)
    loss = criterion(restored, batch)
    penalty = 1e-3 * code.pow(2).mean()

    optimizer_e.zero_grad()
    optimizer_d.zero_grad()
    with amp.scale_loss(loss, [optimizer_e, optimizer_d], loss_id=0) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
    with amp.scale_loss(penalty, optimizer_e, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer_e), args.clip)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer_d), args.clip)
    optimizer_e.step()
    optimizer_d.step()
    for scheduler in schedulers:
        scheduler.step()

    log["losses"].append([loss.item(), penalty.item()])
    log["scales"].append([state["loss_scale"] for state in amp.state_dict().values()])
    if step + 1 == args.save_at:
        checkpoint = {
            "encoder": encoder.state_dict(),
            "decoder": decoder.state_dict(),
            "optimizer_e": optimizer_e.state_dict(),
            "optimizer_d": optimizer_d.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "amp": amp.state_dict(),
            "step": step + 1,
        }
        torch.save(checkpoint, args.checkpoint)

with open(args.log, "w") as file:
    json.dump(log, file)
