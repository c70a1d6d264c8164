"""A pytest plugin: every list of fields is in another order than the library's.

Must be imported before the library, whose kernels take their offsets from the lists.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

NAME = "gradscale.torch.grads.fields"
path = Path(__file__).parents[2] / Path(*NAME.split(".")).with_suffix(".py")
spec = importlib.util.spec_from_file_location(NAME, path)
assert spec is not None
assert spec.loader is not None
assert NAME not in sys.modules
fields = sys.modules[NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fields)
for name in ("SUMMARY", "DECISION", "REPORT", "RECORD"):
    setattr(fields, name, (*getattr(fields, name)[3:], *getattr(fields, name)[:3]))
# The default of an argument is the list that was there before.
fields.value_at.__defaults__ = (fields.DECISION,)

from gradscale.torch.grads import packed  # noqa: E402

for rule, words in packed.SETTINGS.items():
    first = len(packed.LOSSES)
    packed.SETTINGS[rule] = (*words[:first], *reversed(words[first:]))
