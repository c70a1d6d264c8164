"""Kernels over whole lists of tensors, for CUDA; the only part that imports Triton."""

import triton as _triton

try:
    from triton import knobs as _knobs  # noqa: F401
except ImportError as error:
    raise ImportError(
        "The kernels need Triton 3.4 (that of torch 2.8) or later, and this is Triton "
        f"{_triton.__version__}. Without them, torch operations do the same."
    ) from error
