"""What a policy makes of a prompt: its prefill, its own answer, its logits on a given answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.errors import Unsupported
from kvweave.policies import Policy
from kvweave.runner import Conversation, Part, Prefill, Prompt, Runner


@dataclass(frozen=True)
class Ask:
    """One prompt under one policy, looked up in a namespace and never remembered there."""

    prompt: Prompt
    policy: Policy
    namespace: str
    discover: bool = False

    def prefilled(self, runner: Runner, logits_from: int | None, room: int) -> Prefill:
        """The prompt's KV and logits, with room for so many tokens more."""
        return runner.prefill(
            self.prompt,
            self.policy,
            logits_from=logits_from,
            namespace=self.namespace,
            discover=self.discover,
            reserve_tokens=room,
            remember=False,
            watched=False,
        )

    def again(self, runner: Runner, done: Prefill, room: int) -> Prefill:
        """The prompt once more, as it was prefilled: a fork, or computed anew where none can be."""
        if done.report.restored or done.kv.packed is not None:
            return self.prefilled(runner, None, room)
        return done.fork()


@dataclass(frozen=True)
class NextTurn:
    """Parts that a conversation of `tokens` tokens goes on with, and the whole prompt by then.

    Measured is a fork of the conversation's own prompt, so that the conversation does not hear what
    is decoded. Where it cannot go on or be forked, heads having been made full, the whole prompt is
    computed anew.
    """

    talk: Conversation
    parts: tuple[Part, ...]
    whole: Ask
    tokens: int

    def prefilled(self, runner: Runner, logits_from: int | None, room: int) -> Prefill:
        """As of `Ask`; the report is that of the turn alone."""
        if self.talk.tokens == self.tokens:
            try:
                live = self.talk.prefill(self.parts, logits_from=logits_from, reserve_tokens=room)
            except Unsupported:
                return self.whole.prefilled(runner, logits_from, room)
            if not live.report.restored:
                return live.fork()
        return self.whole.prefilled(runner, logits_from, room)

    def again(self, runner: Runner, done: Prefill, room: int) -> Prefill:
        """As of `Ask`."""
        return self.whole.again(runner, done, room)


def forced_logits(runner: Runner, done: Prefill, tokens: Sequence[int]) -> torch.Tensor:
    """Logits f32 [n, V] that n tokens behind the prompt are predicted by, those being given.

    All in one pass; the prompt then has the tokens but for the last.
    """
    first = done.logits[-1:].float().clone()
    if len(tokens) < 2:
        return first[: len(tokens)]
    return torch.cat((first, runner.extend(done, tokens[:-1]).float()))


def greedy_tokens(
    runner: Runner, done: Prefill, limit: int, stop: Sequence[int]
) -> tuple[int, ...]:
    """The most likely tokens one after the other, up to a limit or a stop token (which is kept)."""
    return tuple(runner.decode(done, max_new_tokens=limit, stop=stop).tokens)
