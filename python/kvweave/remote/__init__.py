"""Shards on other machines: in an object store, a Redis, a Mooncake Store, another file system.

OpenDAL carries the bytes (the extra `kvweave[remote]`), or a Mooncake Store's client; a shard is
the file that a `Store` has, so that what is compared and checked on a hit is the same. No torch.

    remote = RemoteStore("s3", {"bucket": "kv", "endpoint": "https://…", "region": "…"})
    runner = Runner(model, tokenizer, store="kv-store", remote=remote)
"""

from kvweave.remote.remote_store import RemoteShard, RemoteStore, StoredObject

__all__ = ["RemoteShard", "RemoteStore", "StoredObject"]
