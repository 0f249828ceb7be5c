"""Beam search: what transformers' own says, over blocks that beams share, and all come back."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from families import VOCABULARY, random_tokens, tiny
from host_memory import host_runner
from kvweave import InvalidArgument, PoolFull
from kvweave.runner import Runner
from kvweave.runner.answers.beam_search import Breadth, Hypotheses
from packed_decoding import nothing_is_held, packed_runner
from ranked_pages import FULL, WINDOW, ranked_runner, stepping_as_on_a_gpu, top_k
from small_engines import held, runner_of

SAID = 12


def own_search(model: Any, tokens: Any, **how: Any) -> list[tuple[list[int], float]]:
    """What transformers finds, of equal likelihoods the same: tokens and scores, the best first."""
    ids = torch.as_tensor(tokens)[None].long()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=SAID,
        num_return_sequences=how["num_beams"],
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=VOCABULARY - 1,
        **how,
    )
    end = how["eos_token_id"]
    said = []
    for row in found.sequences[:, len(tokens) :].tolist():
        ended = [at for at, token in enumerate(row) if token == end]
        said.append(row[: ended[0] + 1] if ended else row)
    return list(zip(said, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-oss", "phi3"])
@pytest.mark.parametrize("beams", [2, 3, 5])
def test_it_finds_what_transformers_finds(family: str, beams: int) -> None:
    """Whatever longer ones count for, and whether tokens that end them are likely or not."""
    model = tiny(family)
    runner = runner_of(model, 256)
    for seed, penalty in enumerate((0.0, 0.6, 1.0, 2.0)):
        tokens = random_tokens(40 + seed, seed)
        with runner.prefill(tokens) as done:
            likely = runner.search(done, beams=beams, max_new_tokens=SAID, stop=())[0].tokens
            for end in (likely[1], likely[-1], 3):
                wanted = own_search(
                    model, tokens, num_beams=beams, length_penalty=penalty, eos_token_id=end
                )
                how = {"beams": beams, "length_penalty": penalty, "stop": [end]}
                found = runner.search(done, max_new_tokens=SAID, **how)
                assert [beam.tokens for beam in found] == [said for said, _ in wanted]
                scores = [beam.score for beam in found]
                assert np.allclose(scores, [score for _, score in wanted], atol=1e-4)
                assert [beam.stopped for beam in found] == [b.tokens[-1] == end for b in found]
            assert done.request.length == len(tokens)
    assert held(runner) == 0


def test_enough_beams_find_the_best_of_all() -> None:
    """Against all sequences of a chain whose tokens depend on the two before."""
    random, alphabet, limit = np.random.default_rng(5), 4, 5
    table = torch.from_numpy(random.normal(size=(alphabet + 1, alphabet + 1, alphabet)) * 2)
    for ends in (frozenset(), frozenset({2})):
        for penalty in (0.0, 1.0):
            best = _best_of_all(table.log_softmax(-1), alphabet, limit, ends, penalty)
            found = Hypotheses(Breadth(alphabet**limit, penalty), limit, ends)
            while not found.is_over:
                rows = [table[tuple(([alphabet] * 2 + said)[-2:])] for said in found.said]
                found.take_in(found.candidates(torch.stack(rows)))
            score, tokens = found.done[0]
            assert tokens == best[1]
            assert score == pytest.approx(best[0], abs=1e-5)


def _best_of_all(
    chances: torch.Tensor, alphabet: int, limit: int, ends: frozenset[int], penalty: float
) -> tuple[float, list[int]]:
    """The likeliest sequence by its score, of all that end or are as long as may be."""
    scored = []
    for length in range(1, limit + 1):
        for said in product(range(alphabet), repeat=length):
            if any(token in ends for token in said[:-1]):
                continue
            if length < limit and said[-1] not in ends:
                continue
            known = [alphabet, alphabet, *said]
            likelihood = sum(float(chances[tuple(known[at : at + 3])]) for at in range(length))
            scored.append((likelihood / length**penalty, list(said)))
    return max(scored)


@pytest.mark.parametrize("kind", ["int4", "half-int4"])
def test_one_beam_over_packed_pages_is_what_is_decoded(kind: str) -> None:
    model = tiny("llama", head_dim=64, max_position_embeddings=4096)
    runner = packed_runner(model, kv_dtype=kind, max_tokens=4096)
    tokens = random_tokens(400, 1)
    # The shared basis is made of the first tokens that are packed.
    runner.prefill(tokens, remember=False).release()
    with runner.prefill(tokens, remember=False) as done:
        wanted = runner.decode(done, max_new_tokens=80, stop=()).tokens
    with runner.prefill(tokens, remember=False) as done:
        assert runner.search(done, beams=1, max_new_tokens=80, stop=())[0].tokens == wanted
        several = runner.search(done, beams=4, max_new_tokens=80, stop=())
        assert several[0].score >= several[-1].score
    runner.cache.check()
    assert nothing_is_held(runner)


def test_beams_share_blocks_and_go_on_behind_what_was_decoded() -> None:
    model = tiny("llama")
    runner = runner_of(model, 20)
    tokens = random_tokens(200, 2)
    with runner.prefill(tokens, remember=False) as done:
        # Prompts of their own would take 8 · 13 blocks.
        runner.search(done, beams=8, max_new_tokens=8, stop=())
        said = runner.decode(done, max_new_tokens=5, stop=()).tokens
        found = runner.search(done, beams=3, max_new_tokens=6, stop=())
    alone = runner_of(model, 256)
    with alone.prefill([*tokens, *said], remember=False) as done:
        assert found == alone.search(done, beams=3, max_new_tokens=6, stop=())
    assert held(runner) == held(alone) == 0


def test_what_finds_no_room_holds_nothing() -> None:
    runner = runner_of(tiny("llama"), 14)
    with runner.prefill(random_tokens(200, 3), remember=False) as done:
        before = held(runner)
        with pytest.raises(PoolFull):
            runner.search(done, beams=4, max_new_tokens=40, stop=())
        assert held(runner) == before
        assert len(runner.decode(done, max_new_tokens=4, stop=()).tokens) == 4


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"beams": 0}, "beams"),
        ({"beams": 1.5}, "beams"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": float("inf")}, "length_penalty"),
        ({"length_penalty": -10.5}, "length_penalty: expected .*, got -10.5"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"stop": ["and"]}, "stop"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], says: str) -> None:
    runner: Runner = runner_of(tiny("llama"))
    with runner.prefill(random_tokens(20, 4)) as done:
        before = held(runner)
        with pytest.raises(InvalidArgument, match=says):
            runner.search(done, **how)
        assert held(runner) == before
    with pytest.raises(InvalidArgument, match="released"):
        runner.search(done)
    with pytest.raises(InvalidArgument, match="prefilled"):
        runner.search([1, 2, 3])  # type: ignore[arg-type]


def test_a_server_searches_between_two_steps() -> None:
    model = tiny("llama")
    tokens, other = random_tokens(50, 5), random_tokens(30, 6)
    alone = runner_of(model)
    with alone.prefill(tokens) as done:
        wanted = alone.search(done, beams=3, max_new_tokens=SAID, stop=())
    said = alone.generate(other, max_new_tokens=40, stop=()).tokens
    runner = runner_of(model)
    with runner.serve() as server:
        beside = server.submit(other, max_new_tokens=40, stop=())
        with server.call(lambda: runner.prefill(tokens)) as done:
            how = {"beams": 3, "max_new_tokens": SAID, "stop": ()}
            assert server.call(lambda: runner.search(done, **how)) == wanted
        assert beside.result().tokens == said
    assert held(runner) == 0


KINDS = [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: ranked_runner(model, KINDS),
        lambda model: ranked_runner(model, KINDS, page_tokens=8, speculate=4),
        lambda model: host_runner(model, KINDS),
    ],
    ids=["windows and chosen pages", "drafts", "host memory"],
)
def test_one_beam_is_what_is_decoded(make: Any, captured: bool) -> None:
    """Whatever heads read, wherever it lies; and several leave nothing behind."""
    runner = make(tiny("llama"))
    if captured:
        stepping_as_on_a_gpu(runner)
    tokens = random_tokens(90, 3)
    how: dict[str, Any] = {"max_new_tokens": 30, "stop": ()}
    with runner.prefill(tokens, remember=False) as done:
        wanted = runner.decode(done, **how).tokens
    with runner.prefill(tokens, remember=False) as done:
        assert runner.search(done, beams=1, **how)[0].tokens == wanted
        found = runner.search(done, beams=4, **how)
        assert found[0].score >= found[-1].score
        assert runner.decode(done, **how).tokens == wanted
    assert held(runner) == 0
