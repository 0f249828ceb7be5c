"""Tokens of a block of vLLM that its pages of ours may have."""

BLOCK_TOKENS = (16, 32, 64)
"""Those that are not cut into smaller pages: bounds are of a block, and so are virtual pages."""
