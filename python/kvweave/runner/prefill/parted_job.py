"""`PartedJob`: a prompt that is longer than its room on the device, computed part by part.

Behind each part its full pages of heads that choose pages go to the host's memory (FlexiCache,
section 3.3, copies all of a prompt there when it has been prefilled). Rows of later parts bring
them back, layer by layer: see `PartedKv`. So at any time the device holds what the other heads
keep, a part, and the slots into which decoding will bring what these heads choose.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvweave.cache import KvCache
from kvweave.plan import Plans, one_pass
from kvweave.policies import Policy, is_exact
from kvweave.runner.clock import milliseconds
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.parted_kv import PartedKv
from kvweave.runner.model.rope import PositionTable
from kvweave.runner.prefill.chunks import spans
from kvweave.runner.prefill.prefill_context import PrefillContext
from kvweave.runner.prefill.prefill_job import PrefillJob
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import TokenizedPrompt

MOST_PART_TOKENS = 2048
"""Tokens of a part where nobody asks for shorter chunks: a layer's pages are brought for each."""

_PART_OF_ROOM = 4
"""A part is at most one of so many of the tokens that the device has room for."""


def part_tokens(context: PrefillContext, chunk_tokens: int) -> int:
    """Tokens of a part, whole pages, where prompts are computed in chunks of so many (0: any)."""
    page = context.cache.shape.page_tokens
    pages = sum(group.pages for group in context.cache.groups)
    room = int(context.cache.stats()["arena_pages"]) // pages
    most = min(chunk_tokens or MOST_PART_TOKENS, MOST_PART_TOKENS, room * page // _PART_OF_ROOM)
    return max(page, most // page * page)


def homes_of(context: PrefillContext, part: int) -> list[tuple[int, KvCache, int, int]]:
    """Of each head group that may lie in host memory: what `kvweave.scheduler` is told of it.

    Its number, the cache that counts its blocks there, its slots, and how many blocks a request has
    on the device beside these: a part and the newest one, or what fills between two rankings.
    """
    page = context.cache.shape.page_tokens
    return [
        (group, pool.cache, pool.slots, max(part // page + 1, -(-pool.budget.every // page) + 2))
        for group, pool in context.heads.host.items()
    ]


def may_part(context: PrefillContext, policy: Policy) -> bool:
    """Whether a prompt may be computed in parts: exactly, beside pages in host memory."""
    return bool(context.heads.host) and context.packed is None and is_exact(policy)


class PartedJob(PrefillJob):
    """As `PrefillJob`, of a prompt that `may_part`; `chunk_tokens` are those of a part.

    Of its prefix no more is found than the first part, and later prompts find no more than that.

    # Errors
    As `PrefillJob`; `TransferFailed` for pages that could not be brought from the host's memory.
    """

    _kv: PartedKv

    _hosts: tuple[HostPages, ...] = ()
    """Its pages in host memory; none before it has been given room."""

    @property
    def held(self) -> tuple[int, list[int]]:
        """Pages of the device that it holds, and blocks at home of each group that has some."""
        of = self._context.cache.shape
        pages = sum(self.request.kv_bytes()) // of.page_bytes
        homes = [host.home for host in self._hosts]
        return pages, [0 if home is None else -(-home.length // of.page_tokens) for home in homes]

    def _admit(self, prompt: TokenizedPrompt, regime: int, reserve_tokens: int) -> None:
        context, lookup = self._context, self._lookup
        context.cache.set_time(milliseconds())
        self._packed = self._documents = None
        self._plain, self._chunk = False, self._most_rows
        self._mode = context.mode_for(self._policy)
        # Its windows move on when tokens are appended.
        self.request = context.cache.admit(
            prompt.tokens[: self._most_rows],
            namespace=lookup.namespace,
            reuse="none" if self._policy.reuse == "none" else "prefix",
            regime=regime,
            publish=lookup.publish,
        )
        self._sources = self._brought.sources(self.request.plan)

    def _take(self, positions: PositionTable) -> None:
        context, request = self._context, self.request
        self._kv = PartedKv(context.heads, context.pages, request, positions)
        self._hosts = tuple(self._kv.host.values())
        self._kv.copy()
        view = context.view(request)
        fresh = np.arange(view.prefix, self.tokens, dtype=np.int32)
        self._view = replace(view, tokens=self.tokens, fresh=fresh)

    def _plans(self) -> Plans:
        return one_pass(self._view.layers, self._view.fresh)

    def _advance(self, to: int) -> None:
        if to <= self.computed:
            return
        if self._run is None:
            known = self._kv, self._ids, self._plans(), self._first, self._view.prefix
            self._run = self._context.executor.in_chunks(*known)
        # Windows move on when tokens are appended: what was admitted is computed before that.
        admitted = min(to, max(self.computed, self.request.length))
        parts = [(self.computed, admitted)] if self.computed < admitted else []
        for first, end in [*parts, *spans(admitted, to, self._most_rows)]:
            if end > self.request.length:
                self._kv.grow(self._prompt.tokens[self.request.length : end])
            self._run.compute(first, end)
            self.computed = end
            if self._lookup.at_once:
                self._kv.commit(end, end)
            self._kv.spill(end)

    @torch.inference_mode()
    def finish(self) -> Prefill:
        """As `PrefillJob.finish`."""
        done = super().finish()
        done.kv = self._kv.whole()
        return done

    def release(self) -> None:
        """Gives the request's blocks back, on the device and at home; safe to call twice."""
        for host in self._hosts:
            host.release()
        super().release()
