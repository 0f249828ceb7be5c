"""Documents of several formats on a GPU: they are read as the CPU reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from document_decoding import documents, fresh
from head_maps import class_map
from kvweave import ops
from kvweave.runner import Packing, Runner, Strategy
from kvweave.runner.tiers.chosen_formats import ChosenFormats
from kvweave.runner.tiers.strategies import Strategies
from packed_decoding import packed_runner, said_behind
from strategy_runners import all_is_back, text_of, uneven_model
from versions import needs_cuda

pytestmark = needs_cuda

STEPS, LONG = 40, 4200
WINDOWS = [[[128, 64], [0, 0]], [[0, 0], [17, 1]]]
NEAR = 0.06
"""Largest difference of a logit, as a share of the largest."""


def there(place: str, numbers: str, sights: Any) -> Runner:
    """A runner in bf16, of whose bound some heads have a top-r format and others INT4.

    `sights` [L, G, 2]: windows and sinks of its heads, or None.
    """
    strategy = Strategy(0.05, ops.top_r_candidates(64, numbers=numbers))
    given: dict[str, Any] = {"kv_dtype": Packing("int4", strategy=strategy), "max_tokens": 16384}
    model = uneven_model(64).to(place, torch.bfloat16)
    if sights is not None:
        plain = Runner(model, max_tokens=64, check=False, progress=False)
        given["heads"] = class_map(np.asarray(sights, np.int32), plain.spec.fingerprint)
    return packed_runner(model, chunk_tokens=600, **given)


@pytest.mark.parametrize("sights", [None, WINDOWS])
@pytest.mark.parametrize("numbers", ["bf16", "fp8", "int4"])
def test_it_says_what_the_cpu_says(numbers: str, sights: Any) -> None:
    doc = documents([LONG])[0]
    prompt = [fresh(70, 1), doc, fresh(30, 2)]
    asked: dict[str, Any] = {"reserve_tokens": STEPS, "remember": False, "watched": False}
    logits, said = [], None
    for place in ("cpu", "cuda"):
        runner = there(place, numbers, sights)
        report = runner.encode(doc.tokens, "long").packing
        runner.flush()
        assert len(report.formats) > 1
        assert text_of(runner).nbytes == report.bytes
        with runner.prefill(prompt, "naive", **asked) as done:
            said, seen = said_behind(runner, done, STEPS, said)
            logits.append(torch.stack(seen).cpu())
        runner.delete("long")
        assert all_is_back(runner)
    wanted, got = logits
    assert float((got - wanted).abs().max() / wanted.abs().max()) < NEAR


def test_its_pages_are_on_the_device_before_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = Strategies.place, []

    def placed(of: Strategies, *given: Any, **named: Any) -> str:
        (made,) = (each for each in given if isinstance(each, ChosenFormats))
        tensors = [tensor for each in made.made for tensor in (each.data, each.basis)]
        seen.extend(tensor.device.type for tensor in tensors if tensor is not None)
        return place(of, *given, **named)

    monkeypatch.setattr(Strategies, "place", placed)
    runner = there("cuda", "int4", None)
    runner.encode(documents([LONG])[0].tokens, "long")
    runner.flush()
    assert text_of(runner).nbytes > 0
    assert len(seen) > 1
    assert set(seen) == {"cuda"}
