"""Policies on recorded or made-up histories, many runs at once: settings compared without a GPU."""

from gradscale.simulate.histories import KINDS, History, made_up, recorded
from gradscale.simulate.walk import Report, walk

__all__ = ["KINDS", "History", "Report", "made_up", "recorded", "walk"]
