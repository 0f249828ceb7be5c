"""What packed pages cost in quality: `python -m benchmarks.quality.packed_front MODEL --out FILE`.

Of a prompt, the tokens between its first and newest ones become what packed pages make of them;
text that follows is then read over them, by transformers' own attention in float32. KL is to the
same over exact keys and values, a token; intervals are over texts (`lab.eval.statistics`), those of
differences over pairs. Bases are fitted on the very tokens that are packed ("own", as MosaicKV has
it), or once on other texts ("calibrated"): every second document of a corpus is for that, and
the others are measured on. `--figure PATH` draws what FILE holds; what is in FILE is not measured
again. INT3 and INT2 are no pages yet: their arithmetic is done here, as INT4 pages do it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.quality.packed_chart import save_chart, table
from benchmarks.report.record import machine
from kvweave import models, ops
from kvweave.lab.eval.corpus import Corpus, corpus_of, halves

PAGE, SINK, RECENT = 64, 64, 128
"""Tokens of a page, and those at either end of a prompt that stay exact."""
SEED = 1

Basis = Literal["none", "identity", "hadamard", "own", "own, not centred", "calibrated"]
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each layer K and V f32 [G, T, D]."""


@dataclass(frozen=True)
class Way:
    """One way to pack: the format's arguments, kept ones as a share of the channels."""

    name: str
    basis: Basis = "none"
    kept: float = 0.0
    group: int = 1
    numbers: str = "bf16"
    bits: int | None = None
    """Of codes as in INT4 pages, where there are no such pages."""

    def format(self, head_dim: int) -> ops.PackedFormat | None:
        """The pages of this way, if there are any."""
        if self.bits is not None:
            return None
        if self.basis == "none":
            return ops.packed_format("int4", head_dim, PAGE)
        kept = round(self.kept * head_dim)
        sizes = {"group": self.group, "numbers": self.numbers}
        return ops.PackedFormat("top-r", head_dim, PAGE, kept=kept, **sizes)


WAYS = (
    Way("INT4"),
    Way("INT3", bits=3),
    Way("INT2", bits=2),
    Way("25 % bf16, own basis, not centred (MosaicKV)", "own, not centred", 0.25),
    Way("25 % bf16, own basis", "own", 0.25),
    Way("25 % bf16, groups of 2, own basis", "own", 0.25, 2),
    Way("25 % bf16, groups of 4, own basis", "own", 0.25, 4),
    Way("25 % bf16, calibrated basis", "calibrated", 0.25),
    Way("25 % bf16, no rotation (Mustafar)", "identity", 0.25),
    Way("50 % fp8, calibrated basis", "calibrated", 0.5, 1, "fp8"),
    Way("75 % int4, calibrated basis", "calibrated", 0.75, 1, "int4"),
    Way("50 % int4, own basis", "own", 0.5, 1, "int4"),
    Way("50 % int4, own basis, not centred", "own, not centred", 0.5, 1, "int4"),
    Way("50 % int4, calibrated basis", "calibrated", 0.5, 1, "int4"),
    Way("50 % int4, Hadamard", "hadamard", 0.5, 1, "int4"),
    Way("50 % int4, no rotation", "identity", 0.5, 1, "int4"),
    Way("50 % int4, groups of 2, calibrated basis", "calibrated", 0.5, 2, "int4"),
    Way("25 % int4, calibrated basis", "calibrated", 0.25, 1, "int4"),
)


def hadamard(dim: int) -> torch.Tensor:
    """Sylvester's matrix [D, D] over √D; D is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / dim**0.5


def in_pages(kv: Layers) -> torch.Tensor:
    """K and V in exact pages [1 + N · L · G, 2, PAGE, D], block by block behind page 0."""
    stacked = torch.stack([torch.stack(pair, 1) for pair in kv])
    layers, heads, _, tokens, dim = stacked.shape
    blocks = stacked.reshape(layers, heads, 2, tokens // PAGE, PAGE, dim).permute(3, 0, 1, 2, 4, 5)
    pages = torch.zeros(1 + len(blocks) * layers * heads, 2, PAGE, dim)
    pages[1:] = blocks.flatten(0, 2)
    return pages


def out_of_pages(pages: torch.Tensor, like: Layers) -> Layers:
    """The way back."""
    heads, tokens, dim = like[0][0].shape
    blocks = pages[1:].reshape(tokens // PAGE, len(like), heads, 2, PAGE, dim)
    stacked = blocks.permute(1, 3, 2, 0, 4, 5).reshape(len(like), 2, heads, tokens, dim)
    return [(layer[0].contiguous(), layer[1].contiguous()) for layer in stacked]


def packs_of(pages: torch.Tensor, block_pages: int) -> np.ndarray:
    """Every block as a packed one of the same number."""
    first = 1 + block_pages * np.arange((len(pages) - 1) // block_pages)
    return np.stack((first, np.full_like(first, PAGE), first), 1).astype(np.int32)


def rounded(pages: torch.Tensor, bits: int) -> torch.Tensor:
    """What codes of so many bits make of pages: steps a channel of keys and a token of values."""
    made = torch.empty_like(pages)
    for side, axis in ((0, 1), (1, 2)):
        x = pages[:, side]
        zero = x.amin(axis, keepdim=True)
        step = ((x.amax(axis, keepdim=True) - zero) / (2**bits - 1)).bfloat16().float()
        codes = torch.where(step > 0, ((x - zero) / step).round(), 0.0).clamp(0, 2**bits - 1)
        made[:, side] = zero.bfloat16().float() + step * codes
    return made


class Bases:
    """The bases of one model: those that no text is needed for, calibrated ones, and a text's."""

    def __init__(self, block_pages: int, head_dim: int) -> None:
        self.block_pages, self.head_dim = block_pages, head_dim
        self.every = ops.PackedFormat("top-r", head_dim, PAGE, kept=head_dim)
        self.calibration = ops.Moments(self.every, block_pages)

    def of_text(self, pages: torch.Tensor, basis: Basis) -> torch.Tensor | None:
        """What a way of a text is packed in, [1, pages, 2, D + 1, D]; None for no basis."""
        if basis == "none":
            return None
        if basis in ("identity", "hadamard"):
            directions = (
                torch.eye(self.head_dim) if basis == "identity" else hadamard(self.head_dim)
            )
            return self._everywhere(directions)
        moments = self.calibration
        if basis != "calibrated":
            moments = ops.Moments(self.every, self.block_pages)
            moments.add(pages, packs_of(pages, self.block_pages))
        return torch.from_numpy(moments.basis(centred=basis != "own, not centred"))[None]

    def _everywhere(self, directions: torch.Tensor) -> torch.Tensor:
        basis = torch.cat((torch.zeros(1, self.head_dim), directions))
        return basis.expand(1, self.block_pages, 2, -1, -1).contiguous()


