"""Healing when an answer changes its topic: `python -m benchmarks.quality.topic_change MODEL`.

A prompt of documents asks for two of eight hidden numbers. The answer says them, goes on with some
200 tokens of other text, and then comes to two more numbers that nobody has asked for. That answer
is dictated to all: to full, and to a policy without healing and with it. KL is to full, at each
token before and behind the turn. Samples go to a file of JSON lines, from which an interrupted run
goes on, and several processes may share the work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvweave import models
from kvweave.lab.eval.corpus import DEFAULT_CORPUS, corpus_of
from kvweave.lab.eval.encoded import inserted
from kvweave.lab.eval.hidden_text import hide
from kvweave.lab.eval.layout import Plain
from kvweave.lab.eval.needle import asked_for, hidden_numbers, needle_lines
from kvweave.lab.eval.sample import Sample, task_encoder
from kvweave.lab.eval.statistics import Interval, bootstrap, difference, gap_closed
from kvweave.lab.eval.wording import chat_prompt
from kvweave.policies import Foresight, Policy
from kvweave.runner import Healing, Part, Report, Runner, Sampling

HIDDEN = 8
WAYS: dict[str, tuple[str | Policy, Healing | None]] = {
    "naive": ("naive", None),
    "foresight": (Foresight(), None),
    "foresight, healing": (Foresight(), Healing()),
}
"""What is compared with full, by name: a policy, and how it heals."""


@dataclass(frozen=True)
class Dictated(Sampling):
    """Says given tokens, and keeps the logits that it was asked to choose from."""

    tokens: tuple[int, ...] = ()
    heard: list[torch.Tensor] = field(default_factory=list, compare=False)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The next of the given tokens."""
        said = self.tokens[len(self.heard)]
        self.heard.append(torch.log_softmax(logits.float(), -1))
        return torch.tensor(said, device=logits.device)


@dataclass(frozen=True)
class TopicChange:
    """A prompt, and the tokens of its answer before it comes to another topic and from then on."""

    sample: Sample
    before: tuple[int, ...]
    behind: tuple[int, ...]


def topic_change(tokenizer: Any, rng: np.random.Generator, length: int, turn: int) -> TopicChange:
    """The next one: the topic changes behind some `turn` tokens.

    Raises InvalidArgument for a length that does not hold what is hidden.
    """
    encode = task_encoder(tokenizer)
    layout = Plain()
    space = layout.space(tokenizer, length, rng, "\n\n")
    cities, numbers = hidden_numbers(rng, HIDDEN)
    asked, later = np.split(rng.permutation(HIDDEN)[:4], 2)
    question = asked_for([cities[i] for i in asked], [numbers[i] for i in asked])
    lines = space.spread(needle_lines(cities, numbers))
    documents = hide(space, rng, DEFAULT_CORPUS, lines, [question])
    body = layout.lay(documents, space, rng)
    sample = Sample(chat_prompt(tokenizer, question, body.parts), question.answers)
    said = "\n".join(f"{cities[i]}: {numbers[i]}" for i in asked) + "\n\n"
    source = corpus_of(DEFAULT_CORPUS).sentences(rng)
    while len(encode(said)) < turn:
        said += " " + next(source)
    first, second = ((cities[i], numbers[i]) for i in later)
    said += f"\n\nThe special numbers for {first[0]} and {second[0]} in the text:\n{first[0]}:"
    numbered = f" {first[1]}\n{second[0]}: {second[1]}"
    return TopicChange(sample, tuple(encode(said)), tuple(encode(numbered)))


