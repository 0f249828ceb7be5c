"""The pages that a top-K head reads in every decode step, whatever it chooses. Imports no torch."""

from __future__ import annotations

SINK_PAGES = 1
"""Pages at the start of a table that a top-K head always reads."""

RECENT_PAGES = 2
"""The newest pages, which it always reads too: the last one may hold a single token."""
