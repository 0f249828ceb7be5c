"""What packed pages cost in quality: `python -m benchmarks.quality.packed_front MODEL --out FILE`.

Of a prompt, the tokens between its first and newest ones become what packed pages make of them;
text that follows is then read over them, by transformers' own attention in float32. KL is to the
same over exact keys and values, a token; intervals are over texts (`lab.eval.statistics`), those of
differences over pairs. Bases are fitted on the very tokens that are packed ("own", as MosaicKV has
it), or once on other texts ("calibrated"): every second document of a corpus is for that, and
the others are measured on. With `--samples`, tasks of the eval lab are answered over the same ways:
their questions are read, and what is said is compared with the right answers. What is in FILE is
not measured again; `--figure PATH` draws it.

On the CPU pages of `kvweave.ops` are packed and unpacked; with `--device cuda` their arithmetic is
torch's (`packed_arithmetic`), as it is everywhere for ways that have no pages. With block selection
a row reads, of the packed blocks, those whose mean key scores highest, a quarter of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.measured_file import keep, kept
from benchmarks.quality.packed_arithmetic import PAGE
from benchmarks.quality.packed_bases import Moments
from benchmarks.quality.packed_chart import save_chart, table
from benchmarks.quality.packed_reader import RECENT, SINK, Read, Reader, packed_tokens
from benchmarks.quality.packed_ways import (
    Bases,
    Way,
    front,
    made_by_loss,
    made_by_pages,
    made_of,
)  # fmt: skip
from benchmarks.report.record import machine
from kvweave.lab.eval.corpus import Corpus, corpus_of, halves
from kvweave.lab.eval.sample import Sample
from kvweave.lab.eval.tasks import task_of
from kvweave.runner.prompt import Segment

SEED = 1
WAYS = front()
EXACT = Way("exact", "exact")
TASKS = ("needle", "lookup")
"""What is answered, on texts or tables of the prompts' length."""
ANSWER = 24
"""Tokens of an answer at most."""


class Bench:
    """A model in float32 and the texts that it reads."""

    def __init__(self, name: str, corpus: str, length: int, following: int, device: str) -> None:
        self.reader = Reader(name, device)
        self.calibrated_on, self.measured_on = halves(corpus_of(corpus))
        self.length, self.following = length, following
        self.bases: Bases | None = None

    def gpu(self) -> dict[str, str]:
        """The GPU that texts are read on, where it is one."""
        on_cpu = self.reader.device.type == "cpu"
        return {} if on_cpu else {"gpu": torch.cuda.get_device_name()}

    def calibrate(self, texts: int) -> None:
        """Fits the calibrated bases on texts that none is measured on."""
        drawn = (self.tokens(self.calibrated_on, index) for index in range(texts))
        moments = [self.reader.read(tokens[:, : self.length])[1] for tokens in drawn]
        self.bases = Bases(sum(moments[1:], moments[0]))

    def tokens(self, corpus: Corpus, index: int) -> torch.Tensor:
        """A stretch of text [1, length + following]."""
        rng = np.random.default_rng([SEED, index])
        ids = corpus.token_slice(rng, self.reader.encode, self.length + self.following)
        return torch.tensor([ids], device=self.reader.device)

    def measure(self, index: int, ways: Sequence[Way]) -> dict[str, Any]:
        """Of one text the KL, what the text surprises more, and the share of likeliest tokens that
        stay, by way."""
        tokens = self.tokens(self.measured_on, index)
        kv, moments = self.reader.read(tokens[:, : self.length])
        following = tokens[:, self.length :]
        targets = following[0, 1:, None]

        def surprise(logs: torch.Tensor) -> float:
            return -float(logs[:-1].gather(1, targets).mean())

        (exact,) = self.reader.follow([Read(kv)], following)
        found: dict[str, Any] = {"text": index, "surprise": surprise(exact)}
        for some, reads, sizes in self.in_parts(kv, ways, moments):
            for way, got in zip(some, self.reader.follow(reads, following), strict=True):
                kl = (exact.exp() * (exact - got)).sum(-1)
                same = exact.argmax(-1) == got.argmax(-1)
                found[way.name] = {
                    "kl": float(kl.mean()),
                    "surprise": surprise(got) - surprise(exact),
                    "agreement": float(same.double().mean()),
                } | ({} if way.kind != "by loss" else {"bytes": sizes[way.name]})
        return found

    def ask(self, task: str, index: int, ways: Sequence[Way]) -> dict[str, Any]:
        """Of one sample of a task the share of right answers by way, and over exact pages."""
        made = task_of(task, self.length)
        sample = made.sample(self.reader.tokenizer, np.random.default_rng([SEED, index]))
        *context, question = (self.reader.encode(text) for text in texts_of(sample))
        tokens = torch.tensor([list(chain.from_iterable(context))], device=self.reader.device)
        asked = torch.tensor([question], device=self.reader.device)
        kv, moments = self.reader.read(tokens)
        found: dict[str, Any] = {"sample": index}
        for some, reads, _ in self.in_parts(kv, (EXACT, *ways), moments):
            said = self.reader.answers(reads, asked, ANSWER)
            for way, answer in zip(some, said, strict=True):
                found[way.name] = sample.recall(answer)
        return found

    def in_parts(
        self, kv: torch.Tensor, ways: Sequence[Way], own: Moments
    ) -> Iterator[tuple[list[Way], list[Read], dict[str, float]]]:
        """Ways, what each makes of a prompt, and the bytes a token of those that choose: as many
        at once as are read at a time."""
        middle = slice(SINK, SINK + packed_tokens(kv.shape[2]))
        packed: dict[Way, tuple[torch.Tensor, float]] = {}
        some: list[Way] = []
        for way in sorted(ways, key=lambda way: repr(way.packing)):
            if way.packing not in packed:
                if len(packed) == self.reader.batch:
                    yield some, *self._reads(kv, some, packed)
                    packed, some = {}, []
                packed[way.packing] = self.packed(kv[:, :, middle].contiguous(), way, own)
            some.append(way)
        yield some, *self._reads(kv, some, packed)

    def _reads(
        self,
        kv: torch.Tensor,
        ways: Sequence[Way],
        packed: Mapping[Way, tuple[torch.Tensor, float]],
    ) -> tuple[list[Read], dict[str, float]]:
        reads, sizes = [], {}
        for way in ways:
            made, size = packed[way.packing]
            end = SINK + made.shape[2]
            reads.append(Read(torch.cat((kv[:, :, :SINK], made, kv[:, :, end:]), 2), way.blocks))
            sizes[way.name] = size
        return reads, sizes

    def packed(self, kv: torch.Tensor, way: Way, own: Moments) -> tuple[torch.Tensor, float]:
        """What a way makes of K and V [2, N, T, D], and its bytes a token and KV head."""
        assert self.bases is not None
        basis = self.bases.of_text(way, own)
        if way.kind == "by loss":
            assert basis is not None
            return made_by_loss(kv, way, basis)
        of = way.format(self.reader.dim) if self.reader.device.type == "cpu" else None
        made = made_of(kv, way, basis, own) if of is None else made_by_pages(kv, of, basis)
        return made, way.page_bytes(self.reader.dim)