class Bench:
    """A model in float32 and the texts that it reads."""

    def __init__(self, name: str, corpus: str, length: int, following: int) -> None:
        self.model, self.tokenizer = models.load(name, torch.float32)
        self.calibrated_on, self.measured_on = halves(corpus_of(corpus))
        self.length, self.following = length, following
        config = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.bases = Bases(self.layers * self.heads, self.dim)

    def calibrate(self, texts: int) -> None:
        """Fits the calibrated basis on texts that none is measured on."""
        for index in range(texts):
            pages = in_pages(self.middle(self.read(self.tokens(self.calibrated_on, index))[0]))
            self.bases.calibration.add(pages, packs_of(pages, self.bases.block_pages))

    def tokens(self, corpus: Corpus, index: int) -> torch.Tensor:
        """A stretch of text [1, length + following]."""
        rng = np.random.default_rng([SEED, index])
        return torch.tensor([corpus.token_slice(rng, self.encode, self.length + self.following)])

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without special tokens."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False).input_ids]

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor) -> tuple[Layers, torch.Tensor]:
        """K and V of the prompt, and log-probabilities f64 [following, V] of what follows."""
        cache = DynamicCache()
        self.model(tokens[:, : self.length], past_key_values=cache, logits_to_keep=1)
        kv = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
        return kv, self.follow(kv, tokens)

    @torch.inference_mode()
    def follow(self, kv: Layers, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities f64 [following, V] over a prompt's K and V."""
        cache = DynamicCache()
        for layer, (k, v) in enumerate(kv):
            cache.update(k[None], v[None], layer)
        out = self.model(tokens[:, self.length :], past_key_values=cache)
        return out.logits[0].double().log_softmax(-1)

    def middle(self, kv: Layers) -> Layers:
        """What is packed of a prompt."""
        return [(k[:, SINK:-RECENT], v[:, SINK:-RECENT]) for k, v in kv]

    def measure(self, index: int, ways: Sequence[Way]) -> dict[str, Any]:
        """Of one text the KL and the share of likeliest tokens that stay, by way."""
        tokens = self.tokens(self.measured_on, index)
        kv, exact = self.read(tokens)
        middle = self.middle(kv)
        pages = in_pages(middle)
        found: dict[str, Any] = {"text": index}
        for way in ways:
            back = out_of_pages(self.packed(pages, way), middle)
            read = [
                (torch.cat((k[:, :SINK], a, k[:, -RECENT:]), 1),
                 torch.cat((v[:, :SINK], b, v[:, -RECENT:]), 1))
                for (k, v), (a, b) in zip(kv, back, strict=True)
            ]  # fmt: skip
            got = self.follow(read, tokens)
            kl = (exact.exp() * (exact - got)).sum(-1)
            same = exact.argmax(-1) == got.argmax(-1)
            found[way.name] = {"kl": float(kl.mean()), "agreement": float(same.double().mean())}
        return found

    def packed(self, pages: torch.Tensor, way: Way) -> torch.Tensor:
        """What a way makes of exact pages."""
        of = way.format(self.dim)
        if of is None:
            assert way.bits is not None
            return rounded(pages, way.bits)
        bases, block = self.bases.of_text(pages, way.basis), self.bases.block_pages
        packed = ops.PackedPages.zeros(len(pages), of, bases=bases)
        packs = packs_of(pages, block)
        ops.pack_pages(pages, packed, packs, pages=block)
        back = torch.zeros_like(pages)
        ops.unpack_pages(packed, back, packs, pages=block)
        return back


def bytes_of(way: Way, head_dim: int) -> dict[str, float]:
    """Bytes a token and KV head of the pages, and of a basis of its own at two lengths."""
    of = way.format(head_dim)
    basis = 8.0 * (head_dim + 1) * head_dim if way.basis.startswith("own") else 0.0
    if of is None:
        assert way.bits is not None
        pages = 2 * head_dim * way.bits / 8 + 4 * head_dim / PAGE + 4
    else:
        pages = of.page_bytes / PAGE
    return {"pages": pages, "with basis, 832 tokens": pages + basis / 832,
            "with basis, 64K tokens": pages + basis / 65536}  # fmt: skip


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
    bench = Bench(asked.model, asked.corpus, asked.length, asked.following)
    if any(way.basis == "calibrated" for ways in todo.values() for way in ways):
        bench.calibrate(asked.calibration)
    corpora = {"calibrated on": bench.calibrated_on, "measured on": bench.measured_on}
    record |= {
        "model": asked.model,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
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
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--calibration", type=int, default=4, help="texts to fit a basis on")
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
