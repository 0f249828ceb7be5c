"""Requests on their way, for tests of the steps that several of them share."""

from __future__ import annotations

import numpy as np
import torch

from families import random_tokens
from kvweave.runner import Runner, Sampling
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.prefill.prefilled import Prefill
from plan_policies import Restoring


def decoding(runner: Runner, done: Prefill, limit: int) -> Decoding:
    """A prefilled prompt, its first token chosen."""
    device = runner.spec.device
    parts = {"packed": done.kv.packed, "host": done.kv.host}
    sequence = Decoding(done.request, done.positions, Sampling(), limit, device, **parts)
    sequence.choose(done.logits[-1])
    return sequence


def prefilled(runner: Runner, seed: int, restores: bool) -> Prefill:
    """A prompt; some of its window heads are full for it, which ones the seed says."""
    draws = np.random.default_rng(seed)
    tokens = random_tokens(int(draws.integers(1, 70)), seed)
    if not restores:
        return runner.prefill(tokens, "full", remember=False)
    local = runner._prefiller.heads.classes[..., 0] > 0
    chosen = local & (draws.random(local.shape) < 0.4)
    policy = Restoring(lambda layer, _: tuple(np.flatnonzero(chosen[layer])))
    return runner.prefill(tokens, policy, remember=False)


def said_in_turns(runner: Runner) -> list[list[int]]:
    """The answers of requests that join one after the other, in batches of some of them."""
    draws = np.random.default_rng(1)
    prompts = [random_tokens(int(draws.integers(10, 300)), seed) for seed in range(12)]
    done = [runner.prefill(p, "full", remember=False, reserve_tokens=60) for p in prompts]
    sequences = [decoding(runner, one, 60) for one in done]
    with torch.inference_mode():
        for turn in range(70):
            batch = [s for s in sequences[: 1 + turn] if not s.done and draws.random() < 0.9]
            if batch:
                runner._decoder.step([batch[i] for i in draws.permutation(len(batch))])
    runner._decoder.forget()
    for one in done:
        one.release()
    return [sequence.tokens for sequence in sequences]
