"""Metrics of a served runner: their format, their denominators, and who may ask for them."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from commands import call, refused
from families import random_tokens, tiny
from kvweave import InvalidArgument, Runner, Segment
from kvweave.cli.stats import rows_of
from kvweave.runner.engine.metrics import CONTENT_TYPE, Metric, text_of
from kvweave.runner.serve.exposition import Exposition
from tiered_runners import tiered

TEXT = random_tokens(64, 1).tolist()
LINE = re.compile(
    r"# (HELP|TYPE) kvweave_\w+ .+"
    r'|kvweave_\w+(\{(\w+="([^"\\\n]|\\.)*",?)+\})? -?[0-9.]+(e[-+]?\d+)?'
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def counted(text: str) -> dict[tuple[str, str], float]:
    return {(name, labels): value for name, labels, value in rows_of(text)}


def test_who_has_ended_is_counted_so_though_nobody_follows(model: Any) -> None:
    runner = Runner(model, max_tokens=1024, check=False, progress=False)
    engine = runner.engine()
    for more in (5, 7, 9):
        engine.submit(random_tokens(more, more).tolist(), max_new_tokens=more, stop=())
    engine.run()
    told = counted(engine.metrics_text())
    assert told["requests_total", "finished"] == 3
    assert [told["requests", state] for state in ("waiting", "prefilling", "decoding")] == [0] * 3


def test_hits_and_misses_are_shares_of_all_tokens_of_admitted_prompts(model: Any) -> None:
    runner = Runner(model, max_tokens=1024, check=False, progress=False)
    with runner.serve() as server:
        before = counted(server.metrics_text())
        assert (before["prompt_tokens_total", ""], before["hit_ratio", ""]) == (0, 0)
        for more in (5, 7, 9):
            prompt = [*TEXT, *random_tokens(more, more).tolist()]
            server.submit(prompt, max_new_tokens=2, stop=()).result()
        text = server.metrics_text()
        assert all(LINE.fullmatch(line) for line in text.splitlines())
        told = counted(text)
    tokens = told["prompt_tokens_total", ""]
    assert tokens == 3 * 64 + 5 + 7 + 9
    reused = sum(value for (name, _), value in told.items() if name == "reused_tokens_total")
    missed = sum(value for (name, _), value in told.items() if name == "missed_tokens_total")
    assert reused == 2 * 64
    assert reused + missed == tokens
    assert told["hit_ratio", ""] == pytest.approx(reused / tokens)
    assert told["prompts_total", ""] == 3
    assert told["requests", "waiting"] == 0
    states = [told["blocks", f"0, {state}"] for state in ("free", "held", "cached")]
    assert sum(states) == runner.cache.stats()["total"]


def test_tiers_are_counted(model: Any, tmp_path: Path) -> None:
    runner = tiered(model, store=tmp_path / "store")
    runner.insert(TEXT, "a")
    with runner.serve() as server:
        prompt = [Segment(tokens=TEXT), Segment(tokens=[1, 2])]
        server.submit(prompt, "naive", max_new_tokens=1, stop=()).result()
        told = counted(server.metrics_text())
    assert told["documents_total", "device"] == 1
    assert told["reading_bytes", ""] == 0
    runner.close()


def test_it_is_scraped_and_shown(model: Any) -> None:
    runner = Runner(model, max_tokens=1024, check=False, progress=False)
    with runner.serve() as server, server.expose() as exposition:
        with urllib.request.urlopen(exposition.url) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert counted(answer.read().decode())["prompts_total", ""] == 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(exposition.url.replace("/metrics", "/else"))
        result = call("stats", exposition.url)
        assert result.exit_code == 0
        assert "hit ratio" in result.stdout
        port = int(exposition.url.split(":")[2].split("/")[0])
        with pytest.raises(InvalidArgument, match="port: expected one to listen on"):
            server.expose(port)
        with pytest.raises(InvalidArgument, match="port"):
            server.expose(70000)
    exposition.close()
    assert "expected an answer" in refused("stats", exposition.url)


def test_what_is_no_answer_is_refused() -> None:
    with Exposition(lambda: "nothing of ours 3\n") as other:
        assert "expected metrics of kvweave" in refused("stats", other.url)
    assert "expected http://" in refused("stats", "file:///etc/passwd")


def test_labels_of_any_text_stay_on_their_line() -> None:
    hostile = 'a"b\\c\nd'
    text = text_of([Metric("made_total", "counter", "Made.", {(("kind", hostile),): 3.0})])
    assert len(text.splitlines()) == 3
    assert all(LINE.fullmatch(line) for line in text.splitlines())
    assert list(rows_of(text)) == [("made_total", r"a\"b\\c\nd", 3.0)]
    assert [row[0] for row in rows_of('kvweave_x{a="b"} many\nelse\nkvweave_y 1')] == ["y"]
