"""`Keeping`: documents on their way into a store on disk, which keeps them by name."""

from __future__ import annotations

from kvweave.errors import StoreFull, UnknownShard
from kvweave.runner.tiers.disk_tier import DiskTier
from kvweave.runner.tiers.document import Document
from kvweave.runner.tiers.trouble import Trouble
from kvweave.runner.tiers.writes import Writes


class Keeping(Writes):
    """Writes documents and their names. Who adds one beyond `most` bytes waits for the disk."""

    def __init__(self, tier: DiskTier, most: int, trouble: Trouble) -> None:
        super().__init__(tier, most, trouble, patient=True)
        self._tier = tier

    def name(self, document: Document, name: str) -> None:
        """Has a document that the store gave kept under another name too.

        One that had to go for others before it had the name is not kept: there was no room for it.
        """
        self._submit(lambda: self._name(document, name), 0)

    def forget(self, name: str, namespace: str) -> None:
        """Has a name taken away, behind all that was asked for before."""
        self._submit(lambda: self._forget(name, namespace), 0)

    def _name(self, document: Document, name: str) -> None:
        try:
            self._tier.name(document, name)
        except UnknownShard as error:
            text = "store: expected room for a document until it is named, got none"
            raise StoreFull(text) from error

    def _forget(self, name: str, namespace: str) -> None:
        self._tier.store.forget(name, namespace)
