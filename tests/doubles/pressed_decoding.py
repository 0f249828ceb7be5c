"""What a pressed context says, in plain torch: the definition of packed and ranked pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from page_meaning import PAGE, Meaning
from press_hooks import Dropped
from ranked_pages import best_pages, page_score

NAME = "pressed_decoding"
SINK, RECENT = 64, 128


@dataclass
class PressedDecoding:
    """A model's own forward over a context, a question and an answer, [C + n + a] tokens in one.

    The context's rows attend as ever. The others do not see what was `dropped`; of the tokens that
    a head kept of the context all but the first 64 and the newest 128, in whole pages of 64, are
    what `meaning` makes of them. Rows behind the question are single ones: of pages of `page`
    tokens that a head has (packed ones with a `meaning`) each reads `most`, the first one, the
    newest two and the best by the bounds of exact keys, and what is not packed besides. `reads`:
    instead, by layer and KV head, how many and by what score; None for all.
    """

    model: Any
    context: int
    question: int
    dropped: Dropped
    meaning: Meaning | None = None
    most: int | None = None
    page: int = 16
    reads: Callable[[int, int], tuple[int, str] | None] | None = None

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [n + a, V] behind each token of the question and the answer, ids [1, T]."""
        AttentionInterface.register(NAME, self._attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            return self.model(ids, use_cache=False).logits[0, self.context :].float()
        finally:
            self.model.set_attn_implementation(before)

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        dropped = self.dropped(module.layer_idx)
        kept = [torch.nonzero(~dropped[head])[:, 0] for head in range(heads)]
        packed = [self._packed(some) for some in kept]
        meant = self._meant(module.layer_idx, key[0].double(), value[0].double(), packed)
        out = torch.zeros(query.shape, dtype=torch.float64)
        for row in range(query.shape[2]):
            for head in range(heads):
                own = slice(head * group, (head + 1) * group)
                q = query[0, own, row].double()
                k, v = key[0, head].double(), value[0, head].double()
                if row < self.context:
                    seen = torch.arange(row + 1)
                else:
                    k, v = (x[head] for x in meant)
                    seen = torch.cat((kept[head], torch.arange(self.context, row + 1)))
                    read = self._reads(module.layer_idx, head)
                    if row >= self.context + self.question and read is not None:
                        seen = self._read(q, key[0, head], seen, packed[head], read)
                weights = (q @ k[seen].mT * named["scaling"]).softmax(-1)
                out[0, own, row] = weights @ v[seen]
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    def _reads(self, layer: int, head: int) -> tuple[int, str] | None:
        """How many pages a head reads, and by what score; None for all."""
        if self.reads is not None:
            return self.reads(layer, head)
        return None if self.most is None else (self.most, "min-max")

    def _packed(self, kept: torch.Tensor) -> torch.Tensor:
        """Which of the tokens that a head kept are packed."""
        if self.meaning is None:
            return kept[:0]
        count = max(0, len(kept) - SINK - RECENT) // PAGE * PAGE
        return kept[SINK : SINK + count]

    def _meant(self, layer: int, key: Any, value: Any, packed: list[torch.Tensor]) -> Any:
        """Keys and values [G, T, D] with what packed pages make of the tokens in them."""
        key, value = key.clone(), value.clone()
        most = max(map(len, packed))
        if self.meaning is None or not most:
            return key, value
        sides = []
        for x in (key, value):
            text = torch.zeros(len(x), most, x.shape[-1], dtype=x.dtype)
            for head, some in enumerate(packed):
                text[head, : len(some)] = x[head, some]
            sides.append(text)
        for x, text in zip((key, value), self.meaning(layer, (sides[0], sides[1])), strict=True):
            for head, some in enumerate(packed):
                x[head, some] = text[head, : len(some)]
        return key, value

    def _read(
        self, q: Any, key: Any, seen: torch.Tensor, packed: torch.Tensor, read: tuple[int, str]
    ) -> torch.Tensor:
        """Of the tokens that a single row sees those that it reads."""
        most, score = read
        ranked = packed if self.meaning is not None else seen
        pages = ranked.split(PAGE if self.meaning is not None else self.page)
        if len(pages) <= most:
            return seen
        best = best_pages([page_score(q, key[page], score) for page in pages], most)
        chosen = torch.cat([pages[page] for page in best])
        return torch.cat((seen[~torch.isin(seen, ranked)], chosen))