def texts_of(sample: Sample) -> list[str]:
    """The parts of a prompt as text, the question last."""
    return [str(part.text) if isinstance(part, Segment) else part for part in sample.parts]


def bytes_of(way: Way, head_dim: int) -> dict[str, float]:
    """Bytes a token and KV head of the pages, and of a basis of its own at two lengths."""
    pages, basis = way.page_bytes(head_dim), way.basis_bytes(head_dim)
    return {"pages": pages, "with basis, 832 tokens": pages + basis / 832,
            "with basis, 64K tokens": pages + basis / 65536, "blocks": way.blocks}  # fmt: skip


def left(done: Sequence[Mapping[str, Any]], by: str, number: int) -> dict[int, list[Way]]:
    """The ways that are not measured yet, by the number of a text or sample."""
    known = {one[by]: one for one in done}
    ways = {index: [way for way in WAYS if way.name not in known.get(index, {})]
            for index in range(number)}  # fmt: skip
    return {index: some for index, some in ways.items() if some}


def merged(
    done: Sequence[Mapping[str, Any]], by: str, found: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What is measured, with what was found of one text or sample."""
    known = {one[by]: dict(one) for one in done}
    known[found[by]] = known.get(found[by], {}) | dict(found)
    return [known[index] for index in sorted(known)]


def measure(record: dict[str, Any], asked: argparse.Namespace) -> Iterator[str]:
    """Adds what is not measured yet to the record, text by text and sample by sample; yields
    which."""
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
        "head_dim": bench.reader.dim,
        "bytes": {way.name: bytes_of(way, bench.reader.dim) for way in WAYS},
    }
    for index, ways in left(record["texts"], "text", asked.texts).items():
        record["texts"] = merged(record["texts"], "text", bench.measure(index, ways))
        yield f"text {index} of {asked.texts}"
    tasks = record.setdefault("tasks", {})
    for task in TASKS:
        for index, ways in left(tasks.get(task, []), "sample", asked.samples).items():
            found = bench.ask(task, index, ways)
            tasks[task] = merged(tasks.get(task, []), "sample", found)
            yield f"{task}, sample {index} of {asked.samples}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is not in the file yet; prints the table, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--corpus", default="sotu", help="sotu, kjv, python or a path")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--following", type=int, default=64, help="tokens that follow")
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--samples", type=int, default=0, help="of each task")
    parser.add_argument("--calibration", type=int, default=4, help="texts to fit a basis on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    asked = parser.parse_args(arguments)
    if asked.length <= SINK + RECENT or (asked.length - SINK - RECENT) % PAGE:
        parser.error(f"--length: expected {SINK + RECENT} and whole pages of {PAGE} tokens more")
    record = {"texts": []} | kept(asked.out)
    todo = [left(record["texts"], "text", asked.texts)]
    todo += [left(record.get("tasks", {}).get(task, []), "sample", asked.samples) for task in TASKS]
    if any(todo):
        keep(asked.out, record, measure(record, asked))
    print("\n".join(table(record)))
    if asked.figure is not None:
        save_chart(asked.figure, record)


if __name__ == "__main__":
    main()
