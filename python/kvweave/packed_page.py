"""How many tokens a packed page has, and how many of a text may stay exact. Imports no torch."""

from __future__ import annotations

PAGE_TOKENS = 64
"""Tokens of a packed page: what channels of keys pay for their scales by."""

MOST_FIRST = PAGE_TOKENS
"""Tokens of a document that may stay exact, at most: those of its first page."""
