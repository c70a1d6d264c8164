"""`apex.normalization`: torch's norms, whose kernels are fused today."""

from __future__ import annotations

from torch.nn import LayerNorm as FusedLayerNorm
from torch.nn import RMSNorm as FusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]

MixedFusedLayerNorm = FusedLayerNorm
MixedFusedRMSNorm = FusedRMSNorm
