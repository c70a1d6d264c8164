"""Reports on a run log: plain data, one HTML page that needs no network, and a comparison of two.

The page has no library behind it: plotly.js would be 4.5 MB in every page, the scripts here are 33
KB, and a heatmap with the limits of a format drawn in is not a chart that plotly has.
"""

from __future__ import annotations

from gradscale.report.comparison import Comparison, compare
from gradscale.report.page import comparison_page, report_page
from gradscale.report.summary import Summary, summarise

__all__ = ["Comparison", "Summary", "compare", "comparison_page", "report_page", "summarise"]
