"""Our rules behind Megatron-LM's `grad_scaler`: a `MegatronGradScaler` with a policy.

    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    scaler = MegatronGradScaler(policy, optimizers=len(optimizers))
    for each in optimizers:
        each.grad_scaler = scaler

`policy_from_arguments` and `arguments_from_policy` translate Megatron-LM's settings.
docs/move/megatron.md lists the differences. Megatron-LM need not be installed.
"""

from gradscale.compat.megatron.scaler import MegatronGradScaler
from gradscale.compat.megatron.settings import (
    arguments_from_policy,
    flags_from_policy,
    policy_from_arguments,
    policy_from_flags,
)

__all__ = [
    "MegatronGradScaler",
    "arguments_from_policy",
    "flags_from_policy",
    "policy_from_arguments",
    "policy_from_flags",
]
