"""Steps that are captured on a GPU, over packed pages of all kinds: what they know stays true."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_batches import decoding
from kvweave.runner.decode.packed_reads import PackedReads
from packed_decoding import said_behind, steps_of
from packed_kinds import EVERY, policy_of, prompts_of, runner_of, same_bits
from ranked_pages import stepping_as_on_a_gpu
from strategy_runners import uneven_model

STEPS = 140
"""Two pages fill meanwhile, and heads are ranked several times."""
KINDS = ["choosing", "segments, choosing", "documents, choosing"]
ASKED: dict[str, Any] = {"reserve_tokens": 2 * STEPS, "remember": False, "watched": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return uneven_model()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_could_be_captured_says_what_a_launched_one_says(model: Any, kind: str) -> None:
    """Bit for bit, and when it is seated anew."""
    logits, said = [], None
    for stepping in (lambda runner: runner, stepping_as_on_a_gpu):
        runner = stepping(runner_of(model, kind))
        (prompt,) = prompts_of(runner, kind, 1)
        with runner.prefill(prompt, policy_of(kind), **ASKED) as done:
            runner.flush()
            said, seen = said_behind(runner, done, STEPS, said)
            logits.append([*seen, *steps_of(runner, decoding(runner, done, 30), 30)])
    assert same_bits(*logits)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_come_and_go_say_what_they_say_alone(model: Any, kind: str) -> None:
    """Three of unlike lengths, in a step of four: what is nobody's chooses and reads nothing."""
    alone = runner_of(model, kind)
    prompts = prompts_of(alone, kind, 3)
    ask: dict[str, Any] = {"stop": (), "remember": False}
    lengths = [90, 30, 60]
    wanted = [
        alone.generate(prompt, policy_of(kind), max_new_tokens=most, **ask).tokens
        for prompt, most in zip(prompts, lengths, strict=True)
    ]
    runner = stepping_as_on_a_gpu(runner_of(model, kind))
    prompts_of(runner, kind, 1)
    engine = runner.engine(token_budget=None, chunk_tokens=None)
    asked = [
        engine.submit(prompt, policy_of(kind), max_new_tokens=most, **ask)
        for prompt, most in zip(prompts, lengths, strict=True)
    ]
    engine.run()
    assert [request.result().tokens for request in asked] == wanted


@pytest.mark.parametrize("kind", ["choosing", "documents", "documents, choosing"])
def test_what_a_step_knows_is_the_same_until_it_lies_elsewhere(
    model: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether anything is packed meanwhile or not; steps that rank have tables of their own."""
    runner = stepping_as_on_a_gpu(runner_of(model, kind))
    (prompt,) = prompts_of(runner, kind, 1)
    known, tables = [], []
    made = PackedReads.tables

    def noted(self: PackedReads, *given: Any) -> Any:
        tables.append(made(self, *given))
        return tables[-1]

    monkeypatch.setattr(PackedReads, "tables", noted)
    with runner.prefill(prompt, policy_of(kind), **ASKED) as done, torch.inference_mode():
        sequence = decoding(runner, done, STEPS)
        for _ in range(STEPS - 1):
            runner._decoder.step([sequence])
            known.append(tables[-1])
    steady = [step for step in known if not any(step.ranked)]
    assert len({id(tables) for tables in steady}) == 1
    assert len({id(tables) for tables in known if any(tables.ranked)}) == ("choosing" in kind)
    ranking = [number for number, step in enumerate(known) if any(step.ranked)]
    if "choosing" in kind:
        assert ranking == list(range(0, STEPS - 1, EVERY))
    else:
        assert ranking == []
        assert steady[0].final
    assert bool(steady[0].final) == ("documents" in kind)
