"""`Ahead`: the documents of a prompt that nobody has asked for yet, on their way to the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from kvweave.closing import Ending
from kvweave.device_memory import needs_memory
from kvweave.errors import KvweaveError
from kvweave.runner.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from kvweave.runner.prefill.prefill_context import PrefillContext


class Ahead(Ending):
    """Reads a prompt's documents from where they lie; a context manager, which gives them up.

    Reads begin at once, behind those that a request waits for, and wait for nobody. `bring` is for
    the thread that computes, all else for any. A runner without tiers brings nothing.
    """

    def __init__(self, context: PrefillContext, text: TokenizedPrompt, namespace: str) -> None:
        self._context = context
        self._text = text
        self._namespace = namespace
        tiers = context.tiers if text.segments else None
        regime = context.rotary.regime(len(text.tokens))
        self._expected = None if tiers is None else tiers.expect(text, namespace, regime)

    @property
    def is_read(self) -> bool:
        """Whether nothing more is being read."""
        return self._expected is None or self._expected.is_read

    @needs_memory("prefetch")
    @torch.inference_mode()
    def bring(self) -> list[str]:
        """Brings the documents to the device, where they stay cached; where each came from."""
        expected, tiers = self._expected, self._context.tiers
        if expected is None or tiers is None:
            return ["computed" for _ in self._text.segments]
        self._expected = None
        with (
            self._context.spec.current(),
            tiers.bring(expected, self._text, self._namespace) as brought,
        ):
            self._context.clock.wait()
            brought.take_times()
            return [want.choice.source for want in brought.wanted]

    def bring_soon(self, then: Callable[[], object]) -> None:
        """Has them brought when nobody computes: now, or when the one who does has done a step.

        `then` is called when they are there. What goes wrong is nobody's error: a prompt that marks
        them finds them where they lie.
        """
        if self._expected is not None:
            self._context.computing.soon(lambda: self._brought_or_not(then))

    def release(self) -> None:
        """Gives up what was read and not brought. Safe to call twice."""
        expected, self._expected = self._expected, None
        if expected is not None:
            expected.release()

    def _end_of_block(self) -> None:
        self.release()

    def _brought_or_not(self, then: Callable[[], object]) -> None:
        with suppress(KvweaveError), self:
            self.bring()
            then()
