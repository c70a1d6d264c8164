"""The trainings by name: each is hard for a scale in a way of its own."""

from __future__ import annotations

from arena.pictures import GAN, DeepPlain, SmallHead, TinyLoss
from arena.texts import FineTune, HalfWeights, LongUnroll, NaNs, Spikes, Text
from arena.training import Training

TRAININGS: dict[str, type[Training]] = {
    training.name: training
    for training in (
        Text, HalfWeights, DeepPlain, TinyLoss, LongUnroll, GAN, Spikes, SmallHead, NaNs, FineTune
    )
}  # fmt: skip
