"""Compiles every kernel for a GPU, without one: what the interpreter takes need not compile.

Run as a program with a compute capability, such as 90, and without TRITON_INTERPRET. A second
number n compiles every n-th variant of each kernel only. Kernels are called with tensors on the
CPU, and compiled where they would be launched, so no result means anything. Prints the kernels'
names.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernel_tables
import policy_kernel
from gradscale.policy import Dynamic, Headroom, Off, Policy
from gradscale.torch import optim
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.grads import packed
from gradscale.torch.grads.fields import RECORD, SUMMARY
from gradscale.torch.grads.triton.launch import Kernel

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.bool: "i1",
}
EVERY = int(sys.argv[2]) if len(sys.argv) > 2 else 1
compiled: dict[Any, str] = {}
"""The kernels, by the variant: those that were left out are here too."""


def compile_instead(
    kernel: Any,
    programs: int,
    tensors: Any,
    numbers: Any,
    constants: Any,
    formats: Any = (),
    **options: Any,
) -> None:
    """Compiles `kernel` for these arguments, once."""
    function = kernel._function
    types = [type_of(argument) for argument in (*tensors, *numbers)]
    names = [parameter.name for parameter in function.params]
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    constexprs = {(len(types) + place,): constant for place, constant in enumerate(constants)}
    key = (function.__name__, *types, *map(str, constants))
    if key in compiled:
        return
    number = list(compiled.values()).count(function.__name__)
    compiled[key] = function.__name__
    if number % EVERY == 0:
        source = ASTSource(function, signature, constexprs)
        triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)


def type_of(argument: Any) -> str:
    """Triton's name for the type of `argument`."""
    if isinstance(argument, Tensor):
        return f"*{TYPES[argument.dtype]}"
    return "i32" if isinstance(argument, int) else "fp32"


def compile_gradients() -> None:
    """Compiles the kernels that measure, decide and rescale, in all their variants."""
    measure, rescale = kernels.module("measure"), kernels.module("rescale")
    grads = [torch.ones(3, dtype=dtype) for dtype in kernels.DTYPES]
    tables = kernel_tables.tables(grads)
    one, flag = torch.ones(()), torch.ones((), dtype=torch.bool)
    rescale.multiply(tables, one)
    for smallest_normal, unscale in itertools.product((None, 1.0), (False, True)):
        measure.measure(tables, one, smallest_normal=smallest_normal, unscale=unscale)
    for grad in grads:
        kernels.module("exponents").count(grad, torch.zeros(258, dtype=torch.int64), 3, 1)
    one_table = tables[:1]
    losses = [(packed.LOSS_OFF, None), (packed.LOSS_FLAG, flag), (packed.LOSS_RAW, one)]
    for policy, (kind, loss) in itertools.product((Off(), Dynamic(), Headroom()), losses):
        compile_decisions(policy, kind, loss, one_table)


def compile_decisions(policy: Policy, kind: int, loss: Tensor | None, tables: Any) -> None:
    """Compiles the kernels that decide by `policy`, with a loss of this `kind`."""
    decide, consensus = kernels.module("decide"), kernels.module("consensus")
    cpu = torch.device("cpu")
    moves = {
        "state": packed.pack(policy.init(), device=cpu),
        "settings": packed.pack_settings(policy, device=cpu),
        "rule": packed.rule_of(policy),
    }
    record = torch.zeros(len(RECORD), dtype=torch.int32)
    one, flag, row = torch.ones(()), torch.ones((), dtype=torch.bool), record[0]
    rest = {**moves, "loss_kind": kind, "record": record, "row": row, "copy": one}
    for advances in (True, False):
        decision, _ = kernels.module("measure").measure_and_decide(
            tables, one, loss=loss, advance=advances, unscale=not advances, **rest
        )
    decide.advance(decision, one, loss=loss, **rest)
    summary = torch.ones(len(SUMMARY))
    for checksum in (None, one):
        words = consensus.report(summary, one, loss=loss, loss_kind=kind, checksum=checksum, rank=0)
    decide.decide(consensus.fold(words[None]), summary, one, **rest)
    if kind != packed.LOSS_RAW:
        policy_kernel.update(
            moves["state"], flag, flag, one, loss, moves["settings"], moves["rule"]
        )


def compile_steps() -> None:
    """Compiles the kernels of optimizers."""
    kinds: list[Any] = [
        lambda w, **s: optim.AdamW(w, weight_decay=0.1, **s),
        lambda w, **s: optim.Adam(w, weight_decay=0.1, maximize=True, **s),
        lambda w, **s: optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True, **s),
        lambda w, **s: optim.SGD(w, lr=torch.tensor(0.1), **s),
        lambda w, **s: optim.Lion(w, weight_decay=0.1, **s),
    ]
    cases = [*itertools.product(kinds, ["float32"], [torch.float32])]
    cases += itertools.product(kinds, ["float32", "split"], [torch.float16, torch.bfloat16])
    for (kind, master, dtype), scaled in itertools.product(cases, (True, False)):
        weights = [torch.ones(n, dtype=dtype, requires_grad=True) for n in (3, 5000)]
        optimizer = kind(weights, master=master)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
        optimizer.step()


def main() -> None:
    """Launches every kernel, in all its variants."""
    Kernel.__call__ = compile_instead  # type: ignore[method-assign, assignment]
    with kernels.use("triton"):
        compile_gradients()
        compile_steps()
    print(len(compiled), *sorted(set(compiled.values())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
