"""torch's optimizers, with unscaling, clipping, skipping and the step in one pass; and Lion.

`Adam`, `AdamW` and `SGD` have the constructor, state and `state_dict` of torch's optimizers of the
same name. On CUDA one kernel divides by the scale, clips, skips and steps; elsewhere, and for
options that the kernel does not support, torch's fused step is used. With gradscale's or torch's
scaler, no step waits for the device. Parameters in float16 and bfloat16 have 32-bit masters.
"""

from gradscale.torch.optim.adam import Adam, AdamW
from gradscale.torch.optim.lion import Lion
from gradscale.torch.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
