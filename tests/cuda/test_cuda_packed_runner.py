"""A runner with packed pages on a GPU: it says what the CPU says, and shares what it packed."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from families import random_tokens, tiny
from kvweave import Unsupported
from packed_decoding import nothing_is_held, packed_runner, steps_of
from page_meaning import random_packing
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 70
NEAR = {torch.bfloat16: 0.06, torch.float16: 0.02}
"""Largest difference of a logit, as a share of the largest."""


def there(dtype: torch.dtype, head_dim: int, device: str, name: str = "int4") -> Any:
    sizes = {"head_dim": head_dim, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    model = tiny("llama", **sizes)
    pages = 2 * model.config.num_key_value_heads
    packing, _ = random_packing(name, pages, head_dim)
    return packed_runner(model.to(device, dtype), chunk_tokens=200, kv_dtype=packing)


def logits_of(
    runner: Any, tokens: Any, said: list[int] | None, found: int
) -> tuple[list[int], torch.Tensor]:
    """What is said behind a prompt, and the logits of each step; what is `said` if given.

    `found`: tokens of it that are there.
    """
    with runner.prefill(tokens, "prefix", reserve_tokens=STEPS) as done:
        assert done.report.reused_prefix == found
        first = done.logits[-1].float().clone()
        sequence = decoding(runner, done, STEPS + 1)
        if said is not None:
            sequence.tokens[-1] = said[0]
        seen = steps_of(runner, sequence, STEPS, None if said is None else said[1:])
        return list(sequence.tokens), torch.stack([first, *seen]).cpu()


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim"),
    [
        *product(["int4"], list(NEAR), [64, 128]),
        ("int8", torch.bfloat16, 128),
        ("planes-3", torch.bfloat16, 64),
        ("planes-3", torch.float16, 128),
    ],
)
def test_it_says_what_the_cpu_says(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Chunks that read packed pages, steps that fill some, and a prompt behind shared ones."""
    host, device = (there(dtype, head_dim, place, name) for place in ("cpu", "cuda"))
    tokens = random_tokens(500, 3)
    other = np.concatenate((tokens[:330], random_tokens(40, 4)))
    for prompt, found in ((tokens, 0), (other, 320)):
        said, wanted = logits_of(host, prompt, None, found)
        _, got = logits_of(device, prompt, said, found)
        apart = (got - wanted).abs().max() / wanted.abs().max()
        assert float(apart) < NEAR[dtype]
    assert nothing_is_held(device)


@pytest.mark.parametrize("name", ["int4", "int8", "half-int4", "quarter-bf16", "planes-3"])
@pytest.mark.parametrize("rows", [1, 9, 16, 40])
def test_a_turn_reads_pages_as_they_lie(name: str, rows: int) -> None:
    """As on the CPU, which unpacks them; more rows than a few are read from scratch there too."""
    tokens, more = random_tokens(500, 3), random_tokens(rows, 4)
    said = []
    for place in ("cpu", "cuda"):
        runner = there(torch.bfloat16, 128, place, name)
        given = {"remember": False, "reserve_tokens": rows}
        with runner.prefill(tokens, "full", **given) as done:
            said.append(runner._prefiller.extend(done, more).cpu())
        assert nothing_is_held(runner)
    apart = (said[0] - said[1]).abs().max() / said[0].abs().max()
    assert float(apart) < NEAR[torch.bfloat16]


def test_a_batch_is_answered_and_nothing_stays_held() -> None:
    runner = there(torch.bfloat16, 64, "cuda")
    prompts = [random_tokens(count, count) for count in (1, 63, 150, 400, 777)]
    answers = runner.generate_batch(prompts, max_new_tokens=90, stop=[])
    assert [len(answer.tokens) for answer in answers] == [90] * 5
    assert [len(list(runner.stream(p, max_new_tokens=70, stop=[]))) for p in prompts] == [70] * 5
    assert nothing_is_held(runner)


def test_steps_are_captured_and_say_what_they_say_launched_one_by_one() -> None:
    """Pages fill, requests join and leave: the graphs of a size stay."""
    prompts = [random_tokens(count, count) for count in (30, 150, 400, 777, 1200)]
    answers, graphs = [], []
    for captured in (True, False):
        runner = there(torch.bfloat16, 128, "cuda")
        if not captured:
            runner._decoder.graphs = None
        engine = runner.engine()
        said = [engine.submit(prompt, max_new_tokens=80, stop=()) for prompt in prompts[:3]]
        for _ in range(60):
            engine.step()
        said += [engine.submit(prompt, max_new_tokens=80, stop=()) for prompt in prompts[3:]]
        engine.run()
        answers.append([one.result().tokens for one in said])
        engine.close()
        graphs.append(runner._decoder.graphs)
        assert nothing_is_held(runner)
    same = sum(a == b for a, b in zip(*map(np.ravel, answers), strict=True))
    # Near-ties turn where a batch has other rows beside it; the first tokens do not.
    assert same / 400 > 0.5
    assert [one[:4] for one in answers[0]] == [one[:4] for one in answers[1]]
    assert graphs[0] is not None
    assert graphs[0].capturable
    assert any(size.graph is not None and size.packed for size in graphs[0]._sizes.values())


def test_what_the_kernels_do_not_read_is_refused() -> None:
    with pytest.raises(Unsupported, match="expected bf16 or f16 beside 'int4'"):
        packed_runner(tiny("llama", head_dim=64).cuda())
    with pytest.raises(Unsupported, match="expected a head dim of 64 or 128 beside 'int4'"):
        packed_runner(tiny("llama", head_dim=32).to("cuda", torch.bfloat16))
