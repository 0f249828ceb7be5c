"""The tiers of a runner, of what its caller names: a store, host memory, a remote store."""

from __future__ import annotations

from os import PathLike
from weakref import finalize

from kvweave.arguments import shown, whole
from kvweave.cache import HeadClassMap
from kvweave.errors import ForeignStore, InvalidArgument
from kvweave.policies.policy_profile import heads_digest
from kvweave.remote import RemoteStore
from kvweave.runner.clock import Clock
from kvweave.runner.decode import Decoder
from kvweave.runner.prefill.flops import RowFlops
from kvweave.runner.tiers.disk_tier import DiskTier
from kvweave.runner.tiers.document_form import DocumentForm, ExactForm
from kvweave.runner.tiers.final_form import FinalForm
from kvweave.runner.tiers.host_documents import HostDocuments
from kvweave.runner.tiers.host_tier import HostTier
from kvweave.runner.tiers.packed_form import PackedForm
from kvweave.runner.tiers.remote_tier import RemoteTier
from kvweave.runner.tiers.tiers import Tiers
from kvweave.store import Store

_MOST_S = 60.0
"""How long the end of a process waits for documents that are being written."""


def digest_of(heads: HeadClassMap | None) -> str:
    """What a shard says of a head map; "" where there is none."""
    return "" if heads is None else heads_digest(heads)


def form_of(decoder: Decoder, heads: HeadClassMap | None) -> DocumentForm:
    """How the documents of a decoder lie in its pages: packed where any are."""
    flops, packed = RowFlops(decoder.spec, decoder.heads), decoder.heads.packed
    if packed is not None:
        made = PackedForm if packed.final is None else FinalForm
        return made(packed, digest_of(heads), flops)
    return ExactForm(decoder.heads.cache, decoder.pages, digest_of(heads), flops)


def make_tiers(
    decoder: Decoder,
    store: Store | str | PathLike[str] | None,
    document_bytes: int | None,
    heads: HeadClassMap | None,
    eviction: str,
    hash: str,
    remote: RemoteStore | None,
) -> Tiers | None:
    """The tiers beside a decoder's cache; None where no store and no bytes are named.

    # Errors
    `InvalidArgument` for what is no store, folder or number of bytes, `OutOfMemory` for bytes that
    the host has not, `StoreUnavailable` for a folder that cannot be used, `ForeignStore` for one of
    another model; `InvalidArgument` too for a folder whose shards are named by a hash that is not
    safe from tenants, where the runner's is.
    """
    if store is None and document_bytes is None and remote is None:
        return None
    form = form_of(decoder, heads)
    disk, far = None, None
    host: HostTier | HostDocuments | None = None
    if store is not None:
        disk = DiskTier(_opened(store, hash, decoder.spec.fingerprint), form)
    if document_bytes is not None:
        whole("document_bytes", document_bytes, 1)
        if isinstance(form, FinalForm):
            host = HostDocuments(form, document_bytes, eviction=eviction, hash=hash)
        else:
            host = HostTier(form, document_bytes, eviction=eviction, hash=hash)
    if remote is not None:
        if not isinstance(remote, RemoteStore):
            raise InvalidArgument(f"remote: expected a RemoteStore, got {shown(remote)}")
        far = RemoteTier(remote, form)
    tiers = Tiers(form, Clock(decoder.spec.device), host, disk, far)
    # Also when the process ends: what is being written is waited for, unless its disk is dead.
    finalize(decoder, tiers.close, _MOST_S)
    return tiers


def _opened(store: object, hash: str, model: str) -> Store:
    """A store as it is, or a folder's, in which shards are named as a cache names its blocks.

    A folder belongs to the model that first used it; a `Store` may be several models'.

    Names by xxh3-128 are good enough for whoever has no hostile tenants; a folder may have better.
    """
    if isinstance(store, Store):
        return store
    if not isinstance(store, (str, PathLike)):
        raise InvalidArgument(f"store: expected a Store or a folder, got {shown(store)}")
    try:
        return Store(store, hash=hash if hash == "sha256" else None, model=model)
    except ForeignStore as error:
        text = f"{error}; name another folder, or give a Store, which several models may use"
        raise ForeignStore(text, expected=error.expected, got=error.got) from error
