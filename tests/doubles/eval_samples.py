"""Measurements and evaluations that no model had to make, for what reads them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvweave.lab.eval import Evaluation, Measurement
from kvweave.lab.eval.log import LogContents


def measured(
    sample: int, policy: str, kl: tuple[float, ...] = (0.1,), **more: object
) -> Measurement:
    """A measurement with plain numbers; `more` replaces fields."""
    fields: dict[str, object] = {
        "role": "full" if policy == "full" else "policy",
        "tokens": 100,
        "reused_prefix": 0,
        "reused_segment": 90,
        "recomputed": 10,
        "row_share": 0.1,
        "ttft_s": 1.0,
        "flops": 1000 if policy == "full" else 200,
        "restored": 0,
        "kv_bytes": 10,
        "shared_kv_bytes": 0,
        "score": 0.5,
        "top1": 1.0,
        "first_token": True,
        "top10": 1.0,
        "answer": "",
        "mode": "materialise",
        "mode_reason": "",
        "same_answer": True,
        "agreed": 3,
        "compared": 4,
        "encoding_flops": 600,
        "peak_bytes": None,
    }
    fields |= {"sample": sample, "policy": policy, "kl": kl, **more}
    return Measurement(**fields)


def contents(
    kls: dict[str, float], samples: int = 12, job: str = "needles, 512", seed: int = 0
) -> LogContents:
    """A log of one job: each policy's KL is about the given one, harder samples having more."""
    rng = np.random.default_rng(seed)
    log = LogContents(
        {"model": "m" * 20, "seed": 0},
        {job: {"task": job.split(",")[0], "length": 512, "score_name": "recall"}},
        {policy: policy for policy in kls},
    )
    for sample in range(samples):
        hard = 0.5 + rng.random()
        made = [measured(sample, "full", (0.0, 0.0), score=1.0)]
        for place, (policy, kl) in enumerate(kls.items()):
            near = kl * hard * (0.9 + 0.2 * rng.random())
            made.append(
                measured(
                    sample,
                    policy,
                    (near, near),
                    score=float(rng.random() > kl),
                    flops=100 + 100 * place,
                    ttft_s=0.1 + 0.1 * place,
                )
            )
        log.samples[job, sample] = {m.policy: m for m in made}
    return log


def without_times(evaluation: Evaluation) -> list[Measurement]:
    """What was measured, but for how long it took."""
    return [replace(m, ttft_s=0.0) for m in evaluation.measurements]
