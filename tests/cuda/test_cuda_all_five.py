"""The example of content, heads, tokens, channels and place in one request, on a GPU."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from all_five import recomputed_rows
from byte_tokenizer import Bytes
from decode_batches import decoding
from examples import example
from families import tiny
from kvweave.policies import Foresight
from kvweave.runner import Runner
from packed_choosing import expect_packed_choice
from versions import needs_cuda

pytestmark = [needs_cuda, pytest.mark.filterwarnings("ignore::kvweave.UncertifiedPolicy")]

SENTENCES, STEPS = 9, 24
NEAR = 0.06
"""Largest difference of a logit, as a share of the largest."""


def model_on(place: str) -> Any:
    sizes = {"head_dim": 64, "num_hidden_layers": 4, "max_position_embeddings": 8192}
    return tiny("llama", **sizes).to(place, torch.bfloat16)


def test_each_dimension_saves_as_on_the_cpu(capsys: Any) -> None:
    of = example("all_five")
    saved = [
        of.print_saved(model_on(place), Bytes(), SENTENCES, max_tokens=65536)
        for place in ("cpu", "cuda")
    ]
    assert "disk 2" in capsys.readouterr().out
    for one, other in zip(*saved, strict=True):
        assert 0 < one.have < one.instead
        # Bounds lie in other numbers there, and bf16 rounds scores of rows otherwise.
        assert one.what == other.what
        assert other.have / other.instead == pytest.approx(one.have / one.instead, rel=0.15)


def test_it_says_what_the_cpu_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the same bytes of a store: rows that are recomputed are told, choices compared."""
    of, rows = example("all_five"), recomputed_rows(monkeypatch)
    known: dict[str, Any] = {"progress": False, "check": False, "max_tokens": 65536}
    heads = of.classes_in_turn(model_on("cpu"), Bytes())
    of.insert(model_on("cpu"), Bytes(), tmp_path, SENTENCES, heads=heads, **known)
    said, logits = None, []
    for place in ("cpu", "cuda"):
        with closing(of.reader(model_on(place), Bytes(), tmp_path, heads=heads, **known)) as runner:
            said, seen = _answer(runner, of, said)
            logits.append(torch.stack(seen))
        monkeypatch.setattr(Foresight, "choose", lambda *_: rows[-1])
    wanted, got = logits
    assert float((got - wanted).abs().max() / wanted.abs().max()) < NEAR


def _answer(runner: Runner, of: Any, said: list[int] | None) -> tuple[list[int], list[Any]]:
    """What is said of the request, or `said`, and the logits [V] of each step."""
    how: dict[str, Any] = {"remember": False, "watched": False, "reserve_tokens": STEPS}
    with runner.prefill(of.prompt_of(SENTENCES), of.POLICY, **how) as done:
        assert [one.source for one in done.report.documents] == ["disk", "disk"]
        sequence = decoding(runner, done, STEPS + 1)
        if said is not None:
            sequence.tokens[-1] = said[0]
        logits, checked = [done.logits[-1].float().cpu()], 0

        def choose(_batch: Any, rows: torch.Tensor, _greedy: bool) -> Any:
            logits.append(rows[0].float().cpu())
            token = sequence.choose(rows[0])
            if said is not None:
                sequence.tokens[-1] = token = said[len(sequence.tokens) - 1]
            return torch.tensor([token]).numpy()

        with torch.inference_mode():
            for step in range(STEPS):
                runner._decoder.step([sequence], choose=choose, watched=True)
                if step % of.CLASSES[1]["rerank_every"] == 0:
                    queries = runner._decoder.queries
                    assert queries is not None
                    checked += expect_packed_choice(runner, sequence, queries[:, 0])
        assert checked > 0
        runner._decoder.forget(sequence.request)
        return list(sequence.tokens), logits
