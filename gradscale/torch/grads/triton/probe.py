"""One kernel of ours on a device, beside torch operations: does it compile, run and agree.

The kernel is the one that measures and unscales, because it asks the most of a compiler: atomics
with an order in memory, which need compute capability 7.0, and all formats.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from gradscale.torch.grads.fields import SUMMARY
from gradscale.torch.grads.triton.measure import measure
from gradscale.torch.grads.triton.tables import CHUNK, Table

VERSION: str = triton.__version__
_SIZES = (3, CHUNK + 5)
"""Elements of the tensors: three programs, of which two share a tensor."""
_INVERSE = 0.25


def fault(device: torch.device, dtypes: Sequence[torch.dtype]) -> str | None:
    """Which result of the kernel is wrong on `device`, the current one; None if none is.

    Raises what the compiler or the driver raises.
    """
    inverse = torch.full((), _INVERSE, dtype=torch.float32, device=device)
    # The second launch of the same form takes another way: see launch.py.
    for bad in (False, True):
        before = {dtype: [_ramp(n, dtype, device) for n in _SIZES] for dtype in dtypes}
        if bad:
            before[dtypes[-1]][-1][:2] = torch.tensor([torch.inf, torch.nan], device=device)
        after = {dtype: [value.clone() for value in some] for dtype, some in before.items()}
        tables = []
        for dtype, values in after.items():
            table = Table(_SIZES, device)
            table.point_to([value.data_ptr() for value in values])
            tables.append((dtype, table))
        # Where ptxas fails, Triton prints the whole program. A warning that is an error elsewhere
        # does not mean that a kernel has failed.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("default")
            summary, counts = measure(tables, inverse, unscale=True)
        wrong = _difference(before, after, summary, counts)
        if wrong is not None:
            return wrong
    return None


def _ramp(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small whole numbers, of which products and sums of squares are exact in every format."""
    return (torch.arange(size, device=device) % 7 - 3).to(dtype)


def _difference(
    before: dict[torch.dtype, list[Tensor]],
    after: dict[torch.dtype, list[Tensor]],
    summary: Tensor,
    counts: Tensor,
) -> str | None:
    """What was found, and is not what torch finds in the tensors `before`; None if all is."""
    for dtype, values in before.items():
        for old, new in zip(values, after[dtype], strict=True):
            if not torch.allclose(new, old * _INVERSE, rtol=0, atol=0, equal_nan=True):
                return f"the {str(dtype).removeprefix('torch.')} gradients"
    every = torch.cat([value.float() for some in before.values() for value in some])
    rows = [[int(v.isinf().sum()), int(v.isnan().sum())] for some in before.values() for v in some]
    if counts.tolist() != rows:
        return "the counts of infinities and NaNs"
    found = dict(zip([field.name for field in SUMMARY], summary.tolist(), strict=True))
    bad = not bool(every.isfinite().all())
    if found["non_finite"] != bad:
        return "the check for infinities and NaNs"
    exact = float(torch.linalg.vector_norm(every)) * _INVERSE
    # Sums of squares are whole numbers below 2**24, so exact; the roots, the products and the sum
    # over at most six tensors are rounded, fewer than 16 times in a row.
    close = abs(found["norm"] - exact) <= 2.0**-20 * exact
    if not bad and not (close and found["amax"] == float(every.abs().max())):
        return "the norm or the largest magnitude"
    return None
