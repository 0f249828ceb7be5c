"""Maps whose stable heads read few pages, and what that does to decode steps."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from families import random_tokens, tiny
from kvweave import models
from kvweave.cache import HeadClassMap
from kvweave.cli import app
from kvweave.errors import InvalidArgument
from kvweave.lab.drawing import draw_heads, head_figure
from kvweave.lab.profile import DecodeMeter, with_ranked_pages
from kvweave.lab.profile.head_profile import head_map
from kvweave.runner import Runner
from ranked_pages import PlainDecoding, kinds_map, top_k

FLAGS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=6, max_size=6)
WINDOW = {"kind": "window", "sink": 4, "recent": 8}


def map_of(flags: Any) -> HeadClassMap:
    """Of (keeps everything, is stable) for 2 × 3 heads."""
    both = np.array(flags, bool).reshape(2, 3, 2)
    return head_map("m", both[..., 0], both[..., 1], 4, 8, evidence={"seed": 3})


@settings(max_examples=30)
@given(FLAGS, st.integers(3, 2**31), st.integers(1, 2**31), st.booleans())
def test_whole_heads_read_pages_by_their_stability(flags, pages, every, too) -> None:
    made = with_ranked_pages(map_of(flags), pages, rerank_every=every, unstable_too=too)
    plain = json.loads(made.to_json())
    for (whole, stable), entry in zip(flags, plain["heads"], strict=True):
        if not whole:
            wanted = WINDOW
        elif stable or too:
            wanted = top_k(pages, every if stable else 1)
        else:
            wanted = {"kind": "full"}
        assert entry["class"] == wanted
        assert entry["stability"] == ("stable" if stable else "unstable")
    assert plain["evidence"] == json.loads(map_of(flags).to_json())["evidence"]
    # Said again, with another budget, it is the map of that budget.
    assert with_ranked_pages(made, 9) == with_ranked_pages(map_of(flags), 9)


@pytest.mark.parametrize(("pages", "every"), [(2, 16), (-1, 16), (8, 0), (8, True), ("8", 16)])
def test_budgets_that_cannot_be_are_refused(pages: Any, every: Any) -> None:
    with pytest.raises(InvalidArgument, match="top-k|rerank-every"):
        with_ranked_pages(map_of([(True, True)] * 6), pages, rerank_every=every)


# ---- what it does to decode steps -----------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def meter_of(model: Any, prompts: list[Any], steps: int) -> DecodeMeter:
    def make(heads: HeadClassMap | None) -> Runner:
        settings = {"max_tokens": 1024, "page_tokens": 4, "progress": False, "check": False}
        return Runner(model, heads=heads, **settings)

    return DecodeMeter(make, prompts, steps)


def test_reading_everything_is_no_effect(model) -> None:
    meter = meter_of(model, [random_tokens(40, 1), random_tokens(60, 2)], 12)
    spec = meter.make_runner(None).spec
    effect = meter.measure(kinds_map(spec, [top_k(100)]))
    assert (effect.tokens, effect.agreement) == (24, 1.0)
    assert effect.kl == pytest.approx(0.0, abs=1e-6)
    assert effect.worst == pytest.approx(0.0, abs=1e-6)


def test_the_effect_is_the_models_own_under_the_definition(model) -> None:
    """The same answer followed by transformers' own decoding, dense and by chosen pages."""
    prompt, kinds, steps = random_tokens(60, 3), [top_k(3, 2)], 10
    meter = meter_of(model, [prompt], steps)
    effect = meter.measure(kinds_map(meter.make_runner(None).spec, kinds))
    said = meter._said[0]
    dense, few = (PlainDecoding(model, some, 4) for some in ([{"kind": "full"}], kinds))
    kl, agree = [], []
    for fed in [prompt.tolist()] + [[token] for token in said[:-1]]:
        whole, ranked = (plain.feed(fed).log_softmax(-1) for plain in (dense, few))
        kl.append(float((whole.exp() * (whole - ranked)).sum()))
        agree.append(float(whole.argmax() == ranked.argmax()))
    assert len(said) == steps + 1
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert effect.tokens == steps
    assert effect.kl_by_answer == (pytest.approx(effect.kl),)
    assert effect.kl == pytest.approx(np.mean(kl[1:]), rel=1e-3, abs=1e-6)
    assert effect.worst == pytest.approx(max(kl[1:]), rel=1e-3, abs=1e-6)
    assert effect.agreement == np.mean(agree[1:])
    assert effect.kl > 1e-4


def test_nothing_to_decode_is_refused(model) -> None:
    with pytest.raises(InvalidArgument, match="prompts: expected at least one"):
        meter_of(model, [], 4)
    with pytest.raises(InvalidArgument, match="steps"):
        meter_of(model, [random_tokens(9, 1)], 0)


# ---- pictures and the command ---------------------------------------------------------------


def test_pictures_say_what_is_read() -> None:
    flags = [(True, True), (True, False), (False, True)] * 2
    ranked = json.loads(with_ranked_pages(map_of(flags), 64).to_json())
    console = Console(width=200)
    with console.capture() as captured:
        console.print(draw_heads(ranked))
    lines = captured.get().splitlines()
    assert lines[0].startswith(
        "4 of 6 KV heads keep everything (67%); 2 of these read 64 pages in a decode step"
    )
    assert "keeps everything" in lines[-1]
    assert "framed: keeps everything" in head_figure(ranked).axes[0].get_xlabel()


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["profile-heads", *map(str, arguments)])


def test_the_command_writes_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it measured; measuring itself is tested elsewhere."""
    measured = map_of([(True, True), (True, False), (False, True)] * 2)
    # Its module has the name of the command, which the package has in its place.
    command = import_module("kvweave.cli.profile_heads")
    monkeypatch.setattr(command, "_measured", lambda *_: measured)
    monkeypatch.setattr(models, "load", lambda *_, **__: (SimpleNamespace(), None))
    cases = ((), 16, False), (("--rerank-every", 4), 4, False), (("--estimate",), 16, True)
    for arguments, every, estimate in cases:
        written = tmp_path / f"{every}-{estimate}.json"
        result = call("smollm2", "--top-k", 32, *arguments, "--out", written)
        assert result.exit_code == 0, result.output
        made = HeadClassMap.from_json(written.read_text())
        assert made == with_ranked_pages(measured, 32, rerank_every=every, estimate=estimate)
        assert "2 of these read 32 pages" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--top-k", 2), "greater than or equal to 3"),
        (("--top-k", 8, "--rerank-every", 0), "greater than or equal to 1"),
        (("--estimate",), "estimate: expected --top-k with it, got none"),
        (("--duo", "x.tsv", "--top-k", 8), "duo: expected no --top-k beside it"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: tuple[object, ...], says: str) -> None:
    result = call("smollm2", *arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())
