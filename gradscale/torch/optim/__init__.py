"""torch's optimizers with everything after the backward pass folded into the step, and Lion.

Each is torch's optimizer of the same name: its constructor, its state, its `state_dict`. On CUDA a
kernel divides by the scale, clips, skips and steps in one pass over memory; elsewhere, and for what
the kernel does not do, torch's own fused step does the same in its way. Under a scaler, ours or
torch's, nobody waits for the device. Parameters in float16 and bfloat16 have masters of 32 bits.
"""

from gradscale.torch.optim.adam import Adam, AdamW
from gradscale.torch.optim.lion import Lion
from gradscale.torch.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
