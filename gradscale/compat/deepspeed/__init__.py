"""Our rules in DeepSpeed's ZeRO engine: `attach(engine, policy)` after `deepspeed.initialize`.

    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config, ...)
    scaler = gradscale.compat.deepspeed.attach(engine, gs.Dynamic(growth_interval=1000))

`engine.backward(loss)` and `engine.step()` stay as they are. `DynamicLossScaler` and `LossScaler`
have the names of DeepSpeed's classes, `policy_from_config` and `config_from_policy` translate its
settings. docs/move/deepspeed.md lists the differences.
"""

from gradscale.compat.deepspeed.engine import attach, detach
from gradscale.compat.deepspeed.scaler import DynamicLossScaler, LossScaler
from gradscale.compat.deepspeed.settings import config_from_policy, policy_from_config

__all__ = [
    "DynamicLossScaler",
    "LossScaler",
    "attach",
    "config_from_policy",
    "detach",
    "policy_from_config",
]
