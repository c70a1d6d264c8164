"""The casts of `amp.init`: all of torch's functions, wherever they are called.

torch's autocast is on from there. Where Apex' lists go beyond autocast's, which differ between
devices, a mode that sees every call does the rest. Nothing of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from gradscale.compat.apex.functions import cast_all
from gradscale.compat.apex.session import no_autocast

_METHODS = """
acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow
cumprod cumsum dist norm prod std sum var renorm
""".split()
_FUNCTIONS = """
softmin softmax log_softmax softplus gelu interpolate grid_sample
layer_norm group_norm local_response_norm normalize cosine_similarity
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss
hinge_embedding_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss nll_loss
multilabel_margin_loss multilabel_soft_margin_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
triplet_margin_loss
""".split()
_FLOAT = frozenset((*_METHODS, *_FUNCTIONS, "__pow__", "__rpow__", "__ipow__", "cpu"))
"""What is computed in float32."""
_IN_PLACE = frozenset(f"{name}_" for name in _METHODS)
"""What cannot be, because its result belongs in a float16 tensor."""
_RECURRENT = frozenset(
    f"{kind}{end}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")
)
"""What is computed in float16 by autocast on a GPU, but not on a CPU."""
_BACKWARD = frozenset(("backward", "grad"))
"""What runs without autocast: a backward pass has the formats of the forward pass."""
_OURS = _FLOAT | _IN_PLACE | _RECURRENT | _BACKWARD


class CastMode(TorchFunctionMode):
    """Has torch's functions cast their arguments.

    Args:
        handle: The handle of `amp.init`; nothing is cast while it is not active.
        allow_banned: Whether `binary_cross_entropy` of float16 is computed in float32.
    """

    def __init__(self, handle: Any, allow_banned: bool) -> None:
        super().__init__()
        self._handle = handle
        self._allow_banned = allow_banned
        self._autocast = ExitStack()

    def begin(self) -> None:
        """Switches the casts on."""
        for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
            # Without a cache: one that is never left would keep casts of weights that have moved.
            self._autocast.enter_context(torch.autocast(device, torch.float16, cache_enabled=False))
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Switches the casts off."""
        self._autocast.close()
        if _get_current_function_mode() is self:  # else it stays below, where it does nothing
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What `func` returns, called as Apex would."""
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._handle.is_active() or name not in _OURS:
            return func(*args, **given)
        if name in _IN_PLACE:
            _refuse_half(name, args[:1], f"Call {name[:-1]}(), which returns float32.")
            return func(*args, **given)
        if name in _RECURRENT and args[0].device.type != "cpu":
            return func(*args, **given)
        if name == "binary_cross_entropy" and not self._allow_banned:
            _refuse_half(
                name,
                (args, given),
                "Use binary_cross_entropy_with_logits() without a sigmoid before it, or pass "
                "allow_banned=True to amp.init().",
            )
        with no_autocast():
            if name not in _BACKWARD:
                dtype = torch.float16 if name in _RECURRENT else torch.float32
                args, given = cast_all(args, dtype), cast_all(given, dtype)
            return func(*args, **given)


def _refuse_half(name: str, values: Any, instead: str) -> None:
    """A NotImplementedError if a tensor in `values` is float16, which Apex raises too."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.dtype is torch.float16:
            raise NotImplementedError(
                f"{name}() does not accept float16 arguments under amp.init(), because they would "
                f"overflow. {instead}"
            )
