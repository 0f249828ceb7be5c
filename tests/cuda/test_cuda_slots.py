"""Decode steps on a GPU that requests join and leave: captured once, whoever is in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decode_batches import decoding, prefilled
from families import tiny
from head_maps import classes_of, runner_of
from kvweave.runner import Runner
from kvweave.runner.decode.decoding import by_regime
from versions import needs_cuda

pytestmark = needs_cuda


WINDOWS = [(16, 4), (40, 0)]


def runner_for(mapped: bool) -> Runner:
    model = tiny("llama").to("cuda")
    return runner_of(model, classes_of(model, WINDOWS) if mapped else None, max_tokens=16384)


def alone(runner: Runner, seeds: range, restores: bool, limit: int) -> list[list[int]]:
    """What each prompt says when it decodes by itself."""
    said = []
    for seed in seeds:
        with prefilled(runner, seed, restores) as done:
            sequence = decoding(runner, done, limit)
            while not sequence.done:
                runner._decoder.step([sequence])
            runner._decoder.forget()
            said.append(sequence.tokens)
    return said


@pytest.mark.parametrize("mapped", [False, True])
def test_who_joins_and_leaves_says_what_it_says_alone(mapped) -> None:
    runner, seeds = runner_for(mapped), range(12)
    decoder, draws = runner._decoder, np.random.default_rng(0)
    with torch.inference_mode():
        wanted = alone(runner, seeds, mapped, 60)
        done = [prefilled(runner, seed, mapped) for seed in seeds]
        sequences = [decoding(runner, one, 60) for one in done]
        while left := [s for s in sequences if not s.done]:
            batch = [left[i] for i in draws.permutation(len(left))[: draws.integers(1, 10)]]
            assert by_regime(batch) == [batch]
            decoder.step(batch)
    assert [s.tokens for s in sequences] == wanted
    for one in done:
        one.release()
    runner.cache.check()


def test_a_graph_serves_whoever_is_in_the_batch() -> None:
    """Of one size: no step captures another one, or sends the tables of those that stay."""
    runner = runner_for(False)
    decoder = runner._decoder
    with torch.inference_mode():
        done = [prefilled(runner, seed, False) for seed in range(12)]
        waiting = [decoding(runner, one, 200) for one in done]
        batch = [waiting.pop() for _ in range(8)]
        for _ in range(3):
            decoder.step(batch)
        assert decoder.graphs is not None
        before = {key: size.graph for key, size in decoder.graphs._sizes.items()}
        assert [graph is not None for graph in before.values()] == [True]
        for _ in range(30):
            waiting.append(batch.pop(0))
            batch.append(waiting.pop(0))
            staying = {decoder._slots[-1].members.get(s) for s in batch[:-1]}
            decoder.step(batch)
            assert staying == {decoder._slots[-1].members[s] for s in batch[:-1]}
        after = {key: size.graph for key, size in decoder.graphs._sizes.items()}
        assert after == before


def test_thirty_two_unlike_promotions_share_every_step() -> None:
    runner, seeds = runner_for(True), range(32)
    with torch.inference_mode():
        wanted = alone(runner, seeds, True, 12)
        done = [prefilled(runner, seed, True) for seed in seeds]
        batch = [decoding(runner, one, 12) for one in done]
        assert by_regime(batch) == [batch]
        while not batch[0].done:
            runner._decoder.step(batch)
    assert [s.tokens for s in batch] == wanted
