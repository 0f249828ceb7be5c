"""Documents in packed pages in plain torch, and over an exact runner whose pages say the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from families import random_tokens
from kvweave.runner import Runner, Segment
from packed_decoding import INT4, RECENT, SINK, PackedDecoding, unseen
from page_meaning import PAGE, Layer, Meaning, int4

NAME = "document_decoding"


def fresh(count: int, seed: int) -> Segment:
    """Tokens that are found nowhere."""
    return Segment(tokens=random_tokens(count, seed).tolist(), namespace="fresh")


def documents(counts: Sequence[int]) -> list[Segment]:
    """Documents of so many tokens, the i-th of a seed of its own."""
    return [Segment(tokens=random_tokens(n, 100 + i).tolist()) for i, n in enumerate(counts)]


def insert_all(runner: Runner, some: Sequence[Segment]) -> None:
    """Freezes documents by their numbers."""
    for number, segment in enumerate(some):
        assert segment.tokens is not None
        runner.insert(segment.tokens, str(number))


class DocumentDecoding:
    """A model's own decoding of a prompt whose documents are what packed pages make of them, moved.

    Of a prompt what no document covers, the sink and the last token are computed, over documents
    as they are. A step at position i reads what was decoded, up to i − RECENT, as the page that it
    filled has it. Without `meaning` all is exact; `of_documents` is that of documents, if another.
    So many tokens at the beginning of each document, `exact_first`, are as they were computed.
    """

    def __init__(
        self,
        model: Any,
        chunk: int = 2048,
        block: int = 16,
        meaning: Meaning | None = INT4,
        of_documents: Meaning | None = None,
        sights: Any = None,
        exact_first: int = 0,
    ) -> None:
        self.sights, self.exact_first = sights, exact_first
        self.model, self.chunk, self.block, self.meaning = model, chunk, block, meaning
        self.of_documents = of_documents or meaning
        self.layers: list[Layer] = []
        self._rows = np.zeros(0, np.int64)
        self._tokens = np.zeros(0, np.int64)

    def prefill(self, parts: Sequence[Segment]) -> torch.Tensor:
        """Logits [V] behind a prompt; parts of namespace "" are documents."""
        tokens = np.concatenate([np.asarray(part.tokens) for part in parts])
        self._tokens, config = tokens, self.model.config
        shape = config.num_key_value_heads, len(tokens), config.head_dim
        self.layers = [
            (torch.zeros(shape).double(), torch.zeros(shape).double())
            for _ in range(config.num_hidden_layers)
        ]
        computed, at = np.ones(len(tokens), bool), 0
        for part in parts:
            end = at + len(part.tokens or ())
            if not part.namespace:
                self._place(part.tokens, at)
                computed[at:end] = False
            at = end
        computed[:SINK] = computed[-1] = True
        rows = np.flatnonzero(computed)
        return self._feed(tokens[rows], rows)

    def recompute(self, rows: Any) -> torch.Tensor:
        """Logits [V] behind the prompt once rows [R], the last among them, are computed anew.

        They read each other, and all else as it is.
        """
        return self._feed(self._tokens[rows], np.asarray(rows, np.int64))

    def step(self, token: int) -> torch.Tensor:
        """Logits [V] behind one more token."""
        at = self.layers[0][0].shape[1]
        grown = [tuple(torch.cat((x, x[:, :1] * 0), 1) for x in pair) for pair in self.layers]
        self.layers = [(k, v) for k, v in grown]
        return self._feed(np.asarray([token]), np.asarray([at]))

    def _place(self, tokens: Any, at: int) -> None:
        alone = PackedDecoding(self.model, self.block, self.meaning, self.sights)
        alone.prefill(tokens, self.chunk)
        frequencies = self.model.model.rotary_emb.inv_freq.double()
        angle = torch.cat((frequencies, frequencies)) * at
        for number, cached in enumerate(alone.cache.layers):
            layer = self.layers[number]
            keys, values = cached.keys[0].double(), cached.values[0].double()
            if self.of_documents is not None:
                meant = self.of_documents(number, (keys, values))
                meant = begun_exactly((keys, values), meant, self.exact_first)
                keys, values = meant
            one, other = keys.chunk(2, -1)
            span = slice(at, at + len(tokens))
            layer[0][:, span] = keys * angle.cos() + torch.cat((-other, one), -1) * angle.sin()
            layer[1][:, span] = values

    def _feed(self, tokens: Any, rows: Any) -> torch.Tensor:
        self._rows = rows
        AttentionInterface.register(NAME, self._attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            ids, places = (
                torch.tensor(np.asarray(x)[None].astype(np.int64)) for x in (tokens, rows)
            )
            out = self.model(ids, position_ids=places, use_cache=False)
        finally:
            self.model.set_attn_implementation(before)
        return out.logits[0, -1].float()

    def _read(self, number: int, layer: Layer) -> Layer:
        """Keys and values as the rows read them, where pages were filled behind the prompt."""
        keys, values = (x.clone() for x in layer)
        end = int(self._rows[0]) - RECENT + 1
        first = len(self._tokens) // PAGE * PAGE
        if self.meaning is not None and len(self._rows) == 1:
            for page in range(first, end, PAGE):
                span = slice(page, page + PAGE)
                meant = self.meaning(number, (layer[0][:, span], layer[1][:, span]))
                seen = slice(max(page, len(self._tokens), SINK), min(page + PAGE, end))
                if seen.start < seen.stop:
                    within = slice(seen.start - page, seen.stop - page)
                    keys[:, seen], values[:, seen] = (part[:, within] for part in meant)
        return keys, values

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, _mask: Any, **named: Any
    ) -> tuple[torch.Tensor, None]:
        layer, rows = self.layers[module.layer_idx], torch.from_numpy(self._rows)
        layer[0][:, rows], layer[1][:, rows] = key[0].double(), value[0].double()
        keys, values = self._read(module.layer_idx, layer)
        group = query.shape[1] // keys.shape[0]
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        logits = query[0].double() @ keys.transpose(1, 2) * named["scaling"]
        at, number = torch.arange(keys.shape[1])[None], module.layer_idx
        hidden = unseen(rows[:, None], at, self.sights, number, group)
        out = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        return out[None].to(query.dtype).transpose(1, 2).contiguous(), None


def begun_exactly(of: Layer, meant: Layer, tokens: int) -> Layer:
    """What is meant of a document whose first tokens are exact."""
    keys, values = (
        torch.cat((exact[:, :tokens], other[:, tokens:]), 1)
        for exact, other in zip(of, meant, strict=True)
    )
    return keys, values


def unpacked_runner(
    model: Any,
    some: Sequence[Segment],
    meaning: Meaning | None = None,
    exact_first: int = 0,
    **settings: Any,
) -> Runner:
    """An exact runner whose documents are what packed pages make of them: its own are written over.

    `meaning`: that of the pages; None for INT4 with the scales that go with the model. So many
    tokens at the beginning of each, `exact_first`, stay as they are.
    """
    settings = {"max_tokens": 16384, "progress": False, "check": False, **settings}
    runner = Runner(model, page_tokens=PAGE, **{"mode": "share", **settings})
    insert_all(runner, some)
    meaning = meaning or int4("f16" if runner.spec.dtype == torch.float16 else "bf16")
    pages, heads = runner._decoder.pages, runner.spec.kv_heads
    for segment in some:
        tokens = np.asarray([0, *(segment.tokens or ()), 0], np.int32)
        asked = {"segments": [(1, len(tokens) - 1, "")], "regime": runner.regime(len(tokens))}
        with runner.cache.admit(tokens, namespace="reader", mode="share", **asked) as found:
            for block, begin, end, at, delta in found.entries().tolist():
                if delta == 0:
                    # The first and the last token are the request's own.
                    continue
                for layer in range(len(runner.spec.layers)):
                    first = block + layer * heads
                    of = pages[first : first + heads, :, begin:end]
                    exact = of.double().unbind(1)
                    kept = exact_first if at == 1 else 0
                    meant = begun_exactly(exact, meaning(layer, exact), kept)
                    of.copy_(torch.stack(meant, 1))
    return runner
