"""`SpokenText`: an answer's text while it is decoded, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvweave.runner.answers.detokenizer import Detokenizer
from kvweave.runner.answers.stop import StopStrings


class SpokenText:
    """The text of tokens as they come, without the string that ended it.

    `newest`: what the token that was heard last added to what is shown.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], ends: Collection[str]) -> None:
        self._tokens = Detokenizer(decode)
        self._ends = StopStrings(ends)
        self._shown: list[str] = []

    def hear(self, token: int | None, last: bool) -> None:
        """Takes in one token, or one without text; with the last all is shown that was held."""
        new = "" if token is None else self._ends.hear(self._tokens.add(token))
        if last:
            new += self._ends.hear(self._tokens.finish()) + self._ends.rest()
        self._shown.append(new)

    @property
    def newest(self) -> str:
        """What was shown last."""
        return self._shown[-1]

    @property
    def ended(self) -> bool:
        """Whether one of the strings was said."""
        return self._ends.found

    def __str__(self) -> str:
        return "".join(self._shown)
