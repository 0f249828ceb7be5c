"""Tenants of a served runner: each asks about documents of its own, and is forgotten in the end."""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.soak.asked import text
from benchmarks.soak.served import Served, books_of, quota_of
from benchmarks.soak.tally import Tally
from benchmarks.soak.words import words_of
from kvweave import Segment, Tenant
from kvweave.errors import NamespaceConflict, PoolFull, QuotaExceeded, UnknownSegment
from kvweave.runner import Server

POLICIES = ("naive", "foresight", "sparsex", "full")
ROUNDS, TOKENS, ANSWER, QUOTA_TOKENS, QUANTUM_S = 6, 90, 6, 320, 0.05
"""Requests and documents of a tenant, tokens of each, and those that it may keep."""


def live_as_tenant(served: Served, server: Server, tally: Tally, seed: int) -> None:
    """All that one tenant does: in its namespace nothing is cached when it is gone."""
    name = f"tenant {seed}"
    numbers = np.random.default_rng([seed, 4])
    runner, books = served.runner, books_of(served.runner)
    books.set_quota(name, blocks=quota_of(runner, QUOTA_TOKENS))
    quantum = QUANTUM_S if seed % 2 else None
    tenant = Tenant(runner, server, name, quantum_s=quantum)
    kept: Counter[str] = Counter()
    texts = [text(TOKENS, 11, seed, number) for number in range(ROUNDS)]
    for number, tokens in enumerate(texts):
        try:
            tenant.insert(tokens, f"document {number}")
            kept[f"document {number}"] += 1
        except QuotaExceeded:
            tally.note("refused by a tenant's quota")
        except PoolFull as error:
            tally.note("no room for a tenant's document")
            if any(figure in str(error) for figure in "0123456789"):
                tally.complain(f"a tenant is told how much room there is: {error}")
        _ask(tenant, tokens, str(numbers.choice(POLICIES)), tally)
    if sorted(kept) != sorted(one.name for one in tenant.documents()):
        tally.complain(f"{name}: kept {sorted(kept)}, is told of {tenant.documents()}")
    _ask_of_others(tenant, tally)
    for one in kept:
        tenant.delete(one)
    tenant.forget()
    books.set_quota(name)
    # Its requests have ended: nothing holds what it computed.
    known = [np.asarray(tokens, np.int32) for tokens in texts]
    caches = {id(cache): cache for cache in (runner.cache, books)}.values()
    left = [tokens for cache in caches for tokens in known if cache.match_prefix(tokens, name)]
    if left:
        tally.complain(f"{name}: {len(left)} of its texts are cached behind `forget`")
    tally.note("tenants forgotten")


def _ask(tenant: Tenant, tokens: list[int], policy: str, tally: Tally) -> None:
    prompt = [words_of(tokens[:5]), Segment(tokens=tokens), words_of(tokens[-7:])]
    before = tenant.stats()["answer_tokens"]
    try:
        asked = tenant.submit(prompt, policy, max_new_tokens=ANSWER, stop=())
        heard = [token.token for token in asked]
        done = asked.result()
    except PoolFull:
        tally.note("failed as PoolFull")
        return
    if heard != done.tokens or len(heard) != ANSWER:
        tally.complain(f"{tenant.namespace}: heard {heard}, said {done.tokens}")
    if tenant.stats()["answer_tokens"] != before + ANSWER:
        tally.complain(f"{tenant.namespace}: {before} tokens before, now {tenant.stats()}")
    tally.note("tenants' answers")


def _ask_of_others(tenant: Tenant, tally: Tally) -> None:
    """What a tenant may not: another's segments, and documents that it has not."""
    try:
        tenant.submit([Segment(tokens=[1, 2], namespace="one")], "naive")
    except NamespaceConflict:
        tally.note("refused as NamespaceConflict")
    else:
        tally.complain(f"{tenant.namespace} may name another's namespace")
    try:
        tenant.delete("document of nobody")
    except UnknownSegment:
        tally.note("refused as UnknownSegment")
    else:
        tally.complain(f"{tenant.namespace} may delete what there is not")
