"""What healing is measured by: answers that come to numbers that nobody asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality.topic_change import Dictated, kept, summary, topic_change
from kvweave.runner import Segment


def made(tokenizer: Any, seed: int) -> Any:
    return topic_change(tokenizer, np.random.default_rng(seed), 640, 60)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_topic_changes_to_numbers_of_the_text(smollm2: Any, seed: int) -> None:
    _, tokenizer = smollm2
    change = made(tokenizer, seed)
    assert change == made(tokenizer, seed)
    parts = change.sample.parts
    text = " ".join(part.text for part in parts if isinstance(part, Segment))
    hidden = dict(re.findall(r"The special number for (\w+) is (\d+)", text))
    assert len(hidden) == 8
    before, behind = (tokenizer.decode(list(ids)) for ids in (change.before, change.behind))
    said = dict(re.findall(r"(\w+): (\d{5})", before + behind))
    assert len(said) == 4
    assert said.items() <= hidden.items()
    assert set(change.sample.answers) == {hidden[city] for city in list(said)[:2]}
    assert not set(change.sample.answers) & set(re.findall(r"\d{5}", behind))
    assert len(change.before) >= 60


def test_a_dictated_answer_is_said_whatever_is_likely() -> None:
    dictated = Dictated(tokens=(3, 1))
    logits = torch.tensor([9.0, 0.0, 0.0, 0.0])
    said = [int(dictated.pick(logits, torch.Generator())) for _ in range(2)]
    assert said == [3, 1]
    assert torch.allclose(torch.stack(dictated.heard).exp().sum(-1), torch.ones(2))


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert kept(path) == []
    path.write_text(json.dumps({"seed": 0}) + "\n" + '{"seed": 1, "wa')
    assert kept(path) == [{"seed": 0}]


def test_means_are_over_samples_and_differences_in_pairs() -> None:
    kl = {"naive": (4.0, 2.0), "foresight": (2.0, 1.0), "foresight, healing": (1.0, 0.5)}
    samples = [
        {"seed": n, "ways": {name: {"kl_behind": values[n]} for name, values in kl.items()}}
        for n in range(2)
    ]
    told = {way["way"]: way for way in summary(samples)}
    assert told["naive"]["kl_behind"] == 3.0
    assert told["foresight"]["gap_behind"][0] == 0.5
    assert told["foresight, healing"]["less_than_foresight"][0] == 0.75
