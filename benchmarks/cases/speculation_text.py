"""Self-speculation of a real model over real text, beside its dense decoding of the same prompts.

On a GPU Qwen2.5-Coder-0.5B in bf16 answers prompts of up to 28K tokens, one alone and eight at
once: of prose and of code, greedily and drawn; elsewhere SmolLM2 in f32 answers short ones. *Every
16* says how often heads choose the pages that they draft by. A row has what a token takes until
everybody of its batch has said all, and how many drafts of a round were right. On a GPU the same
was asked once before, so that graphs have been captured, and prompts lie in the cache.

On a CPU in f32 answers have to be those of dense decoding. A GPU computes rows of a verification by
other kernels than a row alone, so in bf16 a tie may part: *equal* is the share of answers that are
dense decoding's to the last token, *same until* that of tokens before the first that is another,
and *tie* how much likelier than it dense decoding's own was, at most, in logits. Contenders run one
after the other in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.cases.top_k_step import EVERY, PAGE, choosing
from kvweave import models
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.eval.corpus import corpus_of
from kvweave.runner import Generation, Runner, Sampling
from kvweave.runner.model.model_spec import describe

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Way:
    """How a round drafts: so many tokens, by so many pages, chosen every so many tokens."""

    pages: int
    drafts: int
    every: int = EVERY

    def title(self) -> str:
        return f"{self.drafts} drafts by {self.pages} pages, every {self.every}"


@dataclass(frozen=True)
class Task:
    """What is answered by `steps` tokens each: prompts of a text, and the tokens of each prompt."""

    text: str
    prompts: tuple[tuple[int, int], ...]
    ways: tuple[Way, ...]
    steps: int
    temperature: float = 0.0

    def title(self, count: int, length: int) -> str:
        drawn = f", drawn at {self.temperature}" if self.temperature else ""
        return f"{self.text}, {count} × {length}{drawn}"


LONG = ((1, 4096), (1, 8192), (1, 16_384), (1, 28_672), (8, 4096), (8, 8192), (8, 16_384))
FEW, MANY = (Way(16, 2), Way(16, 4)), (Way(64, 2), Way(64, 4))
ON_GPU = (
    Task("kjv", LONG, (*FEW, *MANY, Way(64, 4, 4)), 128),
    Task("python", LONG, MANY, 128),
    Task("kjv", LONG, MANY[1:], 128, TEMPERATURE),
)
ON_CPU = (Task("sotu", ((1, 1024), (4, 1024), (1, 2048)), (*FEW, Way(16, 7)), 64),)
QUICK = (
    Task("sotu", ((1, 100),), (Way(4, 3),), 9),
    Task("python", ((2, 72),), (Way(3, 2, 4),), 5, TEMPERATURE),
)


@dataclass(frozen=True)
class Answers:
    """What some prompts were answered by, and what a token took until all had been said."""

    of: list[Generation]
    ms: float

    @property
    def tokens(self) -> list[list[int]]:
        return [list(one.tokens) for one in self.of]


def run(quick: bool) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    name, loaded = _loaded("cuda" if on_gpu else "cpu")
    tasks = ON_GPU if on_gpu else ON_CPU
    return rows_of(name, loaded, QUICK if quick else tasks)


def _loaded(device: str) -> tuple[str, tuple[Any, Any]]:
    """What the model is called, and it with its tokenizer; on a GPU in bf16."""
    if device == "cuda":
        try:
            return "Qwen2.5-Coder-0.5B", models.load_qwen_coder(device=device)
        except models.ModelUnavailable:
            pass
    return "SmolLM2", models.load_smollm2(device=device)


def rows_of(name: str, loaded: tuple[Any, Any], tasks: Sequence[Task]) -> list[Row]:
    """Every task's answers by dense decoding, and by each way of drafting."""
    tokenizer, rows = loaded[1], []

    @cache
    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    for task in tasks:
        rows += _of_task(name, loaded[0], task, encoded)
    return rows


