"""A few rows of a prompt read packed pages as they lie: a turn behind packed text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from families import random_tokens, tiny
from head_maps import runner_of
from kvweave import ops
from kvweave.ops import Reach
from kvweave.runner.kv import rows_in_place
from kvweave.runner.kv.rows_in_place import MOST_ON_HOST, attend_in_place
from packed_decoding import PackedDecoding, nothing_is_held, packed_runner
from packed_texts import drawn_bases, read_back, text_of
from page_meaning import random_packing
from paged import rope_table
from ranked_pages import FULL, kinds_map
from versions import REFERENCE

GROUPS, DIM, TOKENS = 2, 32, 150
FORMATS = ("int4", "int8", "half-int4", "planes-3")


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and lse in f64 of queries [R, H, D] over all of k and v [T, G, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = scale * torch.einsum("rhd,thd->rht", q.double(), keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("rht,thd->rhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (3, 4), (MOST_ON_HOST, 3)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_each_row_is_attention_over_what_pages_stand_for(
    generator: torch.Generator, name: Any, rows: int, group: int, softcap: float | None
) -> None:
    of = ops.packed_format(name, DIM)
    bases = None if of.basis_rows is None else drawn_bases(generator, of, GROUPS)
    text = text_of(generator, TOKENS, of=of, version=REFERENCE, bases=bases)
    q = torch.randn(GROUPS * group, rows, DIM, generator=generator).transpose(0, 1)
    positions = np.arange(TOKENS, TOKENS + rows, dtype=np.int32)
    kv = ops.PackedKv(text.packed, 0, GROUPS, 0.2, rope_table(1, DIM), softcap=softcap)
    offsets = np.array([0, len(text.packs)], np.int32)
    got = attend_in_place((q, positions), kv, text.entries(), offsets)
    wanted = dense(q, *read_back(text, REFERENCE), 0.2, softcap)
    for one, other in zip(got, wanted, strict=True):
        assert float((one - other).abs().max()) < 2e-5 * max(1.0, float(other.abs().max()))


def test_heads_whose_table_is_empty_see_nothing(generator: torch.Generator) -> None:
    """Of a reach with two tables the second head reads the second one."""
    of = ops.packed_format("int4", DIM)
    text = text_of(generator, TOKENS, of=of, version=REFERENCE)
    q, positions = torch.randn(4, 6, DIM, generator=generator), np.arange(150, 154, dtype=np.int32)
    reach = Reach(2, np.array([[0, 0, 0, 0], [1, 1, 0, 0]], np.int32))
    kv = ops.PackedKv(text.packed, 0, GROUPS, 0.2, rope_table(1, DIM), reach=reach)
    entries = text.entries()
    offsets = np.array([0, len(entries), len(entries)], np.int32)
    out, lse = attend_in_place((q, positions), kv, entries, offsets)
    wanted, sums = dense(q, *read_back(text, REFERENCE), 0.2, None)
    assert float((out - wanted)[:, :3].abs().max()) < 2e-5
    assert float((lse - sums)[:, :3].abs().max()) < 2e-5
    assert not out[:, 3:].any()
    assert bool((lse[:, 3:] == -torch.inf).all())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", head_dim=64, max_position_embeddings=4096, num_hidden_layers=2)


@pytest.mark.parametrize("name", ["int4", "half-int4"])
def test_a_turn_is_the_definition_and_unpacks_nothing(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers' own decoding over what the pages stand for; in both ways to read."""
    packing, meaning = random_packing(name, 4, 64)
    tokens, more = random_tokens(500, 1), random_tokens(9, 2)
    monkeypatch.setattr(rows_in_place, "MOST_IN_BASIS", MOST_ON_HOST)
    unpack, calls = ops.unpack_pages, []

    def counted(*given: Any, **named: Any) -> None:
        calls.append(named)
        unpack(*given, **named)

    monkeypatch.setattr(ops, "unpack_pages", counted)
    said = {}
    for most in (MOST_ON_HOST, 0):
        monkeypatch.setattr(rows_in_place, "MOST_ON_HOST", most)
        monkeypatch.setattr(rows_in_place, "MOST_IN_BASIS", most)
        runner = packed_runner(model, kv_dtype=packing)
        with runner.prefill(tokens, "full", remember=False, reserve_tokens=16) as done:
            calls.clear()
            said[most] = runner._prefiller.extend(done, more)
        assert bool(calls) == (most == 0)
        assert nothing_is_held(runner)
    doubles = [PackedDecoding(model, 16, of) for of in (meaning, None)]
    wanted, exact = ([each.prefill(tokens, 2048), each.prefill(more, 9)][1] for each in doubles)
    effect = float((exact - wanted).abs().max())
    assert effect > 1e-4
    for logits in said.values():
        assert float((logits[-1] - wanted).abs().max()) < 0.05 * effect


def test_windows_go_with_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads with windows read none of it either way."""
    window = {"kind": "window", "sink": 4, "recent": 32}
    heads = kinds_map(runner_of(model).spec, [window, FULL])
    said = []
    for most in (MOST_ON_HOST, 0):
        monkeypatch.setattr(rows_in_place, "MOST_ON_HOST", most)
        runner = packed_runner(model, heads=heads)
        with runner.prefill(random_tokens(500, 1), "full", reserve_tokens=16) as done:
            said.append(runner._prefiller.extend(done, random_tokens(9, 2)))
        assert nothing_is_held(runner)
    assert float((said[0] - said[1]).abs().max()) < 1e-4
