"""On a GPU what freed blocks held is zeroed in the order of its stream, and so is the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from host_memory import host_runner, nothing_is_held, spills
from kvweave import Runner
from kvweave.runner.tiers.zeroing import zero_host, zero_pages
from ranked_pages import FULL, top_k
from tiered_runners import answer, evict, sources, tiered
from versions import needs_cuda

pytestmark = needs_cuda

SECRET = random_tokens(150, 5).tolist()
HOW: dict[str, Any] = {"max_new_tokens": 24, "stop": (), "remember": False}


@pytest.mark.parametrize("runs", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_runs_of_pages_are_zeroed_and_no_others(dtype: torch.dtype, runs: int) -> None:
    pages = torch.ones(3 * runs + 2, 2, 16, 64, device="cuda").to(dtype)
    first = 1 + 3 * np.arange(runs)
    zero_pages(pages, np.stack([first, np.full(runs, 2)], 1).astype(np.int32))
    wanted = torch.ones(len(pages), dtype=torch.bool)
    wanted[first] = wanted[first + 1] = False
    assert (pages.float().flatten(1).cpu() == wanted[:, None]).all()


def test_the_hosts_memory_is_zeroed_by_the_device_that_reads_it() -> None:
    runner = tiered(tiny("llama").cuda(), document_bytes=1 << 20)
    assert runner.tiers is not None
    assert runner.tiers.host is not None
    host = runner.tiers.host
    assert host.pinned
    host.pages.fill_(1)
    runs = np.asarray([[3, 1], [7, 20]], np.int32)
    zero_host(host._arena, host.pages, runs, pinned=True)
    torch.cuda.synchronize()
    zeroed = (host.pages == 0).flatten(1).all(1).nonzero().flatten().tolist()
    assert zeroed == [3, *range(7, 27)]
    runner.close()


@pytest.mark.parametrize("zeroes", [False, True])
def test_answers_are_the_same_and_nothing_is_left(zeroes: bool) -> None:
    model = tiny("llama").cuda()
    options: dict[str, Any] = {"max_tokens": 512, "check": False, "progress": False}
    runner = Runner(model, zero_on_free=zeroes, **options)
    expected = Runner(model, **options).generate(SECRET, "full", **HOW).tokens
    for _ in range(3):
        assert runner.generate(SECRET, "full", **HOW).tokens == expected
    torch.cuda.synchronize()
    assert bool(runner._prefiller.pages.any()) is not zeroes
    # Many at a time, in blocks that others gave back.
    texts = [random_tokens(50 + 9 * i, i).tolist() for i in range(8)]
    plain = Runner(model, **options)
    for text in texts:
        wanted = plain.generate(text, "full", namespace="a", max_new_tokens=8, stop=())
        said = runner.generate(text, "full", namespace="a", max_new_tokens=8, stop=())
        assert said.tokens == wanted.tokens
    runner.forget("a")
    torch.cuda.synchronize()
    assert bool(runner._prefiller.pages.any()) is not zeroes


@pytest.mark.parametrize("zeroes", [False, True])
def test_documents_in_pinned_memory_leave_nothing(zeroes: bool) -> None:
    runner = tiered(tiny("llama").cuda(), document_bytes=1 << 20, zero_on_free=zeroes)
    assert runner.tiers is not None
    assert runner.tiers.host is not None
    runner.insert(SECRET, "secret", "a")
    runner.cache.delete("secret", "a")
    evict(runner)
    assert sources(answer(runner, SECRET, of="a")) == ["host"]
    runner.forget("a")
    torch.cuda.synchronize()
    assert bool(runner.tiers.host.pages.any()) is not zeroes
    runner.close()


@pytest.mark.parametrize(("copies", "dtype"), [("spill", None), ("mirror", None), ("spill", "fp8")])
def test_spilled_pages_leave_nothing(copies: str, dtype: str | None) -> None:
    said = []
    for zeroes in (False, True):
        kinds = [top_k(4, 5), FULL]
        model = tiny("llama").cuda()
        over = {"host_copies": copies, "host_dtype": dtype, "zero_on_free": zeroes}
        runner = host_runner(model, kinds, **over)
        said.append(runner.generate(SECRET, "full", **{**HOW, "max_new_tokens": 60}).tokens)
        assert spills(runner) > 0
        assert nothing_is_held(runner)
        torch.cuda.synchronize()
        arenas = runner._prefiller.pages, *(pool.pages for pool in runner.host.values())
        assert all(bool(pages.view(torch.uint8).any()) is not zeroes for pages in arenas)
    assert said[0] == said[1]
