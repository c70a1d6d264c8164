"""NVIDIA Apex, its mixed precision part, in pure Python over torch and gradscale.

    from gradscale.compat.apex import install
    install()

From there on `import apex` and `from apex import amp` give this, and old code runs as it is.
Importing this changes nothing. Without `install()`, `from gradscale.compat.apex import amp` does.
"""

from gradscale.compat.apex import amp, fp16_utils, normalization, optimizers, parallel
from gradscale.compat.apex.installing import install, uninstall

__all__ = [
    "amp",
    "fp16_utils",
    "install",
    "normalization",
    "optimizers",
    "parallel",
    "uninstall",
]
