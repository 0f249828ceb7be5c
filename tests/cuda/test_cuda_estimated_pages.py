"""Heads that estimate what they do not read on a GPU: within captured steps, as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from cached_prompts import knowledge
from families import random_tokens, tiny
from host_memory import both, nothing_is_held, spills
from kvweave import ops
from kvweave.runner import Healing, Runner
from ranked_pages import (
    FULL,
    WINDOW,
    checked_choices,
    every_place_came_back,
    logits_of_steps,
    ranked_runner,
    top_k,
)
from versions import needs_cuda

pytestmark = needs_cuda

STEPS = 40


def estimating(pages: int, every: int = 1, **more: Any) -> dict[str, Any]:
    return top_k(pages, every, estimate=True, **more)


MIXED = [estimating(4), FULL, estimating(6, 3), WINDOW, top_k(4)]
KINDS = [
    [estimating(4)],
    [estimating(3, 5)],
    MIXED,
    [estimating(4, 2, score="mean"), top_k(3, score="mean")],
]


def there(kinds: Any, name: str = "llama", dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A runner on the GPU; of half precision by the kernels of tensor cores."""
    if dtype == torch.float32:
        return ranked_runner(tiny(name).cuda(), kinds, **sizes)
    model = tiny(name, head_dim=64).to("cuda", dtype)
    return ranked_runner(model, kinds, **{"page_tokens": 16, **sizes})


def is_captured(runner: Runner) -> bool:
    graphs = runner._decoder.graphs
    return (
        graphs is not None
        and graphs.capturable
        and any(size.graph is not None for size in graphs._sizes.values())
    )


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_it_says_what_the_cpu_says(name, kinds) -> None:
    tokens = random_tokens(90, 3)
    wanted, logits = logits_of_steps(ranked_runner(tiny(name), kinds), tokens, STEPS)
    device = there(kinds, name)
    said, others = logits_of_steps(device, tokens, STEPS)
    assert said == wanted
    for one, other in zip(others, logits, strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), other, atol=2e-4, rtol=0)
    assert is_captured(device)
    assert every_place_came_back(device)


