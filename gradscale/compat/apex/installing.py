"""Our modules under the name `apex`, and away again."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from gradscale.compat.apex import amp, fp16_utils, loss_scaler, normalization, optimizers, parallel
from gradscale.compat.apex.functions import REGISTRY
from gradscale.errors import SettingError

_PARTS: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "amp": (amp, ("_amp_state",)),
    "amp.scaler": (loss_scaler, ("LossScaler",)),
    "fp16_utils": (fp16_utils, ()),
    "fp16_utils.fp16_optimizer": (fp16_utils, ()),
    "fp16_utils.fp16util": (fp16_utils, ()),
    "fp16_utils.loss_scaler": (fp16_utils, ()),
    "normalization": (normalization, ()),
    "optimizers": (optimizers, ()),
    "parallel": (parallel, ()),
}
"""The modules below `apex`, whose names they have, and which besides those in `__all__`."""


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
    for name, (source, more) in _PARTS.items():
        shell = _shell(f"apex.{name}")
        for each in (*getattr(source, "__all__", ()), *more):
            setattr(shell, each, getattr(source, each))
        parent = sys.modules[shell.__name__.rpartition(".")[0]]
        setattr(parent, name.rpartition(".")[2], shell)
    return apex


def uninstall() -> None:
    """Takes `apex` away again, and puts back functions that `register_*_function` replaced.

    What was imported from it stays usable.
    """
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
    sys.modules[name] = shell
    return shell
