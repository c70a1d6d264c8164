"""Where kernels find the words of every vector: `SUMMARY.norm` is the offset of that field."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence

import triton.language as tl

from gradscale.policy import DynamicState, HeadroomState
from gradscale.torch.grads import fields, packed


class Offsets(tl.constexpr):  # type: ignore[misc]
    """The offset of every word of a vector, by its name.

    A constexpr because Triton's cache of compiled kernels is keyed by the values of those alone:
    after a field has moved, no kernel with its old offset is used.
    """

    def __init__(self, words: Sequence[fields.Field]) -> None:
        names = [word.name for word in words]
        super().__init__(namedtuple("Offsets", names)(*range(len(names))))
        self.__dict__.update(self.value._asdict())  # for the interpreter; compilers read the value


SUMMARY, DECISION = Offsets(fields.SUMMARY), Offsets(fields.DECISION)
REPORT, RECORD = Offsets(fields.REPORT), Offsets(fields.RECORD)

DYNAMIC_STATE = Offsets(packed.state_fields(DynamicState))
HEADROOM_STATE = Offsets(packed.state_fields(HeadroomState))
STATE = Offsets(packed.state_fields(DynamicState)[: len(packed.COUNTERS) + 1])
"""The counters and the scale, which every state begins with."""

LOSSES = Offsets(packed.LOSSES)
DYNAMIC_SETTINGS = Offsets(packed.SETTINGS[packed.DYNAMIC])
HEADROOM_SETTINGS = Offsets(packed.SETTINGS[packed.HEADROOM])

# Values of the constants RULE and LOSS of a kernel.
DYNAMIC, HEADROOM = tl.constexpr(packed.DYNAMIC), tl.constexpr(packed.HEADROOM)
LOSS_OFF, LOSS_RAW = tl.constexpr(packed.LOSS_OFF), tl.constexpr(packed.LOSS_RAW)