def test_an_estimate_is_another_answer() -> None:
    """What is compared above is no masked decoding."""
    tokens = random_tokens(90, 3)
    kinds = [top_k(3)], [estimating(3)]
    few, estimated = (logits_of_steps(there(some), tokens, 1)[1][1] for some in kinds)
    assert float((few - estimated).abs().max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", [[estimating(500)], [estimating(500, 16), WINDOW]])
def test_as_many_pages_as_there_are_change_no_bit(kinds, dtype) -> None:
    full = [FULL if kind["kind"] == "top_k" else kind for kind in kinds]
    tokens = random_tokens(150, 4)
    answers = [logits_of_steps(there(some, dtype=dtype), tokens, STEPS) for some in (kinds, full)]
    assert answers[0][0] == answers[1][0]
    for one, other in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_of_what_lies_in_the_pages(dtype) -> None:
    runner = there([estimating(6), FULL, estimating(3)], dtype=dtype, max_tokens=8192)
    prompts = [random_tokens(n, n) for n in (7, 130, 65, 300)]
    with checked_choices(runner) as counted:
        made = runner.generate_batch(prompts, "full", max_new_tokens=24, stop=(), remember=False)
    assert [len(one.tokens) for one in made] == [24] * 4
    assert max(counted) >= 4
    assert is_captured(runner)
    assert every_place_came_back(runner)


@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_means_are_of_what_lies_in_reused_pages_and_was_healed(mode) -> None:
    runner = there([estimating(5), FULL], page_tokens=8, mode=mode)
    parts = knowledge(runner, 3)
    healing = Healing(every=3, bound=0.0, share=0.2, most=1.0)
    with checked_choices(runner) as counted:
        runner.generate(parts, "naive", max_new_tokens=14, stop=(), remember=False, healing=healing)
        runner.generate_batch([parts] * 2, "naive", max_new_tokens=6, stop=(), remember=False)
    assert min(counted) == 4


def test_over_host_memory_it_says_what_all_pages_on_the_device_say() -> None:
    resident, host = both(tiny("llama").cuda(), [estimating(4, 5), FULL])
    tokens = random_tokens(90, 3)
    (said, logits), (also, others) = (logits_of_steps(r, tokens, STEPS) for r in (resident, host))
    assert said == also
    assert all(torch.equal(one, other) for one, other in zip(logits, others, strict=True))
    assert spills(host) > 0
    assert nothing_is_held(host)


def test_drafts_by_estimates_are_verified_by_all_pages() -> None:
    tokens, ask = random_tokens(90, 3), {"max_new_tokens": 24, "stop": (), "remember": False}
    wanted = there([FULL]).generate(tokens, "full", **ask).tokens
    made = there([estimating(4, 3)], speculate=3).generate(tokens, "full", **ask)
    assert made.tokens == wanted
    assert made.report.speculation.drafted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(8, 4, 128), (2, 7, 64), (3, 1, 256), (1, 9, 96)]
)
def test_rows_of_many_splits_are_the_cpus(heads, group, dim, dtype) -> None:
    """Tables of up to several windows of a thread block, of every head dim and group."""
    generator = torch.Generator().manual_seed(dim)
    lengths = torch.tensor([9000, 0, 127, 4096, 3])
    count, total = len(lengths), int(lengths.sum())
    place = torch.cat([torch.arange(n) for n in lengths.tolist()])
    rows = torch.randperm(total, generator=generator) * heads
    delta = torch.where(torch.rand(total, generator=generator) < 0.01, 5, 0)
    entries = torch.stack((rows, 0 * rows, 0 * rows + 16, 16 * place, delta), 1).int()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    chosen = torch.rand(total, generator=generator) < 0.02
    ends = torch.stack([chosen[: int(end)].sum() for end in offsets]).int()
    means = torch.randn(total * heads, 2, dim, generator=generator).to(dtype)
    q = torch.randn(count, heads * group, dim, generator=generator).to(dtype)
    out = torch.randn(q.shape, generator=generator).to(dtype)
    lse = torch.randn(q.shape[:2], generator=generator) + 5
    rope = ops.RopeTable(torch.logspace(0, -2, dim // 2).view(1, -1).numpy())

    def call(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        to = {"device": device}
        kept = means.to(device) if device == "cuda" else means.float()
        pages = ops.PageMeans(kept, 16, 0, heads, dim**-0.5, rope, None)
        read = ops.ReadEntries(entries[chosen].to(**to), ends.to(**to))
        given = q.to(**to), (out.to(**to), lse.to(**to)), entries.to(**to), pages
        return ops.estimate_pages(*given, entry_offsets=offsets.to(**to), read=read)

    (wanted, sums), (got, found) = call("cpu"), call("cuda")
    slack = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.cpu(), wanted, atol=slack, rtol=slack)
    torch.testing.assert_close(found.cpu(), sums, atol=5e-5, rtol=2e-5)
    again, also = call("cuda")
    assert torch.equal(again, got)
    assert torch.equal(also, found)


def test_a_head_dim_that_is_not_estimated_is_refused() -> None:
    q = torch.zeros(1, 1, 264, device="cuda")
    pages = ops.PageMeans(
        torch.zeros(1, 2, 264, device="cuda"),
        16,
        0,
        1,
        1.0,
        ops.RopeTable(np.ones((1, 1), np.float32)),
    )
    tables = torch.zeros(0, 5, dtype=torch.int32, device="cuda")
    ends = torch.zeros(2, dtype=torch.int32, device="cuda")
    with pytest.raises(kvweave.Unsupported, match="head_dim: expected a multiple of 8 up to 256"):
        ops.estimate_pages(
            q,
            (q, torch.zeros(1, 1, device="cuda")),
            tables,
            pages,
            entry_offsets=ends,
            read=ops.ReadEntries(tables, ends),
        )
