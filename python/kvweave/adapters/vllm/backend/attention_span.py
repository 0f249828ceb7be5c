"""Which keys the rows of a layer attend to."""

from __future__ import annotations

from typing import NamedTuple


class AttentionSpan(NamedTuple):
    """What the rows of a layer see: the latest `window` keys (None: all) and the first `sink`."""

    window: int | None = None
    sink: int = 0

    def columns(self, page_tokens: int, longest: int, most_rows: int) -> int:
        """Most blocks that a request of up to `longest` tokens and `most_rows` new ones reads."""
        blocks = -(-longest // page_tokens)
        if self.window is None:
            return blocks
        # The window of the first row and the rows after it, which may start inside a block.
        seen = self.window + most_rows + page_tokens
        return min(blocks, -(-self.sink // page_tokens) + -(-seen // page_tokens))
