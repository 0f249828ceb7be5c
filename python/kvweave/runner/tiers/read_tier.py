"""`ReadTier`: what a tier behind a thread of reads can be asked, on disk or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvweave.payload.arriving import ArrivingPayload
from kvweave.runner.tiers.choice import Tier
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.document_form import StoredDocument


class ReadTier(Protocol):
    """A tier that is read by one thread and written by another.

    `called` names it in warnings; `trouble` begins the kinds of what goes wrong with it.
    """

    source: Tier
    called: str
    trouble: str

    @property
    def is_resting(self) -> bool:
        """Whether it failed just now, and nobody is to ask it for a while."""

    def read(
        self, document: Document, left: Callable[[], bool]
    ) -> StoredDocument | ArrivingPayload | None:
        """The KV of a document, all of it compared; None where there is none, or nobody wants it.

        `left`: whether nobody wants it any more. Of what arrives layer by layer no KV is there yet.
        """

    def write(self, payload: Any, name: str | None) -> None:
        """Keeps a document, under a name if the tier knows names and one is given."""