class Bench:
    """A model, and how each way answers a prompt whose answer changes its topic."""

    def __init__(self, model: str, device: str, length: int, turn: int) -> None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.model, self.tokenizer = models.load(model, dtype, device=device)
        self.length, self.turn = length, turn
        room = 4 * (length + turn + 256)
        self.runner = Runner(
            self.model, self.tokenizer, max_tokens=room, frozen_share=0.6, check=False,
            progress=False,
        )  # fmt: skip

    def measure(self, seed: int) -> dict[str, Any]:
        """KL to full before and behind the turn, and what each way costs, by its name."""
        rng = np.random.default_rng([seed, self.length])
        change = topic_change(self.tokenizer, rng, self.length, self.turn)
        tokens = (*change.before, *change.behind)
        with inserted(self.runner, change.sample, f"sample {seed}") as encoded:
            parts = encoded.sample.parts
            full, whole = self._say(parts, tokens, "full", None)
            flops, ways = sum(whole.flops.values()), {}
            for name, (policy, healing) in WAYS.items():
                said, report = self._say(parts, tokens, policy, healing)
                kl = (full.exp() * (full - said)).sum(-1).double().cpu().numpy()
                healed = report.healing
                ways[name] = {
                    "kl_before": float(kl[: len(change.before)].mean()),
                    "kl_behind": float(kl[len(change.before) :].mean()),
                    "flops": sum(report.flops.values()) / flops,
                    "watch_flops": 0.0 if healed is None else healed.watch_flops / flops,
                    "heal_flops": 0.0 if healed is None else healed.heal_flops / flops,
                    "recomputed": 0 if healed is None else healed.recomputed,
                    "decode_s": report.timings.decode_s,
                }
        lengths = {"tokens": whole.tokens, "before": len(change.before)}
        return {"seed": seed, **lengths, "behind": len(change.behind), "ways": ways}

    def _say(
        self,
        parts: Sequence[Part],
        tokens: tuple[int, ...],
        policy: str | Policy,
        healing: Healing | None,
    ) -> tuple[torch.Tensor, Report]:
        """Log-probabilities f32 [n, V] that each token was chosen from, and the report."""
        dictated = Dictated(tokens=tokens)
        done = self.runner.generate(
            parts, policy, max_new_tokens=len(tokens), sampling=dictated, stop=[], remember=False,
            healing=healing,
        )  # fmt: skip
        return torch.stack(dictated.heard), done.report


def summary(samples: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means over samples of each way, and behind the turn what it closes of naive's KL."""

    def column(name: str, what: str) -> np.ndarray[Any, Any]:
        return np.asarray([sample["ways"][name][what] for sample in samples], float)

    for name, found in samples[0]["ways"].items():
        means = {what: float(column(name, what).mean()) for what in found}
        behind = column(name, "kl_behind")
        closed = bootstrap(np.stack([column("naive", "kl_behind"), behind], 1), gap_closed)
        less = bootstrap(np.stack([column("foresight", "kl_behind"), behind], 1), difference)
        says = {"gap_behind": _bounds(closed), "less_than_foresight": _bounds(less)}
        yield {"way": name, "samples": len(samples), **means, **says}


def _bounds(interval: Interval) -> list[float]:
    return [round(x, 5) for x in (interval.value, interval.low, interval.high)]


def kept(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file of samples; a last one that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Measures what is not in the file yet, and prints a line of means a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path, nargs="+", help="JSON lines; several are only summed up")
    parser.add_argument("--length", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--turn", type=int, default=200, help="tokens before the topic changes")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th sample from i on")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    paths: list[Path] = asked.out
    shard, shards = map(int, asked.shard.split("/"))
    if len(paths) == 1:
        path = paths[0]
        done = kept(path)
        path.write_text("".join(json.dumps(one) + "\n" for one in done), encoding="utf-8")
        left = set(range(shard, asked.samples, shards)) - {one["seed"] for one in done}
        bench = Bench(asked.model, asked.device, asked.length, asked.turn) if left else None
        for seed in sorted(left):
            assert bench is not None
            with path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(bench.measure(seed)) + "\n")
    samples = sorted((one for path in paths for one in kept(path)), key=lambda one: one["seed"])
    for way in summary(samples):
        print(json.dumps(way))


if __name__ == "__main__":
    main()
