"""Where marked texts are in a rendered prompt, in characters and in tokens.

A chat template may put anything around a text and trim it, but does nothing else to it that we
could follow. So the prompt is rendered twice, once with a sentinel in each marked place: what
is between two sentinels is between the two texts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]


def character_ranges(
    prompt: str, template: str, sentinels: Sequence[str], texts: Sequence[str]
) -> list[Range]:
    """Characters [start, end) of each text in `prompt`; `template` has sentinels in their place.

    Errors: `ValueError` with the number of the first text that is not there as given, or trimmed.
    """
    pieces, rest = [], template
    for number, sentinel in enumerate(sentinels):
        before, found, rest = rest.partition(sentinel)
        if not found:
            raise ValueError(number)
        pieces.append(before)
    pieces.append(rest)
    spans, at = [], len(pieces[0])
    if not prompt.startswith(pieces[0]):
        raise ValueError(0)
    for number, text in enumerate(texts):
        behind, last = pieces[number + 1], number + 1 == len(texts)
        for form in dict.fromkeys((text, text.rstrip(), text.lstrip(), text.strip())):
            end = at + len(form)
            follows = prompt[end:] == behind if last else prompt.startswith(behind, end)
            if follows and prompt.startswith(form, at):
                break
        else:
            raise ValueError(number)
        spans.append((at, end))
        at = end + len(behind)
    return spans


def token_range(offsets: Sequence[Range], span: Range) -> Range | None:
    """Tokens [start, end) that lie wholly in a span of characters; None if there are none.

    `offsets` are the characters of each token as tokenizers give them. Some leave out the blank
    that a token starts with, so a token counts from where the one before it ends.
    """
    starts, ends, reached = [], [], 0
    for start, end in offsets:
        starts.append(min(start, reached) if end > start else reached)
        reached = max(reached, end)
        ends.append(reached)
    first = bisect_left(starts, span[0])
    last = bisect_left(ends, span[1] + 1)
    # Tokens without text, such as one for the beginning, are (0, 0).
    while first < last and offsets[first][0] == offsets[first][1]:
        first += 1
    while first < last and offsets[last - 1][0] == offsets[last - 1][1]:
        last -= 1
    return (first, last) if first < last else None
