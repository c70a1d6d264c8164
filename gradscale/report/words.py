"""The words of a report: findings, causes of skipped steps and numbers, for people."""

from __future__ import annotations

import math

TITLES = {
    "loss-not-finite": "The loss is not finite",
    "data-not-finite": "The data is not finite",
    "forward-overflow": "The forward pass overflows",
    "scale-too-high": "The scale is too high",
    "scale-too-low": "The scale is too low",
    "nan-at-any-scale": "NaN gradients at any scale",
    "underflow": "Small gradients are lost",
    "dead-gradient": "A parameter gets no gradient",
    "update-lost": "Updates are too small to change the weights",
    "weights-not-finite": "Weights are not finite",
    "gradients-not-cleared": "Gradients are not cleared between steps",
    "clip-before-unscale": "Gradients are clipped before they are unscaled",
    "losses-unbalanced": "The losses need very different scales",
    "stuck": "No step is applied any longer",
    "skips-too-often": "Steps are skipped too often",
}
"""Every kind of finding as a headline."""

CAUSES = {
    "scale too high": "gradients overflowed: the scale was too high",
    "scale too low": "gradients overflowed when they were unscaled: the scale was too low",
    "loss not finite": "the loss was not finite",
    "NaN at any scale": "gradients were NaN at any scale",
    "stuck at the floor": "gradients overflowed even at min_scale",
    "no gradients": "no parameter had a gradient",
}
"""Every verdict on a skipped step, for people."""


def title_of(kind: str) -> str:
    """The headline of a finding; one of a later version is its own headline."""
    return TITLES.get(kind, kind)


def cause_of(verdict: str) -> str:
    """The cause of a skip in words."""
    return CAUSES.get(verdict, verdict or "cause not recorded")


def printable(text: str) -> str:
    r"""`text` with question marks for what is no character: control codes and lone surrogates.

    >>> printable("weight\x1b[2J\ud800")
    'weight?[2J?'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def scale_text(scale: float | None) -> str:
    """A scale as a power of two where it is one.

    >>> scale_text(65536.0), scale_text(1000.0), scale_text(None)
    ('2**16', '1000', '-')
    """
    if scale is None:
        return "-"
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5:
        return f"2**{math.frexp(scale)[1] - 1}"
    return f"{scale:g}"


def share_text(part: float | None) -> str:
    """A share as a percentage; only an exact zero is 0 %, and only all of it 100 %.

    >>> share_text(0.4556), share_text(0.0), share_text(0.000009), share_text(0.99999)
    ('45.6 %', '0 %', '<0.1 %', '>99.9 %')
    """
    if part is None:
        return "-"
    if 0 < part < 0.001:
        return "<0.1 %"
    if 0.999 < part < 1:
        return ">99.9 %"
    return f"{part * 100:.1f} %" if part else "0 %"


def number_text(value: float | None, unit: str = "") -> str:
    """A number with a few digits, or a dash.

    >>> number_text(2.34567), number_text(None), number_text(3.0, " binades")
    ('2.346', '-', '3 binades')
    """
    return "-" if value is None else f"{value:.4g}{unit}"
