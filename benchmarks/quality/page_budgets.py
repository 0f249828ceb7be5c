"""What reading few pages costs in quality: `python -m benchmarks.quality.page_budgets MODEL`.

Heads read the best pages of each budget. Stable ones are ranked every 16 decode steps; unstable
ones read everything ("full"), as many pages ranked at every step ("ranked", as the paper has it),
or are treated as stable ones ("as stable"). Then one thing after the other is otherwise: how often
stable heads are ranked, once for all of an answer being the least; what pages are ranked by; and
whether what is not read is estimated by its means. With `--all` every way of one is measured with
every way of the others. These are the rows of FlexiCache's Table 3, in other words: *once* is its
"without reranking", *as stable* its "without unstable heads". The second table is its Table 4:
which heads are unstable in one text and in another. `benchmarks.quality.page_tasks` says what the
same ways do to answers of tasks.

With `--share` other shares of all heads are called unstable, with `--every` stable ones are ranked
every so many steps by either score, and with `--bounds fp8` pages are
ranked by bounds in e4m3. With `--host` each budget is measured over host memory instead: what
keeping pages there as fp8 costs beside exact copies, and what rankings cost that take effect late.

Between two rankings a head reads, beside what it chose, the pages that were begun since. So one
that is ranked once reads more and more of an answer: *read* says how many pages on average.

Stability is measured on the half of each text that prompts are not taken from. KL and agreement are
to the whole model over the answers that it drew: see `DecodeMeter`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.measured_file import write
from benchmarks.report.record import machine
from kvweave import models
from kvweave.cache import HeadClassMap
from kvweave.lab.eval.statistics import Interval, bootstrap, difference
from kvweave.lab.profile import Stability, held_out, measure_stability, text_tasks
from kvweave.lab.profile.decode_effect import TEMPERATURE, DecodeEffect, DecodeMeter
from kvweave.lab.profile.head_profile import UNSTABLE_SHARE, head_map
from kvweave.lab.profile.ranked_heads import RERANK_EVERY, SCORES, with_ranked_pages
from kvweave.runner import Runner

TEXTS = ("sotu", "python")
BUDGETS = (8, 16, 32)
SINK, RECENT = 16, 256


UNSTABLE = ("full", "ranked", "as stable")
PERIODS = (1, RERANK_EVERY, 64, None)
HEADER = """\
| pages | the unstable | share | ranked every | by | estimate | host | read | KL a token \
| more than the first by | worst tenth | same token |
|---:|---|---:|---:|---|---|---|---:|---:|---|---:|---:|"""
HOST_BYTES = 4 << 30
HOSTS: dict[str, dict[str, Any]] = {
    "exact": {"host_arrivals": "exact"},
    "fp8": {"host_arrivals": "exact", "host_dtype": "fp8"},
    "late": {"host_arrivals": "late"},
    "whole": {"host_arrivals": "whole"},
}
"""What a runner over host memory is asked for besides."""


@dataclass(frozen=True)
class Way:
    """How heads read `pages` pages. `every`: steps between two rankings, None for one an answer.

    `share`: of all heads, how many are called unstable. `bounds`: "" as keys are, or "fp8".
    """

    pages: int
    unstable: str = "full"
    every: int | None = RERANK_EVERY
    score: str = "min-max"
    estimate: bool = False
    host: str = ""
    share: float = UNSTABLE_SHARE
    bounds: str = ""

    def runner_settings(self) -> dict[str, Any]:
        """What a runner is asked for beside the map: `host` is "" or one of `HOSTS`."""
        over: dict[str, Any] = {}
        if self.host:
            # Spilled as soon as they can be: what comes back from there is what is measured.
            over = {"host_bytes": HOST_BYTES, "host_free_share": 1.0, **HOSTS[self.host]}
        return {**over, "bounds_dtype": self.bounds} if self.bounds else over

    def heads(self, stability: Stability, steps: int) -> HeadClassMap:
        """The map, of a model of whose heads so much is known, for answers of so many steps."""
        unstable = stability.with_share(self.share).unstable()
        flags = np.zeros_like(unstable) if self.unstable == "as stable" else unstable
        of, every = stability.model_fingerprint, np.ones_like(flags)
        whole = head_map(of, every, ~flags, SINK, RECENT, evidence={})
        return with_ranked_pages(
            whole,
            self.pages,
            rerank_every=steps + 1 if self.every is None else self.every,
            unstable_too=self.unstable == "ranked",
            score=self.score,
            estimate=self.estimate,
        )

    def read(self, steps: int, page_tokens: int) -> float:
        """Pages that a stable head reads, on average over the steps of an answer."""
        since = np.arange(steps) % (steps if self.every is None else self.every)
        return self.pages + float((since // page_tokens).mean())

    def words(self) -> tuple[str, ...]:
        """The first columns of its row."""
        every = "once" if self.every is None else str(self.every)
        estimate = "on" if self.estimate else "off"
        score = f"{self.score} in {self.bounds}" if self.bounds else self.score
        share = f"{self.share:g}"
        return str(self.pages), self.unstable, share, every, score, estimate, self.host or "no"


def over_host(pages: int, hosts: Sequence[str]) -> list[Way]:
    """The plain way of one budget over host memory, which is exact as on the device, and others.

    With an estimate of what is not read too, of what is late.
    """
    ways = [Way(pages, host=host) for host in hosts]
    if "late" in hosts:
        ways += [Way(pages, estimate=True, host=host) for host in ("exact", "late")]
    return ways


def by_share(pages: int, shares: Sequence[float]) -> list[Way]:
    """The plain way of one budget, and such with other shares of unstable heads, read either way.

    Of the first of `UNSTABLE` and the second: without any unstable head both are the same.
    """
    ways = [Way(pages)]
    for share in shares:
        kinds = UNSTABLE[: 2 if share > 0.0 else 1]
        ways += [Way(pages, unstable=some, share=share) for some in kinds]
    return list(dict.fromkeys(ways))


def in_bounds(pages: int, kinds: Sequence[str]) -> list[Way]:
    """The ways of one budget by what pages are ranked by, as keys are and in others."""
    return [Way(pages, score=score, bounds=some) for score in SCORES for some in ("", *kinds)]


def by_period(pages: int, periods: Sequence[int]) -> list[Way]:
    """The plain way of one budget, and such with other periods, each by each score."""
    ways = [Way(pages, score=score) for score in SCORES]
    ways += [Way(pages, every=every, score=score) for every in periods for score in SCORES]
    return list(dict.fromkeys(ways))


def ways_of(pages: int, every_one: bool = False) -> list[Way]:
    """The ways of one budget: one thing otherwise at a time, or `every_one` there is."""
    if every_one:
        beside = product(UNSTABLE, PERIODS, SCORES, (False, True))
        return [Way(pages, *some) for some in beside]
    plain = Way(pages)
    return [
        *(replace(plain, unstable=some) for some in UNSTABLE),
        *(replace(plain, every=every) for every in PERIODS if every != plain.every),
        replace(plain, score="mean"),
        *(replace(plain, estimate=True, score=score) for score in SCORES),
        replace(plain, estimate=True, unstable="as stable"),
        replace(plain, estimate=True, every=None),
    ]


def add_ways(parser: argparse.ArgumentParser) -> None:
    """The options that `asked_for` reads."""
    parser.add_argument("--pages", action="append", type=int, default=[])
    parser.add_argument("--all", action="store_true", help="every way of one with all of others")
    over = "over host memory, exact and such as this"
    shares = "of heads that are called unstable, instead of other ways"
    parser.add_argument("--share", action="append", type=float, default=[], help=shares)
    steps = "between two rankings, by each score, instead of other ways"
    parser.add_argument("--every", action="append", type=int, default=[], help=steps)
    kinds = "what bounds are kept in, instead of other ways"
    parser.add_argument("--bounds", action="append", choices=["fp8"], default=[], help=kinds)
    parser.add_argument("--host", action="append", choices=[*HOSTS], default=[], help=over)


def asked_for(pages: int, asked: argparse.Namespace) -> list[Way]:
    """The ways of one budget that a command names."""
    if asked.host:
        return over_host(pages, list(dict.fromkeys(("exact", *asked.host))))
    if asked.share:
        return by_share(pages, asked.share)
    if asked.every:
        return by_period(pages, asked.every)
    return in_bounds(pages, asked.bounds) if asked.bounds else ways_of(pages, asked.all)


def shared_heads(stability: Stability) -> Iterator[str]:
    """The lines of a table of how many unstable heads two texts share."""
    found = stability.to_dict()
    names, chance = found["tasks"], found["shared_by_chance"]
    yield "| unstable in | " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * len(names)
    for name, row in zip(names, found["shared_by_tasks"], strict=True):
        yield f"| {name} | " + " | ".join(f"{share:.2f}" for share in row) + " |"
    yield f"By chance: {chance:.2f}."


def more_than(effect: DecodeEffect, other: DecodeEffect) -> Interval:
    """How much further one map is from the whole model than another, in pairs of answers."""
    return bootstrap(np.array([effect.kl_by_answer, other.kl_by_answer]).T, difference)


class Bench:
    """A model in float32, which of its heads are unstable, and the effect of maps on decoding."""

    def __init__(self, asked: argparse.Namespace, texts: tuple[str, ...]) -> None:
        length, steps = asked.length, asked.steps
        loaded = models.load(asked.model, torch.float32, device=asked.device)

        def make_runner(heads: HeadClassMap | None) -> Runner:
            room = len(texts) * 2 * asked.draws * (length + steps + 32)
            how = {"max_tokens": room, "progress": False, **self.settings}
            return Runner(*loaded, heads=heads, check=heads is None, **how)

        # Of the runner that is made next, beside its map.
        self.settings: dict[str, Any] = {}
        whole = make_runner(None)
        self.page_tokens = whole.cache.shape.page_tokens
        window = {"sink": SINK, "recent": RECENT}
        tasks = text_tasks(whole, texts, length, **window)
        self.stability = measure_stability(whole, tasks, pages=16, steps=64)
        prompts = [
            text.tokens.tolist()
            for seed in range(asked.draws)
            for text in held_out(whole, texts, length, **window, seed=seed)
        ]
        del whole
        self.meter = DecodeMeter(make_runner, prompts, steps)

    def rows(self, ways: Sequence[Way]) -> Iterator[dict[str, Any]]:
        """The effect of each way, one after the other, beside the first of its budget.

        Over host memory that is the first of those that estimate as it does.
        """
        steps = self.meter.steps
        first: dict[tuple[int, bool], DecodeEffect] = {}
        print(HEADER, flush=True)
        for way in ways:
            self.settings = way.runner_settings()
            effect = self.meter.measure(way.heads(self.stability, steps))
            alike = way.pages, bool(way.host) and way.estimate
            more = more_than(effect, first.setdefault(alike, effect))
            read = way.read(steps - 1, self.page_tokens)
            found = (
                f"{read:.1f}",
                f"{effect.kl:.4f}",
                f"{more.value:+.4f} ({more.low:+.4f} to {more.high:+.4f})",
                f"{effect.worst:.4f}",
                f"{effect.agreement:.1%}",
            )
            print(f"| {' | '.join((*way.words(), *found))} |", flush=True)
            yield {**asdict(way), "read": read, **asdict(effect), "more": asdict(more)}


def main() -> None:
    """Prints a table, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=256, help="decode steps compared a prompt")
    parser.add_argument("--draws", type=int, default=1, help="prompts of each text and kind")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--text", action="append", default=[], help="sotu, kjv, python or a path")
    add_ways(parser)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    texts = tuple(asked.text) or TEXTS
    bench = Bench(asked, texts)
    record: dict[str, Any] = {
        "model": asked.model,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "texts": texts,
        "prompts": len(bench.meter.prompts),
        "length": asked.length,
        "steps": asked.steps,
        "temperature": TEMPERATURE,
        "page_tokens": bench.page_tokens,
        "stability": bench.stability.to_dict(),
        "rows": [],
    }
    ways = [way for pages in asked.pages or BUDGETS for way in asked_for(pages, asked)]
    for row in bench.rows(ways):
        record["rows"].append(row)
        if asked.out is not None:
            # What is measured is kept, should a long run be broken off.
            write(asked.out, record)
    print("", *shared_heads(bench.stability), sep="\n")


if __name__ == "__main__":
    main()
