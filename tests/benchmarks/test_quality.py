"""The held-out evaluation: its list of samples, and what its rows say."""

import numpy as np
import pytest

from benchmarks.quality import held_out as quality
from kvweave.lab.eval import Evaluation, Measurement, task_of


def measured(sample: int, policy: str, role: str, kl: float) -> Measurement:
    return Measurement(
        sample, policy, role, 100, 0, 90, 10, 0.1, 1.0, 50, 0, 10, 0, 0.5, (kl, 3 * kl), 1.0, True,
        1.0, "", "materialise", "", True, 0, 0, 0, None,
    )  # fmt: skip


def evaluation() -> Evaluation:
    rng = np.random.default_rng(0)
    measurements = []
    for sample in range(20):
        hard = 1.0 + rng.random()
        measurements += [
            measured(sample, "full", "full", 0.0),
            measured(sample, "naive", "policy", 0.04 * hard),
            measured(sample, "foresight", "policy", 0.01 * hard),
        ]
    return Evaluation("lm", 1024, "nll", 1, tuple(measurements), "kjv")


def test_every_step_is_a_task_that_exists() -> None:
    for job, samples in quality.STEPS:
        task_of(job.task, job.length, job.corpus)
        assert (job.corpus == "sotu") == ("tuned on" in job.name)
        assert samples >= 6
    names = {job.name for job, _ in quality.STEPS}
    assert len(names) == len({job for job, _ in quality.STEPS})


def test_rows_hold_intervals_and_the_paired_difference() -> None:
    naive, ours = quality.rows_of("lm, kjv", evaluation())
    assert (naive.name, ours.name) == ("lm, kjv: naive", "lm, kjv: foresight")
    assert ours.of["95 %"][0] < ours.value < ours.of["95 %"][1]
    assert ours.of["gap closed"] == pytest.approx(0.75)
    assert naive.of["gap closed"] == 0.0
    # Paired: three quarters of naive's own mean, far narrower than the two intervals apart.
    low, high = naive.of["KL − foresight's, 95 %"]
    assert low < 0.75 * naive.value < high
    assert "KL − foresight's, 95 %" not in ours.of
    assert ours.of["n"] == 20


def test_full_is_shown_where_answers_are_scored() -> None:
    plain = quality.rows_of("lm", evaluation())
    answered = Evaluation("chain", 768, "recall", 1, evaluation().measurements, "kjv")
    rows = quality.rows_of("chain", answered)
    assert [row.name for row in rows] == ["chain: naive", "chain: foresight", "chain: full"]
    assert rows[-1].of["recall"] == 0.5
    assert len(plain) == 2
    assert all("recall" not in row.of for row in plain)
