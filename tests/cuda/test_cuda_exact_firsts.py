"""Exact first tokens of packed documents on a GPU: turned there, and back from every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from document_decoding import fresh
from families import random_tokens, tiny
from kvweave.runner import Runner, Segment
from kvweave.runner.tiers.choice import Speeds
from packed_decoding import nothing_is_held, packed_runner
from page_meaning import random_packing
from tiered_runners import FAST, SLOW, Stated, logits_behind
from versions import needs_cuda

pytestmark = needs_cuda

DOC = random_tokens(200, 1).tolist()


def model_on(device: str, head_dim: int) -> Any:
    sizes = {"head_dim": head_dim, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    return tiny("llama", **sizes).to(device, torch.bfloat16)


def runner_of(model: Any, name: str, **settings: Any) -> Runner:
    head_dim = model.config.head_dim
    packing, _ = random_packing(name, 4, head_dim)
    return packed_runner(model, kv_dtype=packing, max_tokens=4096, **settings)


def aside_at(runner: Runner, prompt: list[Segment], at: int) -> torch.Tensor:
    """Keys and values f64 [pages, 2, D] of a token that a prompt has exactly."""
    with runner.prefill(prompt, "naive", remember=False, watched=False) as done:
        block, slot, delta = done.kv.packed.aside[at].tolist()
        assert (block >= 0, delta) == (True, 0)
        pool = runner.packed
        return pool.exact[block : block + pool.block_pages, :, slot].double().cpu()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_they_are_turned_to_where_they_are_read(head_dim: int, name: str) -> None:
    """Against arithmetic in f64 over what was computed at position 0."""
    model = model_on("cuda", head_dim)
    runner = runner_of(model, name)
    assert runner.encode(DOC, "doc").packed.exact_first == 1
    firsts = runner.packed.firsts.of_text(DOC, "", runner.regime(len(DOC)))
    keys, values = firsts[:, :, 0].double().cpu().unbind(1)
    assert keys.any(-1).all()
    found = aside_at(runner, [fresh(70, 1), Segment(tokens=DOC), fresh(30, 2)], 70)
    angle = 70 * model.model.rotary_emb.inv_freq.double().cpu().repeat(2)
    one, other = keys.chunk(2, -1)
    wanted = keys * angle.cos() + torch.cat((-other, one), -1) * angle.sin()
    assert torch.equal(found[:, 1], values)
    torch.testing.assert_close(found[:, 0], wanted, atol=1e-2, rtol=1e-2)
    runner.delete("doc")
    assert nothing_is_held(runner)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("name", ["half-int4", "planes-3"])
def test_they_come_back_to_the_bit(name: str, tier: str, tmp_path: Path) -> None:
    given = {"document_bytes": 1 << 22} if tier == "host" else {"store": tmp_path}
    runner = runner_of(model_on("cuda", 64), name, **given)
    assert runner.tiers is not None
    runner.tiers.measured = Stated(Speeds(host=FAST, disk=FAST, compute=SLOW))
    runner.insert(DOC, "doc")
    runner.flush()
    wanted, found = logits_behind(runner, DOC)
    assert found == ["device"]
    runner.delete("doc")
    runner.packed.cache.forget("")
    runner.packed.firsts.forget("")
    runner.packed.firsts.data.fill_(torch.nan)
    got, found = logits_behind(runner, DOC)
    assert found == [tier]
    assert torch.equal(got, wanted)
    assert nothing_is_held(runner)
