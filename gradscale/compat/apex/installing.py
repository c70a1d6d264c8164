"""Our modules under the name `apex`, and away again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gradscale.compat.apex import (
    amp,
    fp16_utils,
    handle,
    larc,
    loss_scaler,
    normalization,
    optimizers,
    parallel,
)
from gradscale.compat.apex.functions import REGISTRY
from gradscale.compat.apex.session import SESSION
from gradscale.errors import SettingError

_PARTS: dict[str, tuple[ModuleType, Sequence[str]]] = {
    "amp": (amp, [*amp.__all__, "_amp_state"]),
    "amp._amp_state": (amp, ["_amp_state", "master_params"]),
    "amp.amp": (amp, amp.__all__),
    "amp.frontend": (amp, ["initialize", "load_state_dict", "state_dict"]),
    "amp.handle": (amp, ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]),
    "amp.opt": (handle, ["OptimWrapper"]),
    "amp.scaler": (loss_scaler, ["LossScaler"]),
    "fp16_utils": (fp16_utils, fp16_utils.__all__),
    "fp16_utils.fp16_optimizer": (fp16_utils, fp16_utils.__all__),
    "fp16_utils.fp16util": (fp16_utils, fp16_utils.__all__),
    "fp16_utils.loss_scaler": (fp16_utils, fp16_utils.__all__),
    "multi_tensor_apply": (optimizers, ["multi_tensor_applier"]),
    "normalization": (normalization, normalization.__all__),
    "optimizers": (optimizers, optimizers.__all__),
    "parallel": (parallel, parallel.__all__),
    "parallel.LARC": (larc, ["LARC"]),
    "parallel.distributed": (
        parallel,
        ["DistributedDataParallel", "Reducer", "flat_dist_call"],
    ),
}
"""The modules below `apex`, whose names they have, and which."""


def install() -> ModuleType:
    """The module `apex`, which every `import apex` gives from here on.

        from gradscale.compat.apex import install
        install()
        from apex import amp

    Can be called again. The modules are shells of their own around the names here, so that an
    import of something that they lack is an ImportError.

    Raises:
        SettingError: Another `apex` has been imported.
    """
    there = sys.modules.get("apex")
    if there is not None and not is_ours(there):
        raise SettingError(
            "install() must be called before another apex is imported, got "
            f"{getattr(there, '__file__', there)}. Call it first, or uninstall Apex."
        )
    if there is not None:
        return there
    apex = _shell("apex")
    for name, (source, names) in _PARTS.items():
        shell = _shell(f"apex.{name}")
        for each in names:
            setattr(shell, each, getattr(source, each))
        parent, _, own = shell.__name__.rpartition(".")
        # `apex.amp._amp_state` is the state; its module is found by an import from it.
        vars(sys.modules[parent]).setdefault(own, shell)
    return apex


def uninstall() -> None:
    """Takes `apex` away again, and ends the casts of `amp.init` and of registered functions.

    What was imported from it stays usable.
    """
    SESSION.drop_handle()
    REGISTRY.forget()
    if is_ours(sys.modules.get("apex")):
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            del sys.modules[name]


def is_ours(module: Any) -> bool:
    """Whether `module` is one that `install()` made."""
    return getattr(module, "__gradscale__", False) is True


def _shell(name: str) -> ModuleType:
    """An empty module, which can be imported by `name`."""
    shell = ModuleType(name, f"{name}, as gradscale.compat.apex has it.")
    shell.__gradscale__ = True  # type: ignore[attr-defined]
    shell.__path__ = []
    # importlib.util.find_spec(), by which other libraries look for Apex, wants one.
    shell.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = shell
    return shell
