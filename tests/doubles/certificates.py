"""What certificates are tested with: small models, little effort, losses that none had to make."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from byte_tokenizer import Bytes
from eval_samples import measured
from families import tiny
from kvweave import models
from kvweave.lab.eval import evaluate
from kvweave.lab.profile import CertifyJob, Effort
from kvweave.lab.profile.candidate import Candidate
from kvweave.lab.profile.certifying import ALL_JOBS
from kvweave.lab.profile.losses import Losses
from kvweave.policies import Foresight, Naive
from kvweave.policies.policy_profile import Bound, Evidence, PolicyProfile
from kvweave.runner import Runner

EFFORT = Effort((CertifyJob("lm", 512, "plain", 2),), search=4, certify=6, max_new_tokens=4)
SMALL = replace(EFFORT, search=2, certify=2)


def model_of(vocabulary: int) -> Any:
    """A random model whose attention is sharp enough to tell policies apart."""
    made = tiny("llama", vocab_size=vocabulary, num_hidden_layers=2, max_position_embeddings=4096)
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 8.0
        layer.self_attn.k_proj.weight.data *= 8.0
        layer.self_attn.v_proj.weight.data *= 6.0
    return made


def with_bytes() -> tuple[Any, Any]:
    """A model of bytes: with few logits to compute, policies cost what their rows do."""
    return model_of(300), Bytes()


def with_tokenizer() -> tuple[Any, Any]:
    """A model with a real tokenizer, for tasks that ask."""
    tokenizer = models.load_tokenizer("smollm2")
    return model_of(len(tokenizer)), tokenizer


def bound_between(runner: Runner) -> Bound:
    """A bound that naive does not keep, and foresight at some budget does."""
    task = EFFORT.jobs[0].on("sotu")
    found = evaluate(runner, task, [Foresight(share=0.35)], 2, controlled=0).summaries()
    naive, mine = (summary.kl.value for summary in found if summary.role == "policy")
    assert mine < 0.5 * naive
    return Bound("kl", math.sqrt(naive * mine))


def rows(made: PolicyProfile, stage: str, heads: str | None = None) -> dict[str, Evidence]:
    """What all jobs came to in a stage, by policy, under one head map or without any."""
    found = [e for e in made.evidence if e.stage == stage and e.job == ALL_JOBS]
    return {e.policy: e for e in found if e.heads == heads}


def losses(kind: str, *jobs: list[float], of: Candidate | None = None, **more: int) -> Losses:
    """Of a candidate; `more` are figures of its measurements."""
    made = Losses(Candidate(Naive()) if of is None else of, kind)
    for number, values in enumerate(jobs):
        for index, value in enumerate(values):
            full = measured(index, "full", score=1.0)
            mine = measured(index, "naive", (value,), score=1.0 - value, **more)
            made.add(f"job {number}", full, mine)
    return made


def noisy(of: Candidate, kl: float, **figures: int) -> Losses:
    """Losses of eight samples of about that KL, with noise of 2 %."""
    return losses("kl", [kl * (1.0 + 0.02 * (-1) ** i) for i in range(8)], of=of, **figures)
