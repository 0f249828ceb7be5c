"""How many pages of a head have room on the device once all of them lie in the host's memory."""

_SPARE = 8
"""One slot of so many more than a head reads: pages that were chosen lately stay there."""


def slots_for(pages: int) -> int:
    """Slots of a head that reads so many pages in a decode step."""
    return pages + -(-pages // _SPARE)
