"""The cache: admission, plans, tables, knowledge bases. No torch, no arithmetic on K or V.

    cache = KvCache(KvShape(layers=30, kv_heads=3, head_dim=64), blocks=1024)
    request = cache.admit(tokens, segments=[(16, 400, "")])
    request.plan        # what is reused, what is not, and why
    request.entries()   # i32 [N, 5]: where the KV of positions [0, length) is
    request.slots(rows) # i32 [R, 2]: where the K, V of computed rows go
    request.commit(computed, exact)

Blocks are named by the arena page of their first page (i32); block 0 is the null block. The page
of (block, layer, head) is `block + layer · G + head`. `cache.arena` is all pages as one tensor
[pages, 2, P, D]: `torch.from_dlpack(cache.arena)` shares its memory.

With a head class map that has several classes there is a table for each head group, in the order
of `cache.groups`, and the page of a head is `block + rank`: see `cache.head_rows(layer)`. A window
group keeps its sink and the latest tokens: with `admit(..., chunk_tokens=n)` it never has room for
more than these and n rows, and `advance(start, end)` moves it on.

    request = cache.admit(tokens, chunk_tokens=2048)
    request.advance(2048, 4096)     # rows before 2048 are done, [2048, 4096) come next
    request.entries(table=1)        # blocks that the group keeps
    request.promote(layer, head)    # full for this request from now on, in a table of its own

What nobody holds stays cached until its blocks are needed, the least recently used first. Other
orders are `KvCache(..., eviction="s3-fifo")` (what was used once, in order of arrival, then the
rest), `"lfu"` (the least often used, with ageing) and `"cost-aware"`, by which what is known of a
text counts: first goes what is past its time, then the lowest priority, then what costs little to
have again and is not likely to be used again.

    cache.advise(tokens, priority=1)            # before this goes all of priority 0
    cache.advise(tokens, cost=40, until=900)    # forty times as dear, until `set_time(900)`
    cache.advise(tokens, priority=1, until=900, past="plain")   # from then on as any other
    cache.advise(tokens, start=64, priority=1)  # of the blocks from this position on
    cache.advise(tokens, hint="done")           # nobody reads it again ("soon": somebody will)
    request.advise(400, 900, hint="done")       # of a part of what a live request holds

A namespace may have a quota of blocks, or of their bytes. Its documents never pin more, and what is
cached of it beyond that is evicted before anything of others.

    cache.set_quota("tenant", blocks=512)       # without blocks or bytes: no quota any more
    cache.stats()["quotas"]["tenant"]           # {"blocks": 512, "frozen": 0, "cached": 17}

A namespace can be forgotten: all that is cached of it and that nobody holds is evicted. Whoever
owns the pages may have those of freed blocks overwritten before any call that takes blocks returns.

    cache.forget("tenant")                      # blocks that went
    cache.forget(None)                          # of all namespaces
    cache.zero_freed_by(fill)                   # fill(pages): i32 [N, 2] of a first one, how many
    cache.zero_freed()                          # and what was freed by now
"""

from kvweave._native import (
    Arena,
    FrozenSegment,
    HeadClassMap,
    HeadGroup,
    KvCache,
    KvRequest,
    KvShape,
    PlanSpan,
    ReusePlan,
    __version__,
    cuda_status,
)

__all__ = [
    "Arena",
    "FrozenSegment",
    "HeadClassMap",
    "HeadGroup",
    "KvCache",
    "KvRequest",
    "KvShape",
    "PlanSpan",
    "ReusePlan",
    "__version__",
    "cuda_status",
]
