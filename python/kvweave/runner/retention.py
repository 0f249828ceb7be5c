"""`Retention`: what a runner's caller says of texts, so that they stay, come, or go."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvweave.arguments import real, shown, whole, word
from kvweave.cache import KvCache, KvRequest
from kvweave.closing import Ending
from kvweave.errors import InvalidArgument
from kvweave.runner.clock import milliseconds
from kvweave.runner.kv.beside_packed import refuse_beside_packed
from kvweave.runner.kv.packed_pool import PackedPool
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prompt import Prompt, PromptTokenizer, TokenizedPrompt
from kvweave.runner.tiers.ahead import Ahead
from kvweave.runner.tiers.host_tier import HostTier
from kvweave.runner.tiers.tiers import Tiers

HIGHEST = 255
"""The highest priority there is."""


class Pin(Ending):
    """What is cached of a text, held until it is released; a context manager.

    `tokens`: how many of the text's are held. Of a marked document of it, what is cached of that
    alone is held as well.
    """

    def __init__(self, cache: KvCache, text: TokenizedPrompt, namespace: str, regime: int) -> None:
        self._requests: list[KvRequest] = []
        parts = [(text.tokens, namespace)]
        parts += [(text.tokens[start:end], whose) for start, end, whose in text.segments]
        held = []
        try:
            for tokens, whose in parts:
                found = cache.match_prefix(tokens, whose, regime=regime)
                held.append(found)
                if found:
                    # The last token of a prompt is never looked up: the text's own is not the last.
                    followed = np.append(tokens[:found], np.int32(0))
                    how: dict[str, Any] = {"namespace": whose, "regime": regime}
                    self._requests.append(cache.admit(followed, reuse="prefix", **how))
        except BaseException:
            self.release()
            raise
        self.tokens = held[0]

    def release(self) -> None:
        """Lets go of it; it stays cached until its room is needed. Safe to call twice."""
        requests, self._requests = self._requests, []
        for request in requests:
            request.release()

    def _end_of_block(self) -> None:
        self.release()


class Retention:
    """What a `Runner` is told of texts that it has computed, or will be asked for.

    A text is what prompts begin with, as `Runner.generate` takes it. What is said of one is said of
    the documents that are marked in it too, each in its own namespace, for whoever else begins with
    it, and for as long as it stays cached.
    """

    cache: KvCache
    packed: PackedPool | None
    prompts: PromptTokenizer
    eviction: str
    tiers: Tiers | None
    _prefiller: Prefiller

    def retain(
        self,
        text: Prompt,
        *,
        priority: int = 1,
        ttl: float | None = None,
        tokens: tuple[int, int] | None = None,
        namespace: str = "",
    ) -> int:
        """Has what is cached of a text kept before all of a lower priority; from any thread.

        All else has priority 0, which takes this back. `ttl`: the seconds for which this holds.
        `tokens` (start, end): the tokens that are meant, all unless given; of the blocks that these
        two lie in, all are. Blocks of a range are found behind what stands before them, so that is
        to have no lower a priority. Returns the meant tokens that are cached: nothing is said of
        the others.

        # Errors
        `InvalidArgument` for a runner of another eviction than "cost-aware", a priority outside 0
        to 255, a time that is not above 0, or a range that is not one of the text's; as
        `Runner.generate` for texts.
        """
        self._expect_told()
        known: dict[str, Any] = {"priority": whole("priority", priority, 0, HIGHEST)}
        if ttl is not None:
            seconds = real("ttl", ttl, 0.0)
            if seconds <= 0:
                raise InvalidArgument(f"ttl: expected a time above 0, got {shown(ttl)}")
            until = milliseconds() + int(min(seconds * 1e3, 2.0**62))
            known |= {"until": until, "past": "plain"}
        told = self.prompts.tokenize(text)
        meant = _range_of(tokens, len(told.tokens))
        return self.advise(told, word("namespace", namespace), meant, **known)

    def demote(
        self, text: Prompt, *, tokens: tuple[int, int] | None = None, namespace: str = ""
    ) -> int:
        """Has what is cached of a text give way before all else; from any thread.

        `tokens` (start, end): the tokens that are meant, as `retain` takes them; what stands behind
        a block that went is not found any more. Its documents stay in the tiers that have them.
        Returns the meant tokens that are cached.

        # Errors
        As `retain`.
        """
        self._expect_told()
        told = self.prompts.tokenize(text)
        meant = _range_of(tokens, len(told.tokens))
        return self.advise(told, word("namespace", namespace), meant, hint="done")

    def forget(self, namespace: str) -> int:
        """Evicts all that is cached of a namespace, on the device and in the host's memory.

        From any thread. Returns the blocks of the device. What documents and live requests hold
        stays: those are to be deleted, and to end, before. A store keeps its files: see `Store`.
        Where freed blocks are zeroed, this is done when it returns, or when whoever computes has.
        """
        whose = word("namespace", namespace)
        blocks = self.cache.forget(whose)
        computing = self._prefiller.computing
        if self.packed is not None:
            blocks += self.packed.cache.forget(whose)
            if (documents := self.packed.documents) is not None:
                computing.soon(lambda: documents.forget_cached(whose))
        if self.tiers is not None and self.tiers.host is not None:
            self.tiers.host.cache.forget(whose)
        computing.soon(lambda: self._forget_firsts(whose))
        computing.soon(computing.at_end)
        return blocks

    def _forget_firsts(self, namespace: str) -> None:
        """Lets exact first tokens go, on the device unless documents there are still frozen."""
        packed, host = self.packed, None if self.tiers is None else self.tiers.host
        if packed is not None and packed.firsts is not None and not packed.cache.frozen(namespace):
            packed.firsts.forget(namespace)
        if isinstance(host, HostTier) and host.firsts is not None:
            host.firsts.forget(namespace)

    def pin(self, text: Prompt, *, namespace: str = "") -> Pin:
        """Holds what is cached of a text until the pin is released; from any thread.

        Room that is held is nobody's: a prompt that finds no other is refused, or waits. A document
        that is to stay for good is one to `insert`. Every pin takes a block beside what it holds.

        # Errors
        `PoolFull` where there is no room for that block, `Unsupported` beside packed pages; as
        `Runner.generate` for texts.
        """
        refuse_beside_packed(self.packed, "pin")
        told = self.prompts.tokenize(text)
        return Pin(self.cache, told, word("namespace", namespace), self.regime(len(told.tokens)))

    def prefetch(self, text: Prompt, *, namespace: str = "") -> list[str]:
        """Brings a text's marked documents from the tiers to the device before they are asked for.

        It waits for its reads. Returns where each came from: "device" where it was there, "host",
        "disk", "remote", or "computed" for one that no tier has, that has no room, or that takes
        less time to compute. For the thread that computes: of a served runner `server.call`.

        # Errors
        As `Runner.generate` for texts; `AlreadyStepping` while another thread computes.
        """
        told = self.prompts.tokenize(text)
        with (
            self._prefiller.computing,
            self.ahead(told, word("namespace", namespace)) as ahead,
        ):
            return ahead.bring()

    def ahead(self, text: TokenizedPrompt, namespace: str) -> Ahead:
        """Begins to read a text's documents that are not on the device; from any thread."""
        return Ahead(self._prefiller, text, namespace)

    def advise(
        self,
        text: TokenizedPrompt,
        namespace: str,
        tokens: tuple[int, int] | None = None,
        **known: Any,
    ) -> int:
        """Says of a text what `KvCache.advise` says of tokens, to every cache of the runner.

        `tokens` (start, end): those that are meant, all unless given. Times (`until`) are those of
        `clock.milliseconds`. Returns the meant tokens that are cached.
        """
        known["regime"] = self.regime(len(text.tokens))
        start, end = (0, len(text.tokens)) if tokens is None else tokens
        caches = (self.cache, *(() if self.packed is None else (self.packed.cache,)))
        found = 0
        for cache in caches:
            cache.set_time(milliseconds())
            told = cache.advise(text.tokens, namespace, start=start, end=end, **known)
            found = max(found, told)
            for first, last, whose in text.segments:
                part = {"start": max(start - first, 0), "end": max(end - first, 0)}
                cache.advise(text.tokens[first:last], whose, **part, **known)
        return found

    def regime(self, length: int) -> int:
        """The `regime` of a text of so many tokens, as `cache.advise` takes it."""
        return self._prefiller.rotary.regime(length)

    def _expect_told(self) -> None:
        """Raises for a runner whose cache has no use for what it is told."""
        if self.eviction != "cost-aware":
            got = shown(self.eviction)
            raise InvalidArgument(f"runner: expected eviction='cost-aware', got {got}")


def _range_of(tokens: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    """A range of a text's tokens as it was given, if it is one."""
    if tokens is None:
        return None
    if not isinstance(tokens, tuple) or len(tokens) != 2:
        raise InvalidArgument(f"tokens: expected a start and an end, got {shown(tokens)}")
    start = whole("start of tokens", tokens[0], 0, length)
    return start, whole("end of tokens", tokens[1], start, length)
