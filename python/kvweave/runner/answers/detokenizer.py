"""`Detokenizer`: the text of tokens that come one by one, in time that grows with their number.

A token's text may depend on the tokens before it: a character may be cut between two of them, and
many tokenizers leave out a blank where a text begins. So each token is decoded together with the
few before it, and what that adds to their text is its own. Half a character, which decodes to the
replacement character U+FFFD, waits for its other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"
_WAITING = 8
"""Tokens that may wait for the end of a character before a border between characters is looked for.

A character has four bytes at most, so more than these are bytes that make none.
"""


class Detokenizer:
    """Turns one sequence of tokens into text; `decode` is the tokenizer's, of tokens to text.

    All that `add` and `finish` return, one after the other, is what `decode` makes of all tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # The first `_read` tokens have been told whole; they are kept for what follows them.
        self._window: list[int] = []
        self._read = 0
        self._told = ""
        self._look_at = _WAITING

    def add(self, token: int) -> str:
        """The text that is sure with one more token; it may be empty."""
        self._window.append(token)
        text = self._text()
        more = len(text) > len(self._told)
        if more and not text.endswith(_HALF):
            return self._go_on(text)
        # A special token adds nothing anywhere, and stands between no two halves; a blank may be
        # told in front of another.
        if not self._decode([token, token]):
            self._window.pop()
            return ""
        if not more:
            return ""
        if len(self._window) - self._read >= self._look_at:
            return self._past_bytes(text)
        return ""

    def finish(self) -> str:
        """What was waiting for more tokens, as there are none."""
        text = self._text()
        return self._go_on(text) if len(text) > len(self._told) else ""

    def _text(self) -> str:
        """The window's text, which begins with what was told of it."""
        text = self._decode(self._window)
        if text.startswith(self._told):
            return text
        # Bytes that make no character have changed what the tokens before them are read as.
        self._window, self._read, self._told = self._window[self._read :], 0, ""
        return self._decode(self._window)

    def _go_on(self, text: str) -> str:
        """Tells the window's text to its end; its newest tokens are the next window's oldest."""
        new = text[len(self._told) :]
        self._window = self._window[self._read :]
        self._read, self._told = len(self._window), self._decode(self._window)
        self._look_at = _WAITING
        return new

    def _past_bytes(self, text: str) -> str:
        """Tells what stands before a border between characters, where bytes make none.

        Without one among the newest tokens it is looked for again when there are twice as many.
        """
        for border in range(len(self._window) - 1, self._read, -1)[:_WAITING]:
            head, tail = self._decode(self._window[:border]), self._decode(self._window[border:])
            if head + tail == text and len(head) > len(self._told):
                new = head[len(self._told) :]
                self._window, self._read, self._told = self._window[border:], 0, ""
                self._look_at = _WAITING
                return new
        self._look_at = 2 * (len(self._window) - self._read)
        return ""
