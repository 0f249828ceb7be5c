"""Shards that lie on another machine: an object store, a Redis, a file system of somebody else's.

OpenDAL carries the bytes (the extra `kvweave[remote]`); a shard is the file that a `Store` has, so
that what is compared and checked on a hit is the same. No torch.

    remote = RemoteStore("s3", {"bucket": "kv", "endpoint": "https://…", "region": "…"})
    runner = Runner(model, tokenizer, store="kv-store", remote=remote)
"""

from kvweave.remote.remote_store import RemoteShard, RemoteStore, StoredObject

__all__ = ["RemoteShard", "RemoteStore", "StoredObject"]
