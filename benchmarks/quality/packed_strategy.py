"""What strategies by loss cost: `python -m benchmarks.quality.packed_strategy MODEL --out FILE`.

A document is inserted into runners that differ in how they pack it: in one format, or each of its
layers' KV heads in the smallest that loses no more than a bound (MosaicKV, section 5.5). Text that
follows it is read over it then. With `--as request` it is the prompt of a request instead, which is
packed finally as one segment before it goes on. KL is to the same over exact pages, nats a token;
bytes are of a token and KV head with whatever bases are the text's own, by the allocator. Intervals
are over texts (`lab.eval`'s bootstrap). Models are in float32 on the CPU and in bfloat16 on a GPU,
of which nothing was rounded otherwise for exact pages. What is in FILE is not measured again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from kvweave import models, ops
from kvweave.lab.eval.corpus import corpus_of, halves
from kvweave.lab.eval.statistics import Bootstrap
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner import Packing, Runner, Segment, Strategy

PRESETS = ("int4", "half-int4", "quarter-bf16", "planes-3")
CALIBRATION_TOKENS = 1024
"""Of another text, by which each runner makes its shared basis."""
SEED = 1


def codes(dim: int, scales: str) -> tuple[ops.PackedFormat, ...]:
    """The paper's candidates with numbers of four bits, and half of them kept."""
    half = [
        ops.PackedFormat("top-r", dim, 64, scales, kept=dim // 2, group=g, numbers="int4")
        for g in (1, 2, 4)
    ]
    return (*ops.top_r_candidates(dim, 64, scales, numbers="int4"), *half)


class Bench:
    """Runners of one model, by how they pack documents."""

    def __init__(self, asked: argparse.Namespace) -> None:
        dtype = torch.float32 if asked.device == "cpu" else torch.bfloat16
        loaded, self.tokenizer = models.load(asked.model, dtype, device=asked.device)
        calibrated_on, self.texts = halves(corpus_of(asked.corpus))
        self.length, self.following = asked.length, asked.following
        room = 2 * asked.length + 4096
        known = {"max_tokens": room, "frozen_share": 0.9, "check": False, "progress": False}
        dim = getattr(loaded.config, "head_dim", None) or (
            loaded.config.hidden_size // loaded.config.num_attention_heads
        )
        self.is_request = asked.read_as == "request"
        ways: dict[str, Packing | None] = {"exact": None}
        ways |= {name: Packing(name) for name in PRESETS}
        for bound in asked.bounds:
            ways[f"bf16 numbers, bound {bound:g}"] = Packing("int4", strategy=Strategy(bound))
            strategy = Strategy(bound, codes(dim, "bf16"))
            ways[f"int4 numbers, bound {bound:g}"] = Packing("int4", strategy=strategy)
        if self.is_request:
            ways = {name: in_segments(way, asked.length) for name, way in ways.items()}
        self.runners = {name: Runner(loaded, kv_dtype=way, **known) for name, way in ways.items()}
        draws = np.random.default_rng(SEED)
        text = calibrated_on.token_slice(draws, self.tokenizer.encode, CALIBRATION_TOKENS)
        for runner in self.runners.values():
            runner.prefill(text, "full", remember=False, watched=False).release()

    def measure(self, index: int) -> dict[str, Any]:
        """One text: by way what it differs by, what it takes, and what it is packed in."""
        draws = np.random.default_rng([SEED, index])
        count = self.length + self.following
        tokens = list(self.texts.token_slice(draws, self.tokenizer.encode, count))
        text, rest = tokens[: self.length], tokens[self.length :]
        read = self._request if self.is_request else self._document
        wanted: torch.Tensor | None = None
        rows: dict[str, Any] = {}
        for name, runner in self.runners.items():
            logits, known = read(runner, text, rest)
            said = logits.float().log_softmax(-1).cpu()
            wanted = said if wanted is None else wanted
            rows[name] = {**far_from(wanted, said), **known}
            print(name, rows[name], flush=True)
        return rows

    def _document(
        self, runner: Runner, text: list[int], rest: list[int]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Logits of what follows a document, and what that is packed in."""
        report = runner.encode(text, "document")
        runner.flush()
        prompt = [Segment(tokens=text), Segment(tokens=rest, namespace="question")]
        asked = {"logits_from": self.length, "remember": False, "watched": False}
        with runner.prefill(prompt, "naive", **asked) as done:
            logits = done.logits
        known = packed_in(runner, report.packing, self.length)
        runner.delete("document")
        return logits, known

    def _request(
        self, runner: Runner, text: list[int], rest: list[int]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The same where the text is that of the request which goes on."""
        asked = {"reserve_tokens": len(rest), "remember": False, "watched": False}
        with runner.prefill(text, "full", **asked) as done:
            runner.flush()
            segments = [] if done.report.packed is None else done.report.packed.segments
            known = packed_in(runner, segments[0] if segments else None, self.length)
            return runner.extend(done, rest), known


def in_segments(way: Packing | None, tokens: int) -> Packing | None:
    """A packing by which text of requests is packed finally, where there is a strategy for it."""
    return way if way is None or way.strategy is None else replace(way, segment_tokens=tokens)


def packed_in(runner: Runner, packing: Any, tokens: int) -> dict[str, Any]:
    """Bytes of a token and KV head of a text of a runner, and its formats."""
    spec, pool = runner.spec, runner.packed
    if pool is None:
        return {"bytes": 2 * spec.head_dim * 2}
    heads = tokens * pool.block_pages
    if packing is not None and packing.formats:
        lost = {"most_lost": packing.most_lost, "over_bound": packing.over_bound}
        return {"bytes": packing.bytes / heads, "formats": packing.formats, **lost}
    own = 0 if packing is None or packing.basis == "shared" else packing.basis_bytes
    why = "" if packing is None else packing.why
    return {"bytes": (-(-tokens // PAGE_TOKENS) * pool.block_bytes + own) / heads, "why": why}


def measure(record: dict[str, Any], asked: argparse.Namespace) -> Iterator[int]:
    """Adds what is not measured yet to the record, text by text; yields which."""
    names = "model", "corpus", "length", "following", "read_as"
    given = {name: getattr(asked, name) for name in names}
    record |= {**given, "device": asked.device, "seed": SEED, "machine": machine()}
    if asked.device != "cpu":
        record["gpu"] = torch.cuda.get_device_name()
    record["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    yield from by_text(record, asked.texts, lambda: Bench(asked))


def table(record: Mapping[str, Any]) -> list[str]:
    """The record as lines of a Markdown table, the most bytes first."""
    draws, texts = Bootstrap(), record["texts"]
    lines = [
        "| packed in | bytes | KL to exact, nats a token | likeliest stays | heads in |",
        "|---|---:|---:|---:|---|",
    ]
    size = {name: float(np.mean([row[name]["bytes"] for row in texts])) for name in texts[0]}
    for name in sorted(size, key=lambda each: -size[each]):
        rows = [row[name] for row in texts]
        kl = with_bounds(draws.pooled([np.array([[row["kl"]] for row in rows])]))
        same = np.mean([row["top1"] for row in rows])
        heads: Counter[str] = Counter()
        for row in rows:
            heads.update(row.get("formats", {}))
        total = max(1, heads.total())
        said = ", ".join(f"{of} {count / total:.0%}" for of, count in heads.most_common(4))
        lines.append(f"| {name} | {size[name]:.1f} | {kl} | {same:.1%} | {said} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is not in the file yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--corpus", default="sotu")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--following", type=int, default=128, help="tokens that read it")
    parser.add_argument("--as", dest="read_as", choices=["document", "request"], default="document")
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.05, 0.2])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    measured(asked.out, partial(measure, asked=asked), table)


if __name__ == "__main__":
    main()
