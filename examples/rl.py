"""Policy gradients in float16: a few hundred updates, and no collected episode is lost.

Walkers learn the shortest way through a grid. In one batch of ten a step costs five hundred
times as much, so gradients overflow: mp.run() computes such a batch again at a lower scale.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import gradscale as gs
from gradscale.torch import MixedPrecision

UPDATES = 250
WALKERS = 128
SIZE = 5
HORIZON = 16
SHORTEST = 2 * (SIZE - 1)
DEAR_EVERY, DEAR = 10, 500.0
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Episodes(NamedTuple):
    seen: Tensor
    """The positions of the walkers at every step, one-hot."""
    chosen: Tensor
    awake: Tensor
    """Whether a walker had not reached the goal yet."""

    @property
    def steps(self) -> Tensor:
        """The number of steps of each walker."""
        return self.awake.float().sum(dim=0)


@torch.no_grad()
def collect(policy: nn.Module, device: str) -> Episodes:
    """Episodes from one corner to the opposite corner, with the current policy."""
    moves = torch.tensor(MOVES, device=device)
    place = torch.zeros(WALKERS, 2, dtype=torch.long, device=device)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(HORIZON):
        seen = nn.functional.one_hot(place[:, 0] * SIZE + place[:, 1], SIZE * SIZE).float()
        chosen = Categorical(logits=policy(seen).float()).sample()
        awake = (place < SIZE - 1).any(dim=1)
        steps.append((seen, chosen, awake))
        place = torch.where(awake[:, None], (place + moves[chosen]).clamp(0, SIZE - 1), place)
    return Episodes(*(torch.stack(part) for part in zip(*steps, strict=True)))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = nn.Sequential(nn.Linear(SIZE * SIZE, 64), nn.Tanh(), nn.Linear(64, len(MOVES)))
    policy.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    mp = MixedPrecision(policy, optimizer, "fp16", policy=gs.for_short_runs())

    def loss_of(episodes: Episodes, price: float) -> Tensor:
        reward = -price * episodes.steps
        advantage = reward - reward.mean()
        choice = Categorical(logits=policy(episodes.seen).float())
        gain = choice.log_prob(episodes.chosen) * advantage + 0.1 * choice.entropy()
        loss: Tensor = -(gain * episodes.awake).sum(dim=0).mean()
        return loss

    lost = 0
    first = collect(policy, device).steps.mean().item()
    for update in range(1, UPDATES + 1):
        episodes = collect(policy, device)
        price = DEAR if update % DEAR_EVERY == 0 else 1.0
        # Clipped, so that an expensive batch does not change the policy more than others.
        outcome = mp.run(partial(loss_of, episodes, price), retries=2, clip_norm=1.0)
        lost += not outcome.applied
        if outcome.earlier:
            scales = [f"{float(each.scale):g}" for each in (*outcome.earlier, outcome)]
            print(f"update {update}: computed again, at scales {', '.join(scales)}")
    last = collect(policy, device).steps.mean().item()

    print(f"{first:.1f} -> {last:.1f} steps to the goal (the shortest way has {SHORTEST})")
    print(f"{UPDATES - lost} of {UPDATES} batches used, {mp.retries} of them computed again")
    if lost or not mp.retries:
        raise SystemExit("Batches should have overflowed, and none should have been lost.")
    if not last < SHORTEST + 1:
        raise SystemExit("The walkers have not found the way.")


if __name__ == "__main__":
    main()
