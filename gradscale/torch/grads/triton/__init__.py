"""Kernels over whole lists of tensors, for CUDA; the only part that imports Triton."""
