"""A runner's packed pages in plain torch: transformers' own decoding over what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from cache_names import by_name, cache_of
from decode_batches import decoding
from kvweave.runner import Runner
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.prefill.prefilled import Prefill
from page_meaning import PAGE, Layer, Meaning, int4

SINK, RECENT = 64, 128
NAME = "packed_decoding"
INT4 = int4()


class PackedDecoding:
    """A model's own decoding of one text, some of whose tokens are what packed pages make of them.

    A decode step at position i reads tokens from the sink's end to i − RECENT so. A chunk of a
    prompt reads those so that lie before the exact page, of `block` tokens, which holds the first
    token within the window of its first row; its own tokens are exact. `packed_at_least`: the first
    so many are read so in any case, as they were found packed. Without `scales` all is exact.
    `sights` [L, G, 2]: window and sink of each KV head, 0 of those that see all.
    """

    def __init__(
        self,
        model: Any,
        block: int = 16,
        meaning: Meaning | None = INT4,
        sights: Any = None,
    ) -> None:
        self.model, self.block, self.meaning, self.sights = model, block, meaning, sights
        self.cache: Any = None
        self.length = 0
        self.packed_at_least = 0
        self._packed_end = 0
        self._made: dict[int, tuple[Meaning, Layer, Layer]] = {}

    def prefill(self, tokens: Any, chunk: int) -> torch.Tensor:
        """Logits [V] behind a prompt that is computed in chunks."""
        ids = [int(token) for token in tokens]
        for first in range(self.length, self.length + len(ids), chunk):
            end = max(0, first + 1 - RECENT) // self.block * self.block
            logits = self._feed(ids[first - self.length :][:chunk], end)
        self.length += len(ids)
        return logits

    def step(self, token: int) -> torch.Tensor:
        """Logits [V] behind one more token."""
        logits = self._feed([token], self.length + 1 - RECENT)
        self.length += 1
        return logits

    def _feed(self, tokens: list[int], packed_end: int) -> torch.Tensor:
        self._packed_end = max(packed_end, self.packed_at_least)
        AttentionInterface.register(NAME, self._attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            ids = torch.tensor([tokens], device=self.model.device)
            out = self.model(ids, **by_name(self.model, self.cache), use_cache=True)
        finally:
            self.model.set_attn_implementation(before)
        self.cache = cache_of(out)
        return out.logits[0, -1].float()

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        rows, total = query.shape[2], key.shape[2]
        group = query.shape[1] // key.shape[1]
        keys, values = key.double(), value.double()
        if self._packed_end > SINK and self.meaning is not None:
            whole = -(-self._packed_end // PAGE) * PAGE
            packed = slice(SINK, self._packed_end)
            text = keys[0, :, :whole], values[0, :, :whole]
            meant = self._meant(module.layer_idx, text)
            keys[0, :, packed], values[0, :, packed] = (x[:, packed] for x in meant)
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        hidden = self._hidden(module.layer_idx, query[0], key[0], rows, total).to(query.device)
        logits = query.double() @ keys.transpose(2, 3) * named["scaling"]
        logits = logits.masked_fill(hidden, -torch.inf)
        return (logits.softmax(-1) @ values).to(query.dtype).transpose(1, 2).contiguous(), None

    def _meant(self, layer: int, text: Layer) -> Layer:
        """What pages make of a text, which steps between two full pages ask again and again."""
        assert self.meaning is not None
        of, before, meant = self._made.get(layer, (None, text, text))
        if of is not self.meaning or not all(map(torch.equal, before, text)):
            before, meant = (text[0].clone(), text[1].clone()), self.meaning(layer, text)
            self._made[layer] = self.meaning, before, meant
        return meant

    def _hidden(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, rows: int, total: int
    ) -> torch.Tensor:
        """Which of all tokens the newest rows do not see: bool [R, T], or by query heads."""
        row, at = torch.arange(total - rows, total)[:, None], torch.arange(total)
        return unseen(row, at, self.sights, layer, len(query) // len(key))


class SeenDecoding(PackedDecoding):
    """A model's own decoding that keeps what attention has been given, layer by layer."""

    def prefill(self, tokens: Any, chunk: int) -> torch.Tensor:
        self.seen: list[list[torch.Tensor]] = []
        return super().prefill(tokens, chunk)

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any
    ) -> Any:
        self.seen.append([part[0].detach() for part in (query, key, value)])
        return super()._attend(module, query, key, value, mask, **named)


def unseen(row: torch.Tensor, at: torch.Tensor, sights: Any, layer: int, group: int) -> Any:
    """Which tokens [T] rows [R, 1] do not see, bool [R, T], or [H, R, T] by heads with windows."""
    hidden = at > row
    if sights is None:
        return hidden
    of = []
    for window, sink in np.repeat(sights[layer], group, 0).tolist():
        behind = (at <= row - window) & (at >= sink) if window else torch.zeros_like(hidden)
        of.append(hidden | behind)
    return torch.stack(of)


def packed_runner(model: Any, **settings: Any) -> Runner:
    """A runner whose full pages are packed."""
    given = {"max_tokens": 2048, "progress": False, "check": False, "kv_dtype": "int4"}
    return Runner(model, **{**given, **settings})


def steps_of(
    runner: Runner, sequence: Decoding, steps: int, said: list[int] | None = None
) -> list[torch.Tensor]:
    """The logits of so many decode steps of a request, which says the likeliest, or is made to.

    `said`: what it has said behind each step.
    """
    seen: list[torch.Tensor] = []

    def choose(_batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
        seen.append(logits[0].float().clone())
        sequence.choose(logits[0])
        if said is not None:
            sequence.tokens[-1] = said[len(seen) - 1]
        return np.array([sequence.tokens[-1]])

    with torch.inference_mode():
        for _ in range(steps):
            runner._decoder.step([sequence], choose=choose)
    runner._decoder.forget(sequence.request)
    return seen


def said_behind(
    runner: Runner, done: Prefill, steps: int, said: list[int] | None = None
) -> tuple[list[int], list[torch.Tensor]]:
    """What is said behind a prefilled prompt, or `said`, and the logits of each."""
    first = done.logits[-1].float().clone()
    sequence = decoding(runner, done, steps + 1)
    if said is not None:
        sequence.tokens[-1] = said[0]
    seen = steps_of(runner, sequence, steps, None if said is None else said[1:])
    return list(sequence.tokens), [first, *seen]


def apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The largest difference of the logits of as many steps, wherever these lie."""
    pairs = zip(one, other, strict=True)
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs)


def nothing_is_held(runner: Runner) -> bool:
    """Whether all blocks, exact and packed, are back and the books agree."""
    assert runner.packed is not None
    for cache in (runner.cache, runner.packed.cache):
        cache.check()
        if cache.stats()["held"]:
            return False
    return True
