"""What packed pages cost in quality: ways, the front, the chart, and one run on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.quality import (
    packed_arithmetic,
    packed_chart,
    packed_front,
    packed_reader,
    packed_ways,
)
from benchmarks.quality.packed_bases import Moments, in_planes
from families import tiny
from kvweave import models, ops
from kvweave.adapters.transformers.cache_argument import cache_argument


def record_of(kl: dict[str, list[float]], sizes: dict[str, float]) -> dict:
    names = ["pages", "with basis, 832 tokens", "with basis, 64K tokens"]
    return {
        "model": "m",
        "length": 9,
        "following": 3,
        "head_dim": 64,
        "corpus": {"measured on": ["texts", "0"]},
        "bytes": {
            name: dict.fromkeys(names, size) | {"blocks": 1.0} for name, size in sizes.items()
        },
        "texts": [
            {name: {"kl": some[i], "agreement": 1.0, "surprise": 0.0} for name, some in kl.items()}
            for i in range(len(next(iter(kl.values()))))
        ],
    }


def test_ways_differ_and_have_formats():
    ways = packed_front.WAYS
    assert (
        len({way.name for way in ways}) == len({replace(way, name="") for way in ways}) == len(ways)
    )
    formats = {way.format(64) for way in ways}
    for name in ("int4", "int8", "quarter-bf16", "half-int4", "planes-3", "planes-2.5"):
        assert ops.packed_format(name, 64) in formats
    for way in ways:
        of = way.format(64)
        assert of is None or way.page_bytes(64) == of.page_bytes / 64


def test_hadamard_is_orthonormal():
    matrix = packed_ways.hadamard(64)
    assert torch.equal(matrix @ matrix.T, torch.eye(64))


def text_of(generator) -> tuple[torch.Tensor, Moments]:
    """Keys and values [2, 6, 128, 64] with large channels, and moments of them and of queries."""
    lines = torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q
    kv = torch.randn(2, 6, 128, 64, generator=generator) * torch.logspace(0, -2, 64) @ lines
    kv[0] += 5 * torch.randn(64, generator=generator)
    q = torch.randn(6, 200, 64, generator=generator) * torch.logspace(-1, 0, 64)
    return kv, Moments.of(kv, q.mT @ q, 200)


PACKED = [way for way in packed_front.WAYS if way.format(64) and way.blocks == 1.0]


@pytest.mark.parametrize("way", PACKED, ids=str)
def test_torch_makes_of_vectors_what_pages_do(generator, way):
    """What a GPU measures is what pages hold: the same codes but where f32 sums decide."""
    kv, own = text_of(generator)
    basis = packed_ways.Bases(own).of_text(way, own)
    by_torch = packed_ways.made_of(kv, way, basis, own)
    by_pages = packed_ways.made_by_pages(kv, way.format(64), basis)
    if way.kind == "codes":
        assert torch.equal(by_torch, by_pages)
    away = (by_torch - by_pages).norm(dim=-1) > 1e-4 * kv.norm(dim=-1)
    assert away.float().mean() < 0.02
    lost = [(made - kv).square().sum((1, 2, 3)) for made in (by_torch, by_pages)]
    torch.testing.assert_close(lost[0], lost[1], rtol=1e-2, atol=0)
    assert (lost[0] < 0.7 * kv.square().sum((1, 2, 3))).all()


@pytest.mark.parametrize("weighted", [True, False])
def test_bases_of_planes_are_those_of_moments(generator, weighted):
    kv, own = text_of(generator)
    of, pages = ops.packed_format("planes-2.5", 64), packed_ways.in_pages(kv)
    moments = ops.Moments(of, 6)
    moments.add(pages, packed_ways.packs_of(pages, 6))
    if weighted:
        # As many vectors as rows, of the same Σ q qᵀ.
        for page, products in enumerate(own.queries):
            rows = torch.zeros(200, 64)
            rows[:64] = torch.linalg.cholesky(products).mT
            moments.add_queries(rows[:, None].contiguous(), first=page, kv_heads=1)
    theirs = torch.from_numpy(moments.basis()).transpose(0, 1)
    ours = in_planes(own, of.token_bytes, weighted=weighted)
    assert torch.equal(ours[:, :, 1], theirs[:, :, 1]), "bits"
    torch.testing.assert_close(ours[:, :, 0], theirs[:, :, 0], rtol=1e-5, atol=1e-5)
    for side in (0, 1):
        # Directions may point either way.
        made = [packed_arithmetic.planes(kv[side], part) for part in (ours[side], theirs[side])]
        away = (made[0] - made[1]).norm(dim=-1) > 1e-3 * kv[side].norm(dim=-1)
        assert away.float().mean() < 0.05


def test_pages_and_back(generator):
    kv = torch.randn(2, 6, 128, 16, generator=generator)
    pages = packed_ways.in_pages(kv)
    assert pages.shape == (1 + 2 * 6, 2, 64, 16)
    assert torch.equal(pages[1 + 6 + 5, 1], kv[1, 5, 64:]), "block 1, page 5"
    assert torch.equal(packed_ways.out_of_pages(pages, 6), kv)
    assert packed_ways.packs_of(pages, 6).tolist() == [[1, 64, 1], [7, 64, 7]]


def test_block_selection_reads_the_blocks_that_score_highest():
    attention = packed_reader.Attention()
    attention.packed = 4
    slots = packed_reader.SINK + 4 * 64 + packed_reader.RECENT
    key = torch.zeros(2, 2, slots + 3, 16)
    key[:, :, packed_reader.SINK + 64 : packed_reader.SINK + 128, 0] = 1.0
    key[:, 1, packed_reader.SINK + 192 : packed_reader.SINK + 256, 0] = 2.0
    query = torch.zeros(2, 4, 3, 16)
    query[..., 0] = 1.0
    read = attention.readable(query, key, torch.tensor([1, 3]))
    assert read.shape == (2, 4, 3, slots + 3)
    packed = read[:, :, 0, packed_reader.SINK : packed_reader.SINK + 256].unflatten(-1, (4, 64))
    one, three = packed.all(-1).tolist()
    assert one == [[False, True, False, False]] * 2 + [[False, False, False, True]] * 2
    assert three == [[True, True, True, False]] * 2 + [[True, True, False, True]] * 2
    assert packed.sum((-1, -2)).tolist() == [[64] * 4, [192] * 4]
    assert read[:, :, :, : packed_reader.SINK].all()
    assert read[0, 0, :, slots:].tolist() == torch.ones(3, 3).tril().bool().tolist()


def test_a_way_by_loss_is_the_smallest_strategy_below_its_bound(generator):
    """Beside the op that chooses so, of the same losses."""
    kv, own = text_of(generator)
    bases = packed_ways.Bases(own)
    formats = ops.top_r_candidates(64)
    for bound in (0.0, 0.05, 0.2, 2.0):
        way = packed_ways.Way("", "by loss", "own, not centred", bound=bound)
        basis = bases.of_text(way, own)
        made, size = packed_ways.made_by_loss(kv, way, basis)
        pages = packed_ways.in_pages(kv)
        packs = packed_ways.packs_of(pages, 6)
        losses = ops.top_r_losses(pages, packs, basis.transpose(0, 1), formats, pages=6)
        chosen = ops.choose_top_r(losses, formats, bound)
        sizes = [of.page_bytes / 64 for of in chosen]
        assert size == pytest.approx(np.mean(sizes), rel=0.02)
        lost = (made - kv).square().sum((2, 3)) / kv.square().sum((2, 3))
        wanted = torch.stack([losses[formats.index(of), at] for at, of in enumerate(chosen)])
        torch.testing.assert_close(lost.double(), wanted.T, rtol=0.1, atol=1e-5)


def test_one_read_is_that_of_several(generator):
    """A batch of reads, each with its own share of blocks, is what each of them is alone."""
    reader = object.__new__(packed_reader.Reader)
    reader.model = tiny("llama", head_dim=64).float().eval()
    reader.taken_as = cache_argument(reader.model.forward)
    reader.layers = reader.model.config.num_hidden_layers
    reader.heads = reader.model.config.num_attention_heads
    reader.device, reader.batch = torch.device("cpu"), 2
    reader.attention = packed_reader.Attention()
    reader.model.set_attn_implementation(packed_reader.Attention.NAME)
    tokens = torch.randint(0, 90, (1, 420), generator=generator)
    kv, _ = reader.read(tokens[:, :400])
    noisy = kv + 0.3 * torch.randn(kv.shape, generator=generator)
    reads = [packed_reader.Read(kv), packed_reader.Read(noisy, 0.34), packed_reader.Read(noisy)]
    together = reader.follow(reads, tokens[:, 400:])
    for read, got in zip(reads, together, strict=True):
        torch.testing.assert_close(reader.follow([read], tokens[:, 400:])[0], got)
    assert not torch.allclose(together[1], together[2])
    logits = reader.model(tokens).logits[0, 400:].double().log_softmax(-1)
    torch.testing.assert_close(together[0], logits, rtol=1e-4, atol=1e-4)


def test_the_front_is_what_nothing_smaller_is_surely_nearer_than(tmp_path: Path):
    rng = np.random.default_rng(0)
    near = rng.uniform(0.01, 0.02, 12)
    kl = {
        "INT4": (0.1 * near).tolist(),
        "far": (10 * near).tolist(),
        "small": near.tolist(),
        "as small": (near + rng.normal(0, 0.003, 12)).tolist(),
    }
    record = record_of(kl, {"INT4": 72.0, "far": 80.0, "small": 52.0, "as small": 52.0})
    ways = {way.name: way for way in packed_chart.found_of(record)}
    others = list(ways.values())
    assert packed_chart.beaten_by(ways["far"], others) != []
    for name in ("INT4", "small", "as small"):
        assert packed_chart.beaten_by(ways[name], others) == []
    lines = packed_chart.table(record)
    assert [line.rpartition("| ")[2].strip(" |") for line in lines[2:]] != []
    assert sum("| yes |" in line for line in lines) == 3
    packed_chart.save_chart(tmp_path / "front.png", record)
    assert (tmp_path / "front.png").stat().st_size > 10_000


def test_a_run_measures_keeps_and_goes_on(tmp_path: Path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    words = np.random.default_rng(1).integers(0, 90, 3000)
    text.write_text(" ".join(str(word) for word in words))

    class Tokenizer:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    kinds = {way.kind: way for way in packed_front.WAYS}
    kinds["codes"] = next(way for way in packed_front.WAYS if way.name == "INT4")
    own = next(way for way in packed_front.WAYS if way.name == "50 % int4, own basis")
    ways = (*kinds.values(), own, replace(kinds["planes"], name="few", blocks=0.5))
    monkeypatch.setattr(packed_front, "WAYS", ways)
    model = tiny("llama", head_dim=64).float().eval()
    monkeypatch.setattr(models, "load", lambda *_, **__: (model, Tokenizer()))
    out, drawn = tmp_path / "found.json", tmp_path / "front.svg"
    given = ["tiny", "--corpus", str(text), "--length", "320", "--following", "5"]
    packed_front.main([*given, "--texts", "1", "--out", str(out), "--calibration", "1"])
    packed_front.main(
        [*given, "--texts", "2", "--out", str(out), "--calibration", "1", "--figure", str(drawn)]
    )
    record = json.loads(out.read_text())
    assert [found["text"] for found in record["texts"]] == [0, 1]
    for found in record["texts"]:
        for way in packed_front.WAYS:
            assert 0 <= found[way.name]["kl"] < 1
    sizes = record["bytes"]
    assert sizes["INT4"]["pages"] == 72
    own = sizes["50 % int4, own basis"]
    assert own["with basis, 64K tokens"] == pytest.approx(52 + 8 * 65 * 64 / 65536)
    assert "| INT4 | 72 | 1 / 3.56 |" in capsys.readouterr().out
    assert drawn.exists()


@pytest.mark.long
def test_answers_over_packed_pages_are_scored(tmp_path: Path, monkeypatch, capsys):
    """Over exact pages a small model finds the number; without most channels it does not."""
    ways = (
        next(way for way in packed_front.WAYS if way.name == "INT8"),
        next(way for way in packed_front.WAYS if way.name == "INT4"),
        packed_ways.Way("nothing left", "top-r", "identity", kept=0.0625, channels=0.0625),
    )
    monkeypatch.setattr(packed_front, "WAYS", ways)
    monkeypatch.setattr(packed_front, "TASKS", ("lookup",))
    out = tmp_path / "found.json"
    given = ["smollm2", "--length", "320", "--following", "4", "--texts", "1", "--samples", "3"]
    packed_front.main([*given, "--calibration", "1", "--out", str(out)])
    found = json.loads(out.read_text())["tasks"]["lookup"]
    assert [one["sample"] for one in found] == [0, 1, 2]
    right = {way: sum(one[way] for one in found) for way in ("exact", "INT8", "nothing left")}
    assert right["exact"] == right["INT8"] > right["nothing left"], right
    assert "| lookup |" in capsys.readouterr().out
