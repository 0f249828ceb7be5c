"""Decode steps: the tables of a batch, the forward over them, and the next tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvweave.cache import KvRequest
from kvweave.device_memory import is_shortage, needs_memory
from kvweave.errors import PoolFull
from kvweave.ops import Workspace
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.decode.graph import StepGraphs
from kvweave.runner.decode.packed_reads import prepare_final
from kvweave.runner.decode.promised_bounds import BoundsPromise
from kvweave.runner.decode.reads import StepReads
from kvweave.runner.decode.rounds import Rounds, Run
from kvweave.runner.decode.sampling import Int64, choose_all
from kvweave.runner.decode.slots import DecodeSlots, Step
from kvweave.runner.decode.step import DecodeTables, forward, query_room
from kvweave.runner.kv.aside import Aside
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.model.rope import Rotary

_MOST_SLOTS = 4


class Decoder:
    """Decode steps of one model over one arena.

    On a GPU a step is captured once for each size of batch and replayed from then on, where the
    frequencies of RoPE are fixed and the model itself waits for nothing. Steps for which the host
    copies pages itself, from when it does so on, are launched one kernel at a time.

    With `drafts` a `round` drafts up to so many tokens by the pages that top-K heads choose, and a
    `step` reads all of them.

    A step takes any batch of one kind: requests that were in the last one keep their tables, others
    join with theirs. One thread at a time may call a decoder.
    """

    def __init__(
        self, heads: HeadReads, rotary: Rotary, pages: torch.Tensor, drafts: int = 0
    ) -> None:
        self.spec = heads.spec
        self.heads = heads
        self.rotary = rotary
        self.pages = pages
        self.reads = StepReads(heads)
        self.drafts = drafts
        on_gpu = self.spec.device.type == "cuda"
        self.workspace = Workspace(self.spec.device) if on_gpu else None
        captured = self.workspace is not None and rotary.is_fixed and not heads.waits
        self.graphs = StepGraphs(heads, rotary, pages, self.workspace) if captured else None
        if on_gpu and heads.packed is not None and heads.packed.final is not None:
            prepare_final(heads.packed)
        known = heads, rotary, pages, drafts, self.workspace, self.graphs
        self.rounds = Rounds(*known) if drafts else None
        self.queries: torch.Tensor | None = None
        # Latest used last: a draft that comes between two steps of a batch has its own.
        self._slots: list[DecodeSlots] = []
        self._aside = Aside(self.spec.device)

    @needs_memory("decode step")
    def step(
        self,
        batch: Sequence[Decoding],
        *,
        watched: bool = False,
        choose: Callable[[Sequence[Decoding], torch.Tensor, bool], Int64] = choose_all,
        failed: dict[int, Exception] | None = None,
        sitting_out: Sequence[Decoding] = (),
    ) -> Int64:
        """Feeds each sequence's last token through the model and chooses its next: ids i64 [B].

        `choose` takes the batch, logits f32 [B, V] and whether all are greedy, as `choose_all`; −1
        is of a sequence that says nothing. Into `failed`, where it is given, goes by number in the
        batch why that is for those whose pages could not be had of host memory: they are released.

        The batch is of one kind: see `by_regime`. Who is `sitting_out` goes on later where it is,
        while whoever else was in the last step has left. `watched`: `queries` then has those of the
        step, [L, B, H, D], until the next one.

        # Errors
        `PoolFull` when the batch needs blocks and there are none; no request has changed then, and
        the error's `request` says for which of them there was no room. `InvalidArgument` for a
        request that was released or comes twice, no request having changed either.
        `OutOfMemory` when the step finds no room: the requests are to be released. `TransferFailed`
        for pages that could not be had of host memory, where `failed` is not given.
        """
        start = time.perf_counter()
        if not batch:
            return np.zeros(0, np.int64)
        slots = self._slots_of([*batch, *sitting_out] if sitting_out else batch)
        slots.seat(batch, sitting_out)
        with self.spec.current():
            step = slots.step()
            logits = self._logits(slots, step, watched)
            with self._behind(slots):
                chosen = choose(slots.batch, logits, slots.greedy)
        if failures := slots.take_failures():
            for number in failures:
                # What it has of its newest token was computed from pages that were not there.
                slots.batch[number].release()
            if failed is None:
                raise next(iter(failures.values()))
            failed.update(failures)
            chosen[list(failures)] = -1
        slots.hear(chosen, time.perf_counter() - start)
        return chosen

    def sits_out(self, batch: Sequence[Decoding]) -> list[bool]:
        """Who should take no step yet, as pages that it has chosen are on their way.

        Empty where nobody should. A step that has one of them all the same waits for its pages.
        """
        if not any(pool.whole for pool in self.heads.host.values()) or not self._slots:
            return []
        found = [any(slots.sits_out(one) for slots in self._slots) for one in batch]
        return found if any(found) else []

    @contextmanager
    def _behind(self, slots: DecodeSlots) -> Iterator[None]:
        """Behind a step that is launched, prepares the next one while its tokens are awaited.

        What the device does for that it does beside the choice of tokens, and before all else.
        """
        if not slots.is_preparing:
            yield
            return
        moved = False

        def prepare() -> None:
            nonlocal moved
            moved = slots.prepare()

        prepared = self._aside.do(prepare)
        if moved:
            # What lay elsewhere before may be given to the choice of tokens.
            prepared.wait()
        yield
        prepared.wait()

    @needs_memory("decode round")
    def round(self, batch: Sequence[Decoding]) -> list[Run]:
        """Drafts and verifies some tokens of each sequence: what each says, or nothing of any.

        Nothing is said where none may draft, or where there is no room to: then a `step` is what is
        left to do, and nothing has changed. The tokens are not added to the sequences; the requests
        have KV of all but the last of each.

        # Errors
        `InvalidArgument` and `OutOfMemory` as for `step`. The requests have what they had then.
        """
        if self.rounds is None or not (drafts := self.rounds.drafts(batch)).any():
            return []
        start = time.perf_counter()
        slots = self._slots_of(batch)
        slots.seat(batch)
        # What a promoted head sees elsewhere is listed for one row of a request.
        if slots.promoted:
            return []
        known = [sequence.request.length for sequence in batch]
        try:
            with self.spec.current():
                runs = self.rounds.runs(slots, slots.step(drafts + 1))
        except BaseException as error:
            for sequence, length in zip(batch, known, strict=True):
                if not sequence.request.released:
                    sequence.request.truncate(length)
            if isinstance(error, PoolFull):
                return []
            raise
        for number, failure in slots.take_failures().items():
            # What its rows have said was computed from pages that were not there.
            batch[number].request.truncate(known[number])
            runs[number] = Run([], failure)
        slots.settle()
        with self.spec.current(), self._behind(slots):
            slots.hear(None, time.perf_counter() - start)
        return runs

    def promise(self, tokens: int) -> BoundsPromise | None:
        """Takes room for the bounds of a request that will have up to so many tokens.

        Whoever admits requests so never decodes one whose bounds find no memory. None where no head
        chooses among exact pages: there is nothing to promise.

        # Errors
        `PoolFull` where the device has no memory for them beside those of others.
        """
        if not self.heads.budgets:
            return None
        if not self._slots:
            self._slots.append(DecodeSlots(self.heads, self.pages, self.reads))
        chosen = self._slots[-1].chosen
        assert chosen is not None
        try:
            with self.spec.current():
                return chosen.promise(tokens)
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            text = f"bounds: expected memory for those of {tokens} tokens, got none: {error}"
            raise PoolFull(text) from error

    def _slots_of(self, batch: Sequence[Decoding]) -> DecodeSlots:
        """Those that members of the batch sit in already; or else those that are left by all."""
        last = self._slots[-1] if self._slots else None
        if last is not None and last.is_seated(batch):
            return last
        known = [s for s in self._slots if not s.members.keys().isdisjoint(batch)]
        empty = [s for s in self._slots if not s.members]
        if known or empty:
            found = (known or empty)[-1]
        elif len(self._slots) < _MOST_SLOTS:
            found = DecodeSlots(self.heads, self.pages, self.reads)
        else:
            found = self._slots[0]
        for others in known:
            if others is not found:
                # What they know of a request is old as soon as it takes a step here.
                others.let_go(batch)
        self._slots = [*(s for s in self._slots if s is not found), found]
        return found

    def _logits(self, slots: DecodeSlots, step: Step, watched: bool) -> torch.Tensor:
        """Logits f32 [B, V] of each request's newest token."""
        if self.graphs is not None and not self.heads.waits and slots.whole(step) is None:
            logits, self.queries = self.graphs.logits(slots, step, watched)
            return logits
        tables = DecodeTables.of(self.rotary, slots, step)
        self.queries = query_room(self.spec, len(slots.batch)) if watched else None
        return forward(self.spec, self.pages, tables, slots.rope, self.workspace, self.queries)

    def spill(self, batch: Sequence[Decoding]) -> bool:
        """Has pages of requests that may lie in the host's memory lie there; whether any has left.

        For those who find no room on the device before their next ranking, which then is anew.
        """
        left = [s for s in batch if [h for h in s.host.values() if h.spill_full()]]
        for sequence in left:
            self.forget(sequence.request)
        return bool(left)

    def forget(self, request: KvRequest | None = None) -> None:
        """Lets go of a request, or of all that took part in steps."""
        for slots in self._slots:
            slots.forget(request)
