"""A runner's counts in the text format of Prometheus (version 0.0.4).

They are for whoever runs the machine: they are sums over all namespaces, which no tenant may see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
"""Names and values, such as (("state", "free"),)."""

_NANO = 1e-9
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Metric:
    """One metric: what it counts, and its samples, each a value under labels."""

    name: str
    kind: str
    says: str
    samples: Mapping[Labels, float]

    def lines(self) -> Iterator[str]:
        """Its lines: what it is, then each sample."""
        yield f"# HELP kvweave_{self.name} {self.says}"
        yield f"# TYPE kvweave_{self.name} {self.kind}"
        for labels, value in self.samples.items():
            told = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels)
            yield (
                f"kvweave_{self.name}{{{told}}} {value:.12g}"
                if told
                else (f"kvweave_{self.name} {value:.12g}")
            )


def engine_text(
    cache: Mapping[str, Any], queue: Mapping[str, int], tiers: Mapping[str, Any] | None
) -> str:
    """The text of what an engine's cache, scheduler and tiers, if any, say of themselves."""
    stored = () if tiers is None else _metrics_of_tiers(tiers)
    return text_of((*_metrics_of_cache(cache), *stored, *_metrics_of_queue(queue)))


def text_of(metrics: Iterable[Metric]) -> str:
    """Metrics as they are scraped."""
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _metrics_of_cache(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Of what `KvCache.stats` says: blocks, and what prompts found."""
    states = ("free", "held", "cached")
    blocks: dict[Labels, float] = {
        (("group", str(number)), ("state", state)): float(group[state])
        for number, group in enumerate(stats["groups"])
        for state in states
    }
    yield Metric("blocks", "gauge", "Blocks of each head group, by state.", blocks)
    yield _one("evictions_total", "counter", "Blocks given up for others.", stats["evictions"])
    yield _one("prompts_total", "counter", "Prompts that were admitted.", stats["requests"])
    says = "Tokens of admitted prompts: what hits and misses are shares of."
    yield _one("prompt_tokens_total", "counter", says, stats["tokens"])
    hits = {
        "prefix": stats["prefix_hits"],
        "request": stats["request_hits"],
        "document": stats["frozen_hits"],
    }
    says = "Tokens of admitted prompts whose KV was there, by where it came from."
    yield _by("reused_tokens_total", "counter", says, "source", hits)
    says = "Tokens of admitted prompts whose KV was not reused, by the reason."
    yield _by("missed_tokens_total", "counter", says, "reason", stats["misses"])
    says = "Reused tokens as a share of all tokens of admitted prompts; 0 before the first."
    share = sum(hits.values()) / stats["tokens"] if stats["tokens"] else 0.0
    yield _one("hit_ratio", "gauge", says, share)


def _metrics_of_tiers(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Of what `Tiers.stats` says: where documents came from, and what went wrong."""
    says = "Marked documents of prompts, by where their KV came from."
    yield _by("documents_total", "counter", says, "source", stats["documents"])
    says = "Bytes that were read from the store and are not on the device yet."
    yield _one("reading_bytes", "gauge", says, stats["reading_bytes"])
    says = "What a tier could not do while answers went on, by kind."
    yield _by("troubles_total", "counter", says, "kind", stats["troubles"])
    speeds = {what: speed for what, speed in stats["speeds"].items() if speed is not None}
    says = "Bytes a second from each tier, and FLOPs of prefills, as they were measured."
    yield _by("speed", "gauge", says, "of", speeds)
    if (remote := stats["remote"]) is not None:
        says = "Documents that the remote store has taken."
        yield _one("remote_written_total", "counter", says, remote["written"])
        says = "Bytes on their way to the remote store."
        yield _one("remote_writing_bytes", "gauge", says, remote["writing_bytes"])
        says = "1 while the remote store has just failed and is not asked."
        yield _one("remote_resting", "gauge", says, remote["resting"])


def _metrics_of_queue(counts: Mapping[str, int]) -> Iterator[Metric]:
    """Of what `Server.metrics` says: who waits, and what steps did."""
    states = {state: counts[state] for state in ("waiting", "prefilling", "decoding")}
    yield _by("requests", "gauge", "Requests that have not ended, by state.", "state", states)
    ends = {end: counts[end] for end in ("finished", "cancelled", "refused")}
    yield _by("requests_total", "counter", "Requests that have ended.", "end", ends)
    tokens = {kind: counts[f"{kind}_tokens"] for kind in ("prefill", "cached", "decode")}
    says = "Tokens that steps computed or found."
    yield _by("step_tokens_total", "counter", says, "kind", tokens)
    for name in ("steps", "preempted", "overtakes"):
        yield _one(f"{name}_total", "counter", _SAYS[name], counts[name])
    for name, kind in (("oldest", "gauge"), ("longest", "gauge"), ("total", "counter")):
        value = counts[f"{name}_wait_ns"] * _NANO
        yield _one(f"{name}_wait_seconds", kind, _SAYS[name], value)


_SAYS = {
    "steps": "Steps that were planned.",
    "preempted": "Times that a request gave way.",
    "overtakes": "Times that a request came in before one that waited longer.",
    "oldest": "How long the request has waited that waits longest.",
    "longest": "The longest that any request waited.",
    "total": "What all requests waited together.",
}


def _one(name: str, kind: str, says: str, value: float) -> Metric:
    return Metric(name, kind, says, {(): float(value)})


def _by(name: str, kind: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    samples: dict[Labels, float] = {((label, key),): float(value) for key, value in values.items()}
    return Metric(name, kind, says, samples)
