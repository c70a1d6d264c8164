"""On the path of a script, Accelerate makes a scaler for fp16 on a CPU too, as it does on a GPU.

It ignores `mixed_precision="fp16"` there. The script itself stays as it is.
"""

import importlib.util
import sys


class Finder:
    """Adds to the constructor of Accelerate's `Accelerator` when that is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "accelerate.accelerator":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            create = module.Accelerator.__init__

            def __init__(self, *args, **kwargs):
                create(self, *args, **kwargs)
                if self.state.mixed_precision == "fp16" and self.scaler is None:
                    import torch

                    self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

            module.Accelerator.__init__ = __init__

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
