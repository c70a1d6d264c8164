"""Looking into a model: an Inspector for runs, and an examination before the first step."""

from gradscale.torch.inspect.examination import Examination, examine
from gradscale.torch.inspect.inspector import Inspector

__all__ = ["Examination", "Inspector", "examine"]
