"""The tier on disk: KV of texts in files that are found by what they are of. No torch.

    store = Store("kv-store", capacity_bytes=2**36, quota_bytes=2**33, hash="sha256")
    of = Provenance(model=fingerprint, dtype="bf16", layout="payload",
                    layers=32, kv_heads=8, head_dim=128, namespace="tenant", regime=regime)
    name, written = store.put(of, tokens, {"group.0": kv})   # when this returns, it survives
    shard = store.get(of, tokens)                            # None, or all of it compared
    shard.read_into("group.0", kv)                           # "direct": past the page cache

A shard is one file: the KV (or packed pages) of one text, its token ids, and everything that these
depend on, the `Provenance`. Its name is a hash of that and the tokens: whoever has the same text
for the same model finds it. Parts are bytes, or contiguous tensors on the host.

Documents are names, of a namespace each. A shard that a document names is not evicted.

    store.name("tenant", "manual", name)
    store.document("manual", "tenant")       # the shard, after a restart too
    store.forget("manual", "tenant")         # the name alone; the shard may then be evicted

Times are milliseconds since 1970. `now` is the clock's where none is given; from `expires` on a
shard is nobody's hit, and the first to go. Else what goes is what was used least recently: of the
namespace where its quota is full, of all where the store is. `Store(eviction="cost-aware")` weighs
what a shard cost to compute (`put(..., cost=FLOPs)`) against its bytes, and whether it was used
again: the order of a `KvCache` by that name. Costs lie in the files; uses before a restart do not.

`Store(path, model=fingerprint)`: the folder is to belong to one model. It is the first one's that
asks; a folder of before there were owners is that of the shards that it holds, and where these are
several models' it goes on to be nobody's. `store.model` says whose it is. Without `model` a folder
is used whomever it belongs to.

Any number of processes may use one folder; budgets hold for all of them together. A store is for
whoever serves tenants, not for tenants: `shard`, `list`, `held` and `documents` tell of all.

# Errors
`CorruptShard` and `ForeignShard` for files that are not what they should be, by the first thing
that differs: then the KV is to be computed, and `put` replaces what is spoiled. `ForeignStore` for
a folder that belongs to another model. `QuotaExceeded` and `StoreFull` where there is no room,
`StoreUnavailable` where the file system refuses, `UnknownShard`, `InvalidArgument` for names and
sizes that cannot be. After any of them the store holds what it held.
"""

from kvweave._native import Provenance, Shard, Store, StoredShard

__all__ = ["Provenance", "Shard", "Store", "StoredShard"]
