"""Requests that have gone through a runner's pools as their prefill takes them, uncomputed."""

from __future__ import annotations

import numpy as np

from kvweave import Runner
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.prefill.chunks import spans


def admitted(runner: Runner, tokens: int, reserve: int) -> RequestKv:
    """A request of so many tokens, with room for as many more as it is to say.

    # Errors
    `PoolFull` without room; nothing is held then.
    """
    context, text = runner._prefiller, np.zeros(tokens, np.int32)
    positions, packed = context.rotary.table(1), None
    known = {"reuse": "none", "reserve_tokens": reserve, "regime": positions.regime}
    if context.packed is not None:
        packed = PackedPrefix(context.packed, text, namespace="", **known)
    try:
        request = context.cache.admit(text, chunk_tokens=context.chunk_tokens or 0, **known)
    except BaseException:
        if packed is not None:
            packed.release()
        raise
    return RequestKv(context.heads, context.pages, request, positions, True, packed)


def placed(runner: Runner, tokens: int, reserve: int) -> RequestKv:
    """One that has moved through the pools chunk by chunk, and is packed where pages are.

    Its KV is what lay in exact pages before: layers of the prompt are not computed.

    # Errors
    As `admitted`.
    """
    kv = admitted(runner, tokens, reserve)
    try:
        kv.copy()
        for first, end in spans(0, tokens, runner._prefiller.chunk_tokens or tokens):
            if first:
                kv.advance(first, end)
        kv.advance(tokens, tokens)
    except BaseException:
        kv.release()
        raise
    return kv
