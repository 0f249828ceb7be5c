"""Decode steps of drafts in vLLM: a row of each through all layers, making the next ones ready."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import get_forward_context

from kvweave import ops
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import Entries
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.adapters.vllm.segments.ranks import all_of
from kvweave.device_memory import is_shortage, sent
from kvweave.runner.decode.capture import captured

_log = logging.getLogger(__name__)

Addresses = tuple[int, ...]
Asked = tuple[list[torch.Tensor], list[Entries]]


@dataclass(frozen=True)
class DraftedPrompt:
    """A prompt of `length` tokens that is drafted from, its entries in each class of heads.

    D drafts of `count` tokens are made side by side, which begin with `firsts` i64 [D]; `last`
    [1, E] are the states of the prompt's last token behind the last layer and its norm.
    """

    entries: list[Entries]
    length: int
    count: int
    last: torch.Tensor
    firsts: torch.Tensor


@dataclass(frozen=True)
class _Room:
    """What steps of D drafts read and write, at addresses that stay.

    `last` [D, E]; `first` i64 [D], the tokens that drafts begin with, −1 behind their first step;
    `at` i32 [D] and `slot` i64 [D], where the next tokens stand; of each class of heads `entries`
    [D · N, 5], tables of the longest prompt and of a draft one behind the other, and `ends` i32
    [D + 1] of them; `queries` of each layer [P, H, D], by the token's slot.
    """

    last: torch.Tensor
    first: torch.Tensor
    at: torch.Tensor
    slot: torch.Tensor
    entries: list[torch.Tensor]
    ends: list[torch.Tensor]
    queries: list[torch.Tensor]

    @classmethod
    def of(cls, layers: AttentionLayers, longest: int, last: torch.Tensor, drafts: int) -> _Room:
        """Room for so many drafts, a page in all, behind prompts of up to `longest` tokens."""
        number = torch.zeros(drafts, dtype=torch.int32, device=last.device)
        sizes = [part.page_tokens for part in layers.classes]
        shapes = [
            (
                layers.draft_tokens,
                sum(part.attends.num_heads for part in parts),
                parts[0].attends.head_size,
            )
            for parts in layers.layers
        ]
        return cls(
            last.new_empty(drafts, last.shape[1]),
            number.long(),
            number,
            number.long(),
            [number.new_zeros(drafts * (-(-longest // size) + 1), 5) for size in sizes],
            [number.new_zeros(drafts + 1) for _ in sizes],
            [last.new_empty(shape) for shape in shapes],
        )

    def take(self, prompt: DraftedPrompt) -> list[Entries]:
        """Makes the first step ready; what steps read: drafts are in the null block.

        Where a graph may know them these are all that there is room for, and `ends` says how many
        count. Elsewhere they end where they are told to.
        """
        listed: list[Entries] = []
        drafts, count = len(self.at), prompt.count
        begins = range(0, drafts * count, count)
        for entries, ends, given in zip(self.entries, self.ends, prompt.entries, strict=True):
            pages, first = len(given.rows) + 1, len(listed) * len(self.queries[0])
            own = [[0, first + at, first + at + count, prompt.length, 0] for at in begins]
            tables = entries[: drafts * pages].view(drafts, pages, 5)
            tables[:, :-1] = given.rows
            tables[:, -1] = sent(np.array(own, np.int32), entries.device)
            torch.arange(0, drafts * pages + 1, pages, out=ends)
            listed.append(Entries(entries if entries.is_cuda else tables.flatten(0, 1), ends))
        self.last.copy_(prompt.last.expand_as(self.last))
        self.first.copy_(prompt.firsts)
        self.at.fill_(prompt.length)
        torch.arange(begins.start, begins.stop, begins.step, out=self.slot)
        return listed

    def of_draft(self, number: int, prompt: DraftedPrompt) -> Asked:
        """One draft's queries in each layer [count, H, D], and its entries in each class."""
        begin = number * prompt.count
        queries = [queries[begin : begin + prompt.count] for queries in self.queries]
        listed = []
        for entries, ends, given in zip(self.entries, self.ends, prompt.entries, strict=True):
            pages = len(given.rows) + 1
            rows = entries[number * pages : (number + 1) * pages]
            # All tables are as long, so each ends by itself where the first one does.
            listed.append(Entries(rows, ends[:2]))
        return queries, listed


