"""A hook for two imports of a script: torch, to act right after it, and apex, to give it ours."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LIBRARIES = ("site-packages", "dist-packages")
"""Folders of installed packages."""


class ImportHook:
    """Finds modules for the import system, in front of all other finders.

    Args:
        on_torch: Called when torch has been imported.
        on_apex: Gives what `import apex` is, where the script imports it. Libraries that merely
            try whether Apex is there find what they would find without us.
    """

    def __init__(self, on_torch: Callable[[], None], on_apex: Callable[[], ModuleType]) -> None:
        self._on_torch, self._on_apex = on_torch, on_apex
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """How to import `name`; None leaves it to the other finders."""
        if name == "torch" and not self._looking:
            return self._find_torch()
        if name == "apex" and not imported_by_a_library():
            loader: Any = _Given(self._on_apex())
            return ModuleSpec(name, loader, is_package=True)
        return None

    def _find_torch(self) -> ModuleSpec | None:
        """How to import torch, with a call at the end."""
        self._looking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class has it: as if nothing had been
            original(module)
            self._on_torch()

        loader.exec_module = exec_module
        return spec


class _Given:
    """A loader for a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: it has been executed."""


def imported_by_a_library() -> bool:
    """Whether the import that is going on stands in an installed package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if (
            name.split(".")[0] != "importlib"
            and name != __name__
            and not file.startswith("<frozen")
        ):
            return any(folder in file for folder in LIBRARIES)
        frame = frame.f_back
    return False
