"""Steps over packed pages of all kinds are captured on a GPU, and say what launched ones say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_batches import decoding
from kvweave.runner.decode.graph import StepGraphs
from packed_decoding import said_behind, steps_of
from packed_kinds import KINDS, policy_of, prompts_of, runner_of, same_bits
from strategy_runners import uneven_model
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 100
ASKED: dict[str, Any] = {"reserve_tokens": 2 * STEPS, "remember": False, "watched": False}


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_a_launched_one_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and when it is seated anew."""
    model = uneven_model(64).to("cuda", torch.bfloat16)
    logits, said, graphs = [], None, []
    capture = StepGraphs._capture

    def counted(self: StepGraphs, size: Any, rope: Any) -> None:
        capture(self, size, rope)
        assert size.graph is not None
        graphs.append(size)

    monkeypatch.setattr(StepGraphs, "_capture", counted)
    for captures in (False, True):
        runner = runner_of(model, kind)
        runner._decoder.graphs.capturable = captures
        (prompt,) = prompts_of(runner, kind, 1)
        with runner.prefill(prompt, policy_of(kind), **ASKED) as done:
            runner.flush()
            said, seen = said_behind(runner, done, STEPS, said)
            assert bool(graphs) == captures
            forms = {size.packed.ranked for size in graphs if size.packed is not None}
            # Those that rank too.
            assert not captures or ((True,) in forms) == ("choosing" in kind)
            logits.append([*seen, *steps_of(runner, decoding(runner, done, 60), 60)])
    assert same_bits(*logits)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_says_the_same_again(kind: str) -> None:
    """Requests come and go, and rows of the graphs' steps are nobody's."""
    model = uneven_model(64).to("cuda", torch.bfloat16)
    answers = []
    for captures in (False, True):
        runner = runner_of(model, kind)
        runner._decoder.graphs.capturable = captures
        prompts = prompts_of(runner, kind, 3)
        for prompt in prompts:
            # So that all switches to final texts are behind it.
            runner.prefill(prompt, policy_of(kind)).release()
        runner.flush()
        engine = runner.engine(token_budget=None, chunk_tokens=None)
        asked = [
            engine.submit(prompt, policy_of(kind), max_new_tokens=most, stop=(), remember=False)
            for prompt, most in zip(prompts, (90, 30, 60), strict=True)
        ]
        engine.run()
        answers.append([request.result().tokens for request in asked])
    assert answers[0] == answers[1]
