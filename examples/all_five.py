"""One request over five dimensions of its KV: `python examples/all_five.py [--model smollm2]`.

Two documents are read from a store by a runner that never computed them (place), reused behind
other text than they were encoded alone (content), packed in half of their channels at four bits
(channels), read by some heads through windows alone and by others page by page, as these score
highest (heads), and recomputed where a draft of the answer looks (tokens). The head map is made up,
a class for every third head: `kvweave profile-heads` makes real ones. Every figure is of this run;
what heads read of packed bytes follows from the map.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvweave import HeadClassMap, models
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner import Runner, Segment
from kvweave.runner.report import Report

POLICY, ANSWER_TOKENS = "foresight", 24
QUESTION = "\nWhich of the two papers is about rivers, and what does it say of them?\n"
CLASSES = (
    {"kind": "window", "sink": 16, "recent": 64},
    {"kind": "top_k", "pages": 4, "rerank_every": 8, "score": "mean"},
    {"kind": "full"},
)
"""Of heads in turn: nothing packed is read, four pages at most, or all."""
PAPERS = {
    "rivers": "Rivers carry sand to the sea, and number {n} carries {m} tons of it a day. ",
    "towns": "The town of {n} has {m} houses, a mill, and a market on every third day. ",
}


@dataclass(frozen=True)
class Saved:
    """What one dimension came to: what it is counted in, with it and without."""

    what: str
    unit: str
    have: float
    instead: float

    def __str__(self) -> str:
        times = self.instead / self.have if self.have else float("inf")
        counted = f"{self.have:>12,.0f} of {self.instead:>12,.0f} {self.unit}"
        return f"{self.what:<10}{counted}, {times:.2f} times fewer"


def paper(name: str, sentences: int) -> str:
    """A text of so many sentences."""
    return "".join(PAPERS[name].format(n=n, m=7 * n + 3) for n in range(sentences))


def prompt_of(sentences: int) -> list[str | Segment]:
    """The request: neither paper stands where it was encoded."""
    texts = [Segment(paper(name, sentences)) for name in ("towns", "rivers")]
    return ["You are given two papers. Answer from them alone.\n", *texts, QUESTION]


def insert(model: Any, tokenizer: Any, store: Path, sentences: int, **settings: Any) -> None:
    """Encodes the papers, each alone, and leaves them in a store."""
    runner = Runner(model, tokenizer, kv_dtype="half-int4", store=store, **settings)
    for name in PAPERS:
        runner.insert(paper(name, sentences), name)
    runner.flush()
    runner.close()


def reader(model: Any, tokenizer: Any, store: Path, **settings: Any) -> Runner:
    """A runner that has computed nothing and finds the papers in a store."""
    place = {"store": store, "document_bytes": 1 << 28}
    return Runner(model, tokenizer, kv_dtype="half-int4", **place, **settings)


def saved_by(runner: Runner, report: Report) -> list[Saved]:
    """What each dimension saved of one request."""
    tokens, layers = report.tokens, len(report.rows_per_layer)
    documents = [d for d in report.documents if d.source in ("disk", "host")]
    loaded = sum(d.end - d.start for d in documents)
    chosen = sum(report.rows_per_layer) / layers - (tokens - report.reused_segment)
    pool, reused = runner.packed, report.reused_segment
    assert pool is not None
    packed, exact = pool.block_bytes // PAGE_TOKENS, runner.cache.shape.token_bytes
    read = packed * tokens_a_head(runner, reused)
    # By what heads choose there is one row of f32 numbers more for each page's bounds.
    bounds = 0 if pool.bounds is None else pool.bounds[0].nbytes * pool.block_pages // PAGE_TOKENS
    return [
        Saved("content", "rows a layer computed", sum(report.rows_per_layer) / layers, tokens),
        Saved("heads", "packed bytes a decode step reads at most", read, reused * packed),
        Saved("tokens", "reused tokens recomputed", chosen, reused),
        Saved("channels", "bytes of documents", reused * (packed + bounds), reused * exact),
        Saved("place", "document tokens encoded here", tokens - loaded, tokens),
    ]


def tokens_a_head(runner: Runner, reused: int) -> float:
    """How many packed tokens a decode step reads on average of heads, of so many, at most."""
    assert runner.packed is not None
    heads = runner.packed.heads
    read = np.where(heads.reading, reused, 0)
    for number, budget in enumerate(heads.budgets):
        some = heads.budget_of == number
        read[some] = min(reused, budget.pages * PAGE_TOKENS)
    return float(read.mean())


def classes_in_turn(model: Any, tokenizer: Any) -> HeadClassMap:
    """A map in which every third KV head has a window, every third chooses, and others read all."""
    spec = Runner(model, tokenizer, max_tokens=64, check=False).spec
    heads = []
    for at in range(len(spec.layers) * spec.kv_heads):
        of = CLASSES[at % len(CLASSES)]
        labels = {"reach": "local" if of["kind"] == "window" else "global", "stability": "stable"}
        place = {"layer": at // spec.kv_heads, "head": at % spec.kv_heads}
        heads.append({**place, "class": of, **labels})
    sizes = {"schema_version": 1, "layers": len(spec.layers), "heads": heads}
    known = {"model_fingerprint": spec.fingerprint, "kv_heads": spec.kv_heads}
    return HeadClassMap.from_json(json.dumps({**sizes, **known}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs it and prints what was saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sentences", type=int, default=24, help="of each paper")
    asked = parser.parse_args(arguments)
    model, tokenizer = models.load(asked.model)
    print_saved(model, tokenizer, asked.sentences, max_tokens=16384)


def print_saved(model: Any, tokenizer: Any, sentences: int, **settings: Any) -> list[Saved]:
    """Answers the request in a runner that starts anew over the store; returns what was saved."""
    heads = classes_in_turn(model, tokenizer)
    settings = {"progress": False, "check": False, "heads": heads, **settings}
    with tempfile.TemporaryDirectory() as folder:
        insert(model, tokenizer, Path(folder), sentences, **settings)
        with closing(reader(model, tokenizer, Path(folder), **settings)) as runner:
            answer = runner.generate(prompt_of(sentences), POLICY, max_new_tokens=ANSWER_TOKENS)
            saved = saved_by(runner, answer.report)
    print(answer.report)
    print(*saved, sep="\n")
    print(answer.text)
    return saved


if __name__ == "__main__":
    main()
