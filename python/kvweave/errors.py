"""What kvweave raises and warns of: a class for each kind that a caller may react to."""

from __future__ import annotations


class KvweaveError(Exception):
    """Base of all errors. `expected` and `got` are the two sides of the text, when known.

    `request`: which request of a batch it is about, counted from 0, where it is about one.
    """

    request: int | None = None

    def __init__(
        self, message: str = "", *, expected: str | None = None, got: str | None = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        # KeyError, a base of one class below, would show the text quoted.
        return str(self.args[0]) if self.args else ""


class InvalidArgument(KvweaveError, ValueError):
    """An argument that can never be right: a shape, a dtype, a range, a name."""


class PoolFull(KvweaveError):
    """Not enough blocks, even with every cached block evicted. Nothing has changed."""


class QuotaExceeded(PoolFull):
    """A document would pin more blocks, or a shard take more bytes, than its namespace may.

    Nothing has changed.
    """


class OutOfMemory(KvweaveError, MemoryError, RuntimeError):
    """A host or device without the memory that a call needs. No request holds any of it.

    A `RuntimeError` too, as torch's own is, for callers that react to that.
    """


class TransferFailed(KvweaveError):
    """Pages that could not be carried between a device and the host's memory, tried several times.

    The request that needs them fails alone.
    """


class UnknownSegment(KvweaveError, KeyError):
    """No frozen segment of that name in that namespace."""


class NamespaceConflict(KvweaveError):
    """One token span claimed by two namespaces."""


class CorruptHeadMap(KvweaveError, ValueError):
    """A head map that is not what it says it is, or of another model."""


class CorruptPayload(KvweaveError, ValueError):
    """A payload that is not what it says it is, or bytes that are none."""


class CorruptProfile(KvweaveError, ValueError):
    """A policy profile that is not what it says it is, or of another model, dtype or head map."""


class CorruptShard(KvweaveError, ValueError):
    """A file of a store that is spoiled, cut off, or not what it says it is."""


class ForeignShard(KvweaveError, ValueError):
    """A whole file of a store that is of something else.

    Another model, dtype, RoPE regime, head map, layout, namespace or text, or of another schema.
    """


class ForeignStore(KvweaveError, ValueError):
    """A folder of a store that belongs to another model."""


class UnknownShard(KvweaveError, KeyError):
    """No shard of that name in the store, or none behind a document's name."""


class StoreFull(KvweaveError):
    """A store, or the disk that it is on, without room. What it holds is as it was."""


class StoreUnavailable(KvweaveError, OSError):
    """A store whose files cannot be read or written; the text says why."""


class DeviceUnavailable(KvweaveError, RuntimeError):
    """A device that cannot be used; the text says why."""


class Cancelled(KvweaveError):
    """The answer of a request that was cancelled: there is none."""


class AlreadyStepping(KvweaveError, RuntimeError):
    """An engine that is in a step already: one step goes on at a time."""


class Unsupported(KvweaveError, TypeError):
    """A model, device or combination that this version does not know."""


class UncertifiedPolicy(UserWarning):
    """A policy approximates, and no profile says how far from full prefill it comes out."""


class PolicySwitchedOff(UserWarning):
    """A canary saw a policy drift from full prefill: its runner answers by full from then on."""


class StoreDegraded(UserWarning):
    """A store could not give a document that it holds; the text says why, and what is done."""
