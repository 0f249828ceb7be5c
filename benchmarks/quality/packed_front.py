"""What packed pages cost in quality: `python -m benchmarks.quality.packed_front MODEL --out FILE`.

Of a prompt, the tokens between its first and newest ones become what packed pages make of them;
text that follows is then read over them, by transformers' own attention in float32. KL is to the
same over exact keys and values, a token; intervals are over texts (`lab.eval.statistics`), those of
differences over pairs. Bases are fitted on the very tokens that are packed ("own", as MosaicKV has
it), or once on other texts ("calibrated"): every second document of a corpus is for that, and
the others are measured on. What is in FILE is not measured again; `--figure PATH` draws it.

On the CPU pages of `kvweave.ops` are packed and unpacked; with `--device cuda` their arithmetic is
torch's (`packed_arithmetic`), as it is everywhere for ways that have no pages. With block selection
a row reads, of the packed blocks, those whose mean key scores highest, a quarter of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.quality.packed_arithmetic import PAGE
from benchmarks.quality.packed_bases import Moments
from benchmarks.quality.packed_chart import save_chart, table
from benchmarks.quality.packed_ways import Bases, Way, front, made_by_pages, made_of
from benchmarks.report.record import machine
from kvweave import models
from kvweave.adapters.transformers.cache_argument import cache_argument
from kvweave.lab.eval.corpus import Corpus, corpus_of, halves

SINK, RECENT = 64, 128
"""Tokens at either end of a prompt that stay exact."""
SEED = 1
WAYS = front()


class Attention:
    """Transformers' own attention; its queries can be summed, and it may read few blocks."""

    NAME = "packed-front"

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self.queries: list[torch.Tensor] | None = None
        """Of each layer Σ q qᵀ f64 [G, D, D], where it is to be summed."""
        self.blocks: int | None = None
        """Packed blocks that a row reads at most."""
        self.packed = 0
        """Blocks behind the sink that are packed."""
        AttentionInterface.register(self.NAME, self)
        AttentionMaskInterface.register(self.NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """As `sdpa`; query [1, H, R, D], key and value [1, G, S, D]."""
        if self.queries is not None:
            rows = query[0].unflatten(0, (key.shape[1], -1)).flatten(1, 2).double()
            self.queries.append(rows.mT @ rows)
        if self.blocks is not None:
            attention_mask = self._chosen(query, key)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **rest)

    def _chosen(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """What each row may read [1, H, R, S], bool."""
        (_, heads, rows, _), (kv_heads, slots) = query.shape, key.shape[1:3]
        read = torch.ones(rows, slots, dtype=torch.bool, device=key.device).tril(slots - rows)
        packed = slice(SINK, SINK + self.packed * PAGE)
        means = key[0, :, packed].unflatten(1, (-1, PAGE)).mean(2)
        scores = query[0].unflatten(0, (kv_heads, -1)) @ means[:, None].mT
        best = scores.amax(1).topk(min(self.blocks or 0, self.packed), dim=-1).indices
        chosen = torch.zeros(kv_heads, rows, self.packed, dtype=torch.bool, device=key.device)
        chosen = chosen.scatter_(-1, best, True).repeat_interleave(PAGE, -1)
        read = read.expand(kv_heads, -1, -1).clone()
        read[..., packed] &= chosen
        return read.repeat_interleave(heads // kv_heads, 0)[None]


class Bench:
    """A model in float32 and the texts that it reads."""

    def __init__(self, name: str, corpus: str, length: int, following: int, device: str) -> None:
        self.model, self.tokenizer = models.load(name, torch.float32, device=device)
        self.device = torch.device(device)
        self.taken_as = cache_argument(self.model.forward)
        self.calibrated_on, self.measured_on = halves(corpus_of(corpus))
        self.length, self.following = length, following
        config = self.model.config
        self.layers = config.num_hidden_layers
        self.dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.attention = Attention(self.dim)
        self.attention.packed = (length - SINK - RECENT) // PAGE
        self.model.set_attn_implementation(Attention.NAME)
        self.bases: Bases | None = None

    def gpu(self) -> dict[str, str]:
        """The GPU that texts are read on, where it is one."""
        return {} if self.device.type == "cpu" else {"gpu": torch.cuda.get_device_name()}

    def calibrate(self, texts: int) -> None:
        """Fits the calibrated bases on texts that none is measured on."""
        moments = [self.read(self.tokens(self.calibrated_on, index))[1] for index in range(texts)]
        self.bases = Bases(sum(moments[1:], moments[0]))

    def tokens(self, corpus: Corpus, index: int) -> torch.Tensor:
        """A stretch of text [1, length + following]."""
        rng = np.random.default_rng([SEED, index])
        ids = corpus.token_slice(rng, self.encode, self.length + self.following)
        return torch.tensor([ids], device=self.device)

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without special tokens."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False).input_ids]

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Moments]:
        """Of a prompt K and V [2, layers · G, length, D], and the moments of what is packed of it
        and of all of its queries."""
        self.attention.queries = []
        cache = DynamicCache()
        self.model(tokens[:, : self.length], logits_to_keep=1, **{self.taken_as: cache})
        queries, self.attention.queries = torch.cat(self.attention.queries), None
        kv = torch.stack([torch.cat([getattr(layer, side)[0] for layer in cache.layers])
                          for side in ("keys", "values")])  # fmt: skip
        group = self.model.config.num_attention_heads * self.layers // len(queries)
        moments = Moments.of(kv[:, :, SINK:-RECENT], queries, group * self.length)
        return kv, moments

    @torch.inference_mode()
    def follow(self, kv: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities f64 [following, V] over a prompt's K and V."""
        cache = DynamicCache()
        for layer, (k, v) in enumerate(zip(*(part.chunk(self.layers) for part in kv), strict=True)):
            cache.update(k[None], v[None], layer)
        out = self.model(tokens[:, self.length :], **{self.taken_as: cache})
        return out.logits[0].double().log_softmax(-1)

    def measure(self, index: int, ways: Sequence[Way]) -> dict[str, Any]:
        """Of one text the KL, what the text surprises more, and the share of likeliest tokens that
        stay, by way."""
        tokens = self.tokens(self.measured_on, index)
        kv, moments = self.read(tokens)
        exact = self.follow(kv, tokens)
        middle = kv[:, :, SINK:-RECENT].contiguous()
        targets = tokens[0, self.length + 1 :, None]

        def surprise(logs: torch.Tensor) -> float:
            return -float(logs[:-1].gather(1, targets).mean())

        found: dict[str, Any] = {"text": index}
        for way in ways:
            read = torch.cat((kv[:, :, :SINK], self.packed(middle, way, moments),
                              kv[:, :, -RECENT:]), 2)  # fmt: skip
            if way.blocks < 1.0:
                self.attention.blocks = max(1, round(way.blocks * self.attention.packed))
            got, self.attention.blocks = self.follow(read, tokens), None
            kl = (exact.exp() * (exact - got)).sum(-1)
            same = exact.argmax(-1) == got.argmax(-1)
            found[way.name] = {
                "kl": float(kl.mean()),
                "surprise": surprise(got) - surprise(exact),
                "agreement": float(same.double().mean()),
            }
        return found

    def packed(self, kv: torch.Tensor, way: Way, own: Moments) -> torch.Tensor:
        """What a way makes of K and V [2, N, T, D]."""
        assert self.bases is not None
        basis = self.bases.of_text(way, own)
        of = way.format(self.dim) if self.device.type == "cpu" else None
        return made_of(kv, way, basis, own) if of is None else made_by_pages(kv, of, basis)


def bytes_of(way: Way, head_dim: int) -> dict[str, float]:
    """Bytes a token and KV head of the pages, and of a basis of its own at two lengths."""
    pages, basis = way.page_bytes(head_dim), way.basis_bytes(head_dim)
    return {"pages": pages, "with basis, 832 tokens": pages + basis / 832,
            "with basis, 64K tokens": pages + basis / 65536, "blocks": way.blocks}  # fmt: skip


def kept(path: Path) -> dict[str, Any]:
    """What a file holds."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"texts": []}


def left(record: Mapping[str, Any], texts: int) -> dict[int, list[Way]]:
    """The ways that are not measured yet, by text."""
    done = {text["text"]: text for text in record["texts"]}
    ways = {index: [way for way in WAYS if way.name not in done.get(index, {})]
            for index in range(texts)}  # fmt: skip
    return {index: some for index, some in ways.items() if some}


def measure(record: dict[str, Any], asked: argparse.Namespace) -> Iterator[int]:
    """Adds what is not measured yet to the record, text by text; yields which."""
    todo = left(record, asked.texts)
    bench = Bench(asked.model, asked.corpus, asked.length, asked.following, asked.device)
    bench.calibrate(asked.calibration)
    corpora = {"calibrated on": bench.calibrated_on, "measured on": bench.measured_on}
    record |= {
        "model": asked.model,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() | bench.gpu(),
        "corpus": {name: [corpus.name, corpus.digest] for name, corpus in corpora.items()},
        "length": asked.length,
        "following": asked.following,
        "calibration": asked.calibration,
        "head_dim": bench.dim,
        "bytes": {way.name: bytes_of(way, bench.dim) for way in WAYS},
    }
    texts = {text["text"]: text for text in record["texts"]}
    for index, ways in todo.items():
        texts[index] = texts.get(index, {}) | bench.measure(index, ways)
        record["texts"] = [texts[index] for index in sorted(texts)]
        yield index


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is not in the file yet; prints the table, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--corpus", default="sotu", help="sotu, kjv, python or a path")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--following", type=int, default=64, help="tokens that follow")
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--calibration", type=int, default=4, help="texts to fit a basis on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args(arguments)
    if asked.length <= SINK + RECENT or (asked.length - SINK - RECENT) % PAGE:
        parser.error(f"--length: expected {SINK + RECENT} and whole pages of {PAGE} tokens more")
    record = kept(asked.out)
    if left(record, asked.texts):
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        for index in measure(record, asked):
            # What is measured is kept, should a long run be broken off.
            asked.out.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"text {index} of {asked.texts}", flush=True)
    print("\n".join(table(record)))
    if asked.figure is not None:
        save_chart(asked.figure, record)


if __name__ == "__main__":
    main()
