"""Compiles every kernel for a GPU, without one: what the interpreter takes need not compile.

Run as a program, without TRITON_INTERPRET. Steps are taken on the CPU, and where a kernel would be
launched it is compiled instead, so what they compute means nothing. Prints the kernels' names.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradscale.policy import Headroom
from gradscale.torch import GradScaler, kernels, optim
from gradscale.torch._triton.launching import Kernel

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.bool: "i1",
}
compiled: dict[Any, str] = {}


def compile_instead(
    kernel: Any, programs: int, arguments: Any, constants: Any, formats: Any = (), **options: Any
) -> None:
    """Compiles `kernel` for these arguments, once."""
    function = kernel._function
    types = [type_of(argument) for argument in arguments]
    names = [parameter.name for parameter in function.params]
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    constexprs = {(len(types) + place,): constant for place, constant in enumerate(constants)}
    key = (function.__name__, *types, *map(str, constants))
    if key not in compiled:
        source = ASTSource(function, signature, constexprs)
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled[key] = function.__name__


def type_of(argument: Any) -> str:
    """Triton's name for the type of `argument`."""
    if isinstance(argument, Tensor):
        return f"*{TYPES[argument.dtype]}"
    return "i32" if isinstance(argument, int) else "fp32"


def step(weights: list[Tensor], optimizer: Any, two_calls: bool, policy: Any = None) -> None:
    """One step with all that it launches."""
    scaler = GradScaler("cpu", on_stuck="ignore", policy=policy)
    scaler.backward(sum(w.float().sum() for w in weights))
    if two_calls:
        scaler.apply(optimizer, clip_norm=1.0)
    else:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def main() -> None:
    """Takes steps of all kinds."""
    Kernel.__call__ = compile_instead  # type: ignore[method-assign, assignment]
    kinds: list[Any] = [
        lambda w, **s: optim.AdamW(w, weight_decay=0.1, **s),
        lambda w, **s: optim.Adam(w, weight_decay=0.1, maximize=True, **s),
        lambda w, **s: optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True, **s),
        lambda w, **s: optim.SGD(w, lr=torch.tensor(0.1), **s),
        lambda w, **s: optim.Lion(w, weight_decay=0.1, **s),
    ]
    cases = [*itertools.product(kinds, ["float32"], [torch.float32])]
    cases += itertools.product(kinds, ["float32", "split"], [torch.float16, torch.bfloat16])
    with kernels.use("triton"):
        for kind, master, dtype in cases:
            for two_calls in (True, False):
                weights = [torch.ones(n, dtype=dtype, requires_grad=True) for n in (3, 5000)]
                step(weights, kind(weights, master=master), two_calls)
        weights = [torch.ones(3, requires_grad=True)]
        optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
        for two_calls in (True, False):
            step(weights, optimizer, True)
            step(weights, optimizer, two_calls, Headroom())
        for every in (0, 1):
            scaler = GradScaler("cpu", underflow_every=every, on_stuck="ignore")
            weights[0].grad = None
            scaler.backward(weights[0].sum(), loss_id=1)
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    print(len(compiled), *sorted(set(compiled.values())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
