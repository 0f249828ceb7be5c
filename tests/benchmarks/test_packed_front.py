"""What packed pages cost in quality: ways, the front, the chart, and one run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.quality import packed_chart, packed_front
from families import tiny
from kvweave import models, ops


def record_of(kl: dict[str, list[float]], sizes: dict[str, float]) -> dict:
    names = ["pages", "with basis, 832 tokens", "with basis, 64K tokens"]
    return {
        "model": "m",
        "length": 9,
        "following": 3,
        "head_dim": 64,
        "corpus": {"measured on": ["texts", "0"]},
        "bytes": {name: dict.fromkeys(names, size) for name, size in sizes.items()},
        "texts": [
            {name: {"kl": some[i], "agreement": 1.0} for name, some in kl.items()}
            for i in range(len(next(iter(kl.values()))))
        ],
    }


def test_ways_differ_and_have_formats():
    formats = {(way.format(64), way.basis, way.bits) for way in packed_front.WAYS}
    assert len(formats) == len(packed_front.WAYS) == len({way.name for way in packed_front.WAYS})
    quarter, half = (ops.packed_format(name, 64) for name in ("quarter-bf16", "half-int4"))
    assert {quarter, half, ops.packed_format("int4", 64)} <= {of for of, *_ in formats}


def test_hadamard_is_orthonormal():
    matrix = packed_front.hadamard(64)
    assert torch.equal(matrix @ matrix.T, torch.eye(64))


def test_codes_of_four_bits_are_what_int4_pages_are(generator):
    pages = torch.randn(13, 2, 64, 64, generator=generator)
    pages[:, 0] += 5 * torch.randn(64, generator=generator)
    bench = SimpleNamespace(dim=64, bases=packed_front.Bases(6, 64))
    got = packed_front.Bench.packed(bench, pages, packed_front.Way("INT4"))
    made = packed_front.rounded(pages, 4)
    lost = [(x[1:] - pages[1:]).square().sum((0, 2, 3)) for x in (made, got)]
    torch.testing.assert_close(lost[0], lost[1], rtol=0.05, atol=0)
    of_three = (packed_front.rounded(pages, 3)[1:] - pages[1:]).square().sum((0, 2, 3))
    assert (of_three > 3 * lost[0]).all()


def test_pages_and_back(generator):
    kv = [tuple(torch.randn(2, 2, 128, 16, generator=generator)) for _ in range(3)]
    pages = packed_front.in_pages(kv)
    assert pages.shape == (1 + 2 * 3 * 2, 2, 64, 16)
    assert torch.equal(pages[1 + 6 + 2 * 2 + 1, 1], kv[2][1][1, 64:]), "block 1, layer 2, head 1"
    for one, other in zip(kv, packed_front.out_of_pages(pages, kv), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert packed_front.packs_of(pages, 6).tolist() == [[1, 64, 1], [7, 64, 7]]


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

    model = tiny("llama", head_dim=64).float().eval()
    monkeypatch.setattr(models, "load", lambda *_: (model, Tokenizer()))
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
    assert sizes["50 % int4, calibrated basis"]["pages"] == 52
    own = sizes["50 % int4, own basis"]
    assert own["with basis, 64K tokens"] == pytest.approx(52 + 8 * 65 * 64 / 65536)
    assert "| INT4 | 72 | 1 / 3.56 |" in capsys.readouterr().out
    assert drawn.exists()