@dataclass(frozen=True)
class _Step:
    """A step of drafts: what it calls, and what it reads and writes."""

    model: Any
    layers: AttentionLayers
    room: _Room
    entries: list[Entries]
    workspaces: list[ops.Workspace]

    def run(self) -> None:
        """The likeliest tokens behind `last` through all layers; the next step begins with them."""
        room, layers, model = self.room, self.layers, self.model
        context: Any = get_forward_context()
        context.attn_metadata = layers.by_name(self._metadata())
        likeliest = model.compute_logits(room.last).argmax(-1)
        token = torch.where(room.first < 0, likeliest, room.first)
        hidden, residual = model.model.embed_input_ids(token), None
        at = room.at.long()
        for layer in model.model.layers:
            hidden, residual = layer(at, hidden, residual)
        last, _ = model.model.norm(hidden, residual)
        room.last.copy_(last)
        room.first.fill_(-1)
        room.at.add_(1)
        room.slot.add_(1)

    def _metadata(self) -> list[PagedMetadata]:
        room = self.room
        asked = ((n, part) for n, layer in enumerate(self.layers.layers) for part in layer)

        def write(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            number, part = next(asked)
            null, slot = part.pages[: part.kv_heads], room.slot + part.number * len(room.queries[0])
            for which, fresh in enumerate((k, v)):
                null[:, which].index_copy_(1, slot, fresh.transpose(0, 1).to(null.dtype))
            room.queries[number][:, part.query_heads].index_copy_(0, room.slot, q)

        return [
            PagedMetadata(
                rows=len(room.at),
                decode=True,
                positions=room.at,
                row_offsets=entries.offsets[:0],
                slots=entries.rows[:0, :2],
                entries=entries,
                workspace=workspace,
                observer=write,
                writes=False,
            )
            for entries, workspace in zip(self.entries, self.workspaces, strict=True)
        ]


class _Drafting:
    """Steps of a number of drafts side by side: their room, and the graph of a step once it is.

    On a GPU the step is captured behind the first drafts and replayed from then on.
    """

    def __init__(self, layers: AttentionLayers, room: _Room) -> None:
        self.room = room
        self.graph: torch.cuda.CUDAGraph | None = None
        self._workspaces = [ops.Workspace(room.last.device) for _ in layers.classes]
        self._tried = False
        self._capturable = room.last.is_cuda

    def run(self, model: Any, layers: AttentionLayers, prompt: DraftedPrompt) -> None:
        """All steps of a prompt's drafts."""
        step = _Step(model, layers, self.room, self.room.take(prompt), self._workspaces)
        if self.graph is None and self._tried and self._capturable:
            self._capture(step)
        for _ in range(prompt.count):
            if self.graph is None:
                step.run()
            else:
                self.graph.replay()
        self._tried = True

    def _capture(self, step: _Step) -> None:
        graph, whole, again = torch.cuda.CUDAGraph(), True, True
        try:
            # vLLM's: what ranks add up among themselves is to lie where all of them know it to.
            with (
                graph_capture(step.room.last.device) as to,
                captured(graph, stream=to.stream),
            ):
                step.run()
        except RuntimeError as error:
            # Where there was no room for it there may be some another time.
            whole, again = False, is_shortage(error)
            _log.warning("a draft's steps are launched one kernel at a time: %s", error)
        self.graph = graph if all_of(whole) else None
        self._capturable = all_of(again)


class DraftSteps:
    """Drafts of prompts of up to `longest` tokens, as many side by side as a page has room for.

    vLLM has given no block for their keys and values. They go into its null block, number 0, which
    vLLM keeps out of circulation: tables name it where there is no block, and nobody reads what it
    holds. Whoever drafts zeroes it again. Each class of heads has as many of its slots.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.made: dict[int, _Drafting] = {}
        """By how many drafts are made side by side."""
        self._known: Addresses = ()

    def asked(self, model: Any, layers: AttentionLayers, prompt: DraftedPrompt) -> Iterator[Asked]:
        """Of each draft its queries in each layer, [count, H, D], and the entries that they read.

        The entries of each class of heads are of the prompt and of these tokens, whose keys and
        values are in the null block then. All are valid until the next one is asked for.
        """
        most = max(1, layers.draft_tokens // prompt.count)
        for firsts in torch.split(prompt.firsts, most):
            some = replace(prompt, firsts=firsts)
            drafting = self._of(layers, prompt.last, len(firsts))
            drafting.run(model, layers, some)
            for number in range(len(firsts)):
                yield drafting.room.of_draft(number, some)

    def _of(self, layers: AttentionLayers, last: torch.Tensor, drafts: int) -> _Drafting:
        """Those of so many drafts; all anew where vLLM has other memory than before."""
        known = tuple(part.pages.data_ptr() for part in layers.parts)
        if known != self._known:
            self.made.clear()
            self._known = known
        if drafts not in self.made:
            room = _Room.of(layers, self.longest, last, drafts)
            self.made[drafts] = _Drafting(layers, room)
        return self.made[drafts]