def _of_task(name: str, model: Any, task: Task, encoded: Any) -> list[Row]:
    most = model.config.max_position_embeddings - task.steps
    loads = [(count, length) for count, length in task.prompts if length <= most]
    room = max(count * (length + task.steps + 2 * PAGE) for count, length in loads)
    settings: dict[str, Any] = {"progress": False, "check": False, "page_tokens": PAGE}
    settings["max_tokens"] = room + PAGE
    spec = describe(model)
    dense = Runner(model, **settings)
    drafting = {
        way: Runner(
            model,
            heads=choosing(spec, way.pages, rerank_every=way.every),
            speculate=way.drafts,
            **settings,
        )
        for way in task.ways
    }
    corpus, draws, rows = corpus_of(task.text), np.random.default_rng(0), []
    for count, length in loads:
        prompts = [
            np.asarray(corpus.token_slice(draws, encoded, length), np.int32) for _ in range(count)
        ]
        title = f"{name}, {task.title(count, length)}"
        whole = _answered(dense, prompts, task)
        rows.append(Row(f"{title}: dense", whole.ms, "ms", None, {}))
        for way, runner in drafting.items():
            made = _answered(runner, prompts, task)
            beside = {**_drafted(made), "dense ÷ this": whole.ms / made.ms}
            beside |= _agreement(dense, prompts, whole, made, task)
            rows.append(Row(f"{title}: {way.title()}", made.ms, "ms", None, beside))
    return rows


def _answered(runner: Runner, prompts: Sequence[np.ndarray], task: Task) -> Answers:
    """Answers of all prompts together, each of `steps` tokens."""
    ask: dict[str, Any] = {"sampling": Sampling(temperature=task.temperature), "stop": ()}
    ask["max_new_tokens"] = task.steps
    if runner.spec.device.type == "cuda":
        runner.generate_batch(prompts, "full", **ask)
    made = runner.generate_batch(prompts, "full", **ask)
    expect(
        all(len(one.tokens) == task.steps for one in made), f"expected {task.steps} tokens of each"
    )
    # The first token is the prompt's own.
    seconds = max(one.report.timings.decode_s for one in made)
    return Answers(made, seconds * 1e3 / (task.steps - 1))


def _drafted(made: Answers) -> dict[str, float]:
    """Drafts that were right: of a round, and of all drafts."""
    told = [one.report.speculation for one in made.of if one.report.speculation is not None]
    rounds, drafted, accepted = (
        sum(getattr(one, name) for one in told) for name in ("rounds", "drafted", "accepted")
    )
    expect(rounds > 0, "expected rounds, got none")
    return {"accepted": accepted / rounds, "share": accepted / drafted}


def _agreement(
    dense: Runner, prompts: Sequence[np.ndarray], whole: Answers, made: Answers, task: Task
) -> dict[str, float]:
    """How far answers are dense decoding's: all the way, where arithmetic is the same."""
    until = [_same(*both) for both in zip(whole.tokens, made.tokens, strict=True)]
    equal = float(np.mean([same == task.steps for same in until]))
    if dense.spec.device.type == "cpu" and dense.spec.dtype == torch.float32:
        expect(equal == 1.0, f"expected the tokens of dense decoding, got others from {until} on")
    found = {"equal": equal, "same until": float(np.mean(until)) / task.steps}
    if task.temperature:
        return found
    parted = [number for number, same in enumerate(until) if same < task.steps]
    ties = [_tie(dense, prompts[n], whole.tokens[n], made.tokens[n], until[n]) for n in parted]
    return {**found, "tie": max(ties, default=0.0)}


def _same(tokens: list[int], others: list[int]) -> int:
    """How many first tokens of two answers are the same."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(tokens))


def _tie(
    dense: Runner, prompt: np.ndarray, tokens: list[int], others: list[int], same: int
) -> float:
    """How much higher the logit of an answer's token is than of another's, behind so many."""
    read = np.concatenate((prompt, np.asarray(tokens[:same], np.int32)))
    with dense.prefill(read, "full", remember=False) as done:
        logits = done.logits[-1].float()
        return float(logits[tokens[same]] - logits[others[same]])
