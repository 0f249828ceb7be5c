"""Drafts and verification on a GPU: captured, without a wait before a round's end, and dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import random_tokens, tiny
from kvweave.runner import Runner, Sampling
from kvweave.runner.decode import rounds
from kvweave.runner.decode.draws import Draws
from ranked_pages import FULL, WINDOW, every_place_came_back, ranked_runner, top_k
from versions import needs_cuda

pytestmark = needs_cuda

PAGE, STEPS = 16, 40
MIXED = [top_k(4), FULL, top_k(3, 3), WINDOW, top_k(4, 16)]
DRAWN = [None, Sampling(temperature=0.9, seed=1), Sampling(temperature=1.2, top_p=0.9, seed=5)]
ASK: dict[str, Any] = {"max_new_tokens": STEPS, "stop": (), "remember": False}


def there(kinds: Any, name: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A runner on the GPU; of half precision by the kernels of tensor cores."""
    changes = {} if dtype == torch.float32 else {"head_dim": 64}
    model = tiny(name, **changes).to("cuda", dtype)
    return ranked_runner(model, kinds, **{"page_tokens": PAGE, "max_tokens": 8192, **more})


def dense(kinds: Any) -> Any:
    return [FULL if kind["kind"] == "top_k" else kind for kind in kinds]


@pytest.mark.parametrize("kinds", [[top_k(4)], MIXED])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
@pytest.mark.parametrize("sampling", DRAWN)
def test_answers_are_dense(name, kinds, sampling) -> None:
    """In f32, where the rounding of two kernels turns no token of these texts."""
    prompts = [random_tokens(length, length) for length in (1, 15, 16, 90, 130, 300, 45, 64)]
    wanted = there(dense(kinds), name).generate_batch(prompts, "full", sampling=sampling, **ASK)
    runner = there(kinds, name, speculate=4)
    made = runner.generate_batch(prompts, "full", sampling=sampling, **ASK)
    assert [one.tokens for one in made] == [one.tokens for one in wanted]
    assert sum(one.report.speculation.accepted for one in made) > 0
    alone = runner.generate(prompts[5], "full", sampling=sampling, **ASK)
    assert alone.tokens == wanted[5].tokens
    assert every_place_came_back(runner)


def _spoil(monkeypatch: Any, wrong: float) -> None:
    generator, drafted = torch.Generator("cuda").manual_seed(7), Draws.drafted

    def spoilt(self: Draws, logits: torch.Tensor) -> torch.Tensor:
        likely = drafted(self, logits)
        at = {"generator": generator, "device": "cuda"}
        other = torch.randint(0, logits.shape[1], likely.shape, **at)
        return torch.where(torch.rand(likely.shape, **at) < wrong, other, likely)

    monkeypatch.setattr(Draws, "drafted", spoilt)


@pytest.mark.parametrize("wrong", [0.3, 1.0])
@pytest.mark.parametrize("sampling", DRAWN)
def test_whatever_is_drafted(monkeypatch, sampling, wrong) -> None:
    prompts = [random_tokens(length, length) for length in (1, 16, 63, 90, 45)]
    wanted = there(dense(MIXED)).generate_batch(prompts, "full", sampling=sampling, **ASK)
    runner = there(MIXED, speculate=4)
    _spoil(monkeypatch, wrong)
    made = runner.generate_batch(prompts, "full", sampling=sampling, **ASK)
    assert [one.tokens for one in made] == [one.tokens for one in wanted]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_each_token_is_what_the_pass_over_all_pages_says(monkeypatch, dtype, wrong) -> None:
    """Of half precision: the likeliest token behind each, up to ties by rounding."""
    runner = there(MIXED, dtype=dtype, speculate=4)
    prompts = [random_tokens(length, length) for length in (5, 90, 300)]
    _spoil(monkeypatch, wrong)
    made = runner.generate_batch(prompts, "full", **ASK)
    plain = there(dense(MIXED), dtype=dtype)
    for prompt, one in zip(prompts, made, strict=True):
        with plain.prefill(prompt, "full", remember=False) as done:
            first = done.logits[-1:]
            logits = torch.cat((first, plain.extend(done, one.tokens[:-1])))
        said = torch.tensor(one.tokens, device=logits.device)[:, None]
        lacks = logits.amax(-1) - logits.gather(1, said)[:, 0]
        assert float(lacks.max()) < 0.03 * float(logits.abs().max())


def test_rounds_are_captured_and_wait_once(monkeypatch) -> None:
    """Drafts with a ranking, drafts without, and verifications; a round waits at its end alone."""
    runner: Runner = there([top_k(4, 4)], speculate=4)
    prompts = [random_tokens(length, 1) for length in (150, 90)]
    runner.generate_batch(prompts, "full", **ASK)
    graphs = runner._decoder.graphs
    assert graphs is not None
    assert graphs.capturable
    known = {(size.width, any(map(any, size.form))): size.graph for size in graphs._sizes.values()}
    assert set(known) >= {(1, True), (1, False), (5, False)}
    assert all(known[key] is not None for key in ((1, True), (1, False), (5, False)))
    carried, computed = rounds.Rounds.runs, []

    def watched(self: Any, slots: Any, step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchroniz") as told:
                runs = carried(self, slots, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        computed.append(len(told))
        return runs

    monkeypatch.setattr(rounds.Rounds, "runs", watched)
    runner.generate_batch(prompts, "full", **ASK)
    assert set(computed) == {1}


def test_whoever_joins_and_leaves() -> None:
    lengths, limits = [20, 75, 5, 48, 290], [9, 17, 33, 4, 20]
    answers = []
    for runner in (there(dense(MIXED)), there(MIXED, speculate=4)):
        engine = runner.engine(token_budget=96, chunk_tokens=32, max_running=3)
        some = [
            engine.submit(random_tokens(n, 7 + n), "full", **{**ASK, "max_new_tokens": limit})
            for n, limit in zip(lengths, limits, strict=True)
        ]
        engine.run()
        answers.append([request.result().tokens for request in some])
        runner.cache.check()
        assert runner.cache.stats()["held"] == 0
    assert answers[0] == answers[1]
