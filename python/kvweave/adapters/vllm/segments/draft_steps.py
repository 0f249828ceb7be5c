"""Decode steps of drafts in vLLM: one row through all layers, each making the next one ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context

from kvweave import ops
from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import Entries
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.device_memory import is_shortage

_log = logging.getLogger(__name__)

Addresses = tuple[int, ...]


@dataclass(frozen=True)
class DraftedPrompt:
    """A prompt of `length` tokens that is drafted from, its entries in each class of heads.

    `count` tokens are drafted, the first of them being `first` i64 []; `last` [1, E] are the states
    of the prompt's last token behind the last layer and its norm.
    """

    entries: list[Entries]
    length: int
    count: int
    last: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True)
class _Room:
    """What steps read and write, at addresses that stay.

    `last` [1, E]; `first` i64 [1], the token that a draft begins with, −1 behind its first step;
    `at` i32 [1] and `slot` i64 [1], where the next token stands; `entries` [N, 5] of each class of
    heads, those of the longest prompt and of the draft, and `ends` i32 [2] of them; `queries` of
    each layer [P, H, D], by the token's number in the draft.
    """

    last: torch.Tensor
    first: torch.Tensor
    at: torch.Tensor
    slot: torch.Tensor
    entries: list[torch.Tensor]
    ends: list[torch.Tensor]
    queries: list[torch.Tensor]

    @classmethod
    def of(cls, layers: AttentionLayers, longest: int, last: torch.Tensor) -> _Room:
        """Room for drafts of a page behind prompts of up to `longest` tokens."""
        number = torch.zeros(1, dtype=torch.int32, device=last.device)
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
            torch.empty_like(last),
            number.long(),
            number,
            number.long(),
            [number.new_zeros(-(-longest // size) + 1, 5) for size in sizes],
            [number.new_zeros(2) for _ in sizes],
            [last.new_empty(shape) for shape in shapes],
        )

    def take(self, prompt: DraftedPrompt) -> list[Entries]:
        """Makes the first step of a draft ready, whose entry is the null block's; what steps read.

        Where a graph may know them these are all that there is room for, and `ends` says how many
        count. Elsewhere they end where they are told to.
        """
        listed: list[Entries] = []
        for entries, ends, given in zip(self.entries, self.ends, prompt.entries, strict=True):
            pages, begin = len(given.rows), len(listed) * len(self.queries[0])
            entries[:pages] = given.rows
            own = [0, begin, begin + prompt.count, prompt.length, 0]
            known = torch.tensor([*own, 0, pages + 1], dtype=torch.int32).to(entries.device)
            entries[pages], ends[:] = known[:5], known[5:]
            listed.append(Entries(entries if entries.is_cuda else entries[: pages + 1], ends))
        self.last.copy_(prompt.last)
        self.first.copy_(prompt.first)
        self.at.fill_(prompt.length)
        self.slot.zero_()
        return listed


@dataclass(frozen=True)
class _Step:
    """A step of a draft: what it calls, and what it reads and writes."""

    model: Any
    layers: AttentionLayers
    room: _Room
    entries: list[Entries]
    workspaces: list[ops.Workspace]

    def run(self) -> None:
        """The likeliest token behind `last` through all layers; the next step begins with that."""
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
                null[:, which].index_copy_(1, slot, fresh[0, :, None].to(null.dtype))
            room.queries[number][:, part.query_heads].index_copy_(0, room.slot, q)

        return [
            PagedMetadata(
                rows=1,
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


class DraftSteps:
    """Drafts, one after the other, of prompts of up to `longest` tokens.

    vLLM has given no block for their keys and values. They go into its null block, number 0, which
    vLLM keeps out of circulation: tables name it where there is no block, and nobody reads what it
    holds. Whoever drafts zeroes it again. Each class of heads has as many of its slots.

    On a GPU the step is captured behind the first draft and replayed from then on, where this rank
    has all of the model.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._room: _Room | None = None
        self._workspaces: list[ops.Workspace] = []
        self._known: Addresses = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tried = False
        self._capturable = True

    def queries(
        self,
        model: Any,
        layers: AttentionLayers,
        prompt: DraftedPrompt,
    ) -> tuple[list[torch.Tensor], list[Entries]]:
        """The likeliest next tokens' queries in each layer, [count, H, D], and the entries.

        The entries of each class of heads are of the prompt and of these tokens, whose keys and
        values are in the null block then. All are valid until the next draft.
        """
        room = self._room_of(layers, prompt.last)
        step = _Step(model, layers, room, room.take(prompt), self._workspaces)
        if self._graph is None and self._tried and self._capturable:
            self._capture(step)
        for _ in range(prompt.count):
            if self._graph is None:
                step.run()
            else:
                self._graph.replay()
        self._tried = True
        asked = [queries[: prompt.count] for queries in room.queries]
        listed = zip(room.entries, room.ends, prompt.entries, strict=True)
        return asked, [Entries(own[: len(given.rows) + 1], ends) for own, ends, given in listed]

    def _room_of(self, layers: AttentionLayers, last: torch.Tensor) -> _Room:
        """The room; another one, and no graph, where vLLM has other memory than before."""
        known = tuple(part.pages.data_ptr() for part in layers.parts)
        if self._room is None or known != self._known:
            self._room, self._known = _Room.of(layers, self.longest, last), known
            self._graph, self._tried = None, False
            self._workspaces = [ops.Workspace(last.device) for _ in layers.classes]
            alone = get_tensor_model_parallel_world_size() == 1
            self._capturable = last.is_cuda and alone
        return self._room

    def _capture(self, step: _Step) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step.run()
        except RuntimeError as error:
            # Where there was no room for it there may be some another time.
            self._capturable = is_shortage(error)
            _log.warning("a draft's steps are launched one kernel at a time: %s", error)
            return
        self._graph = graph
