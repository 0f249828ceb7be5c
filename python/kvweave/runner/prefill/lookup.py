"""`Lookup`: what a prompt takes from the cache and leaves there. `Room`: what else it wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from kvweave.arguments import flag, whole, word


@dataclass(frozen=True)
class Lookup:
    """What a prompt may take from the cache, and leave in it.

    `namespace` of the prompt itself; `discover` matches unmarked text by content; `remember`
    lets later prompts of the namespace find this one's blocks, from its end on alone if `late`:
    what others may find is never written again. What is computed of a text that is marked in
    another namespace is found in that one, but without `publish` in the prompt's own.
    """

    namespace: str = ""
    discover: bool = False
    remember: bool = True
    late: bool = False
    publish: bool = True

    def __post_init__(self) -> None:
        word("namespace", self.namespace)
        flag("discover", self.discover)
        flag("remember", self.remember)
        flag("publish", self.publish)

    @property
    def at_once(self) -> bool:
        """Whether others may find the prompt as soon as it is prefilled."""
        return self.remember and not self.late


class Room(TypedDict):
    """What is wanted of a prompt: the first position of its logits, and room behind it."""

    logits_from: int | None
    reserve_tokens: int


def first_of(logits_from: int | None, length: int) -> int:
    """The first of a prompt's positions whose logits are wanted: the last unless one is named.

    # Errors
    `InvalidArgument` for a position that the prompt has not.
    """
    if logits_from is None:
        return length - 1
    return whole("logits_from", logits_from, 0, length - 1)
