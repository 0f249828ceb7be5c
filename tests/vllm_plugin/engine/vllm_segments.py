"""vLLM engines that reuse segments, what is asked of them, and kvweave's own Runner beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvweave.adapters.vllm.segments.check import MarkerCheck
from kvweave.adapters.vllm.segments.connector import KvweaveSegments
from kvweave.adapters.vllm.segments.extension import KnowledgeBaseWorker
from kvweave.adapters.vllm.segments.stats import SegmentStats
from kvweave.policies import Policy
from kvweave.runner import Runner
from kvweave.runner.prompt import TokenizedPrompt
from vllm_engines import STOCK, Answer, answer, answers, engine, prompt, sampling

ARENA = 1 << 24
FAMILIES = {"llama": "Llama", "llama3-rope": "Llama", "llama-yarn": "Llama", "qwen2": "Qwen2"}
FAMILIES |= {"qwen3": "Qwen3", "qwen3-moe": "Qwen3Moe", "mistral": "Mistral"}
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.15}
Tokens = list[int]


def text(length: int, seed: int) -> Tokens:
    """Random tokens of the models' vocabulary."""
    return prompt(length, seed)["prompt_token_ids"]


def settings(family: str = "llama", arena: int = ARENA, **changes: Any) -> dict[str, Any]:
    """What a user gives vLLM to have segments reused."""
    return {
        "hf_overrides": {"architectures": [f"Kvweave{FAMILIES[family]}ForCausalLM"]},
        "additional_config": {"kvweave": {"segment_bytes": arena, **changes}},
        "kv_transfer_config": {
            "kv_connector": KvweaveSegments.__name__,
            "kv_role": "kv_both",
            "kv_connector_module_path": KvweaveSegments.__module__,
        },
        "logits_processors": [f"{MarkerCheck.__module__}:{MarkerCheck.__name__}"],
        "worker_extension_cls": f"{KnowledgeBaseWorker.__module__}.{KnowledgeBaseWorker.__name__}",
    }


class Counts:
    """What the worker of an engine counted since it started."""

    def __init__(self) -> None:
        self.anew()
        self.worker = get_kv_transfer_group().worker
        self._taken = self.worker.taken_stats
        self.worker.taken_stats = self.take

    def anew(self) -> None:
        """Counts from nothing again."""
        self.total = SegmentStats()

    def take(self) -> Any:
        taken = self._taken()
        if taken is not None:
            self.total.add(taken.counts)
        return taken


@contextmanager
def segments(model: Path, choice: dict[str, Any], **changes: Any) -> Iterator[tuple[LLM, Counts]]:
    """An engine that computes whole prompts at once, unless told otherwise, and its counts."""
    with engine(model, choice, **{"max_num_batched_tokens": 512, **changes}) as llm:
        yield llm, Counts()


@dataclass(frozen=True)
class Marked:
    """A prompt in parts: fresh tokens, and documents as tuples."""

    parts: Sequence[Tokens | tuple[int, ...]]

    @property
    def tokens(self) -> Tokens:
        return [token for part in self.parts for token in part]

    @property
    def spans(self) -> list[tuple[int, int]]:
        ends = np.cumsum([len(part) for part in self.parts]).tolist()
        pairs = zip(self.parts, ends, strict=True)
        return [(end - len(part), end) for part, end in pairs if isinstance(part, tuple)]


# A document between other texts, and once more at another place.
DOCUMENT = tuple(text(100, 9))
OTHER = tuple(text(70, 8))
FIRST = Marked([text(20, 1), DOCUMENT, text(15, 2)])
SECOND = Marked([text(37, 3), DOCUMENT, text(21, 4)])
BOTH = Marked([text(5, 5), OTHER, text(9, 6), DOCUMENT, text(30, 7)])
SHORT = Marked([text(20, 1), DOCUMENT[:24], text(15, 2)])
BEHIND = Marked([text(64, 1), DOCUMENT, text(40, 2)])
UNMARKED = [text(9, 0), text(80, 1), text(150, 2), text(60, 5), text(80, 5)]


@cache
def _stock(model: Path) -> dict[tuple[int, ...], Answer]:
    asked = [given.tokens for given in (FIRST, SECOND, BOTH, SHORT, BEHIND)] + UNMARKED
    with engine(model, STOCK) as llm:
        said = answers(llm, [{"prompt_token_ids": tokens} for tokens in asked], 24)
    return dict(zip(map(tuple, asked), said, strict=True))


def stock(model: Path, tokens: Tokens, count: int = 6) -> Answer:
    """What stock vLLM answers, with up to 24 tokens; one engine is asked all prompts named above.

    No other engine may run meanwhile.
    """
    whole = _stock(model)[tuple(tokens)]
    return Answer(whole.tokens[:count], whole.logprobs[:count], whole.cached)


def named(policy: str | Policy) -> str | dict[str, Any]:
    """A policy as a request names it."""
    if isinstance(policy, str):
        return policy
    return {"name": policy.name.removesuffix("-no-rope"), **asdict(policy)}


def asked(given: Marked, count: int, **markers: Any) -> tuple[dict[str, Tokens], Any]:
    """A prompt for vLLM and its sampling parameters."""
    params = sampling(count)
    params.extra_args = {"kvweave": {"segments": [list(span) for span in given.spans], **markers}}
    return {"prompt_token_ids": given.tokens}, params


def ask(llm: LLM, given: Marked, count: int = 6, **markers: Any) -> Answer:
    """What an engine answers to a prompt with its documents marked."""
    tokens, params = asked(given, count, **markers)
    return answer(llm.generate([tokens], params, use_tqdm=False)[0])


def plain(llm: LLM, tokens: Tokens, count: int = 6) -> Answer:
    """What an engine answers to a prompt without marks."""
    return answer(llm.generate([{"prompt_token_ids": tokens}], sampling(count), use_tqdm=False)[0])


class Counterpart:
    """kvweave's own Runner on the same weights: another implementation of the same policies."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.runner = Runner(model.eval(), progress=False, **options)
        self.rows: list[int] = []

    def ask(self, given: Marked, policy: str | Policy, count: int = 6, **lookup: Any) -> Answer:
        namespace = lookup.get("namespace", "")
        spans = tuple((start, end, namespace) for start, end in given.spans)
        whole = TokenizedPrompt(np.asarray(given.tokens, np.int32), spans)
        self.runner.tokenize = lambda _: whole  # type: ignore[method-assign]
        with self.runner.prefill("", policy, **{**lookup, "remember": False}) as done:
            logits = done.logits[-1].float()
        answered = self.runner.generate("", policy, max_new_tokens=count, **lookup)
        self.rows = answered.report.rows_per_layer
        first = float(torch.log_softmax(logits, -1)[answered.tokens[0]])
        return Answer(list(answered.tokens), [first], 0)


def close(got: Answer, wanted: Answer, tolerance: float = 2e-3) -> None:
    """The same tokens, and the first of the same probability but for rounding."""
    assert got.tokens == wanted.tokens
    assert abs(got.logprobs[0] - wanted.logprobs[0]) < tolerance
