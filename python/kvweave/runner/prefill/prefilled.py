"""`Prefill`: a prompt whose KV is in the pages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from kvweave.arguments import shown
from kvweave.cache import KvRequest
from kvweave.closing import Ending
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import ReusedTokens
from kvweave.runner.model.rope import PositionTable
from kvweave.runner.prefill.lookup import Lookup
from kvweave.runner.report import Report


class Prefill(Ending):
    """A prompt whose KV is in the pages: logits f32 [n, V], the report, the live request.

    A context manager; `release` gives the blocks back (they stay cached for later prompts).
    `exact_tokens`: leading tokens whose KV is that of a full prefill; `exact` says that all are,
    no segment having been reused. `kv` are the request's tables; `lookup` says whether later
    prompts may find its blocks; `reused` are the tokens that segments brought. `pending`: a token
    that was decoded last and has no KV yet.
    """

    def __init__(
        self,
        kv: RequestKv,
        logits: torch.Tensor,
        report: Report,
        lookup: Lookup,
        exact_tokens: int,
        reused: ReusedTokens,
    ) -> None:
        self.kv = kv
        self.logits = logits
        self.report = report
        self.lookup = lookup
        self.exact_tokens = exact_tokens
        self.exact = exact_tokens == report.tokens
        self.reused = reused
        self.pending: list[int] = []

    def __repr__(self) -> str:
        state = "released" if self.request.released else f"{self.request.length} tokens"
        return f"Prefill({state}, exact_tokens={self.exact_tokens})"

    @property
    def request(self) -> KvRequest:
        """The live request: tokens, blocks, plan."""
        return self.kv.request

    @property
    def positions(self) -> PositionTable:
        """Cos, sin and frequencies of its positions."""
        return self.kv.positions

    def fork(self) -> Prefill:
        """The same prompt once more, sharing all blocks: what is written to either is copied first.

        Of a prompt that is remembered from its end on, a fork is not remembered.

        # Errors
        `InvalidArgument` for a prompt that was released, or whose local heads were made full;
        `PoolFull` where pages are in host memory and find no room on the device.
        """
        self.bring_back()
        report = replace(self.report, timings=replace(self.report.timings))
        fork = Prefill(
            self.kv.fork(),
            self.logits,
            report,
            replace(self.lookup, remember=self.lookup.at_once),
            self.exact_tokens,
            self.reused.copy(),
        )
        fork.pending = list(self.pending)
        return fork

    def bring_back(self) -> None:
        """Has all KV lie on the device; what was rounded in host memory is no exact prefix then.

        # Errors
        `PoolFull` without room; what is still in host memory stays there.
        """
        if self.kv.bring_back():
            self.exact, self.exact_tokens = False, 0

    def commit(self) -> None:
        """Lets later prompts find what has KV by now, where they may find the prompt.

        As an exact prefix they find no token that was decoded from a part of its pages.
        """
        if self.lookup.remember:
            if self.lookup.late:
                # Nothing of it was said before. Without room nobody finds it.
                with suppress(PoolFull):
                    self.bring_back()
            length = self.request.length
            exact = self.exact and self.kv.heads.reads_all(self.request)
            self.kv.commit(length, length if exact else self.exact_tokens)

    def release(self) -> None:
        """Gives the request's blocks back; safe to call twice."""
        self.kv.release()

    def _end_of_block(self) -> None:
        self.release()


def live_prefill(what: str, done: Any) -> Prefill:
    """What a caller gave as a prefilled prompt, for `what`.

    # Errors
    `InvalidArgument` for what is none, and for one that was released.
    """
    if not isinstance(done, Prefill):
        raise InvalidArgument(f"{what}: expected a prefilled prompt, got {shown(done)}")
    if done.request.released:
        raise InvalidArgument(f"{what}: expected a live prompt, got one that was released")
    return done
