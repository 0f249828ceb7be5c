"""Plans, head maps, reports and answers as HTML: whole, escaped, without scripts."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from head_maps import class_map
from kvweave.cache import HeadClassMap, KvCache, KvShape, ReusePlan
from kvweave.drawn import heads_html, plan_html
from kvweave.drawn.markup import tag
from kvweave.drawn.spans import COLOURS, KINDS
from kvweave.runner import progress
from kvweave.runner.report import Generation, PassReport, Report

NASTY = "<script>alert('1')</script> & \"x\" <b onload=y>"


def parsed(html: str) -> ElementTree.Element:
    """The HTML as a tree: every tag is closed, every sign escaped."""
    tree = ElementTree.fromstring(html)
    for element in tree.iter():
        assert element.tag not in ("script", "iframe", "link", "object", "img")
        assert not any(name.startswith("on") for name in element.attrib)
        assert "url(" not in element.get("style", "")
    return tree


def text_of(tree: ElementTree.Element) -> str:
    return " ".join(" ".join(tree.itertext()).split())


@pytest.fixture
def plan() -> ReusePlan:
    """A prompt with a part of every outcome; its document has a name that looks like markup."""
    cache = KvCache(KvShape(1, 1, 8), blocks=64)
    first = cache.admit(np.arange(100, dtype=np.int32))
    first.commit(100, 100)
    first.freeze(NASTY, 16, 96)
    fresh = np.arange(500, 520, dtype=np.int32)
    tokens = np.concatenate((np.arange(16), fresh, np.arange(16, 96), fresh)).astype(np.int32)
    marks = [(36, 116, ""), (118, 121, "")]
    return cache.admit(tokens, segments=marks).plan


def report_of(plan: ReusePlan, **changes: Any) -> Report:
    named = {
        "policy": NASTY,
        "plan": plan,
        "tokens": plan.tokens,
        "reused_prefix": plan.reused_prefix,
        "reused_segment": plan.reused_segment,
        "recomputed": plan.recomputed,
        "mode": "share",
        "mode_reason": NASTY,
        "rows_per_layer": [40, 40, 20],
        "kv_bytes": 3 << 20,
        "flops": {"attention": 1000, "logits": 24},
    }
    return Report(**{**named, **changes})


def test_a_plan_shows_every_span_and_why(plan: ReusePlan) -> None:
    tree = parsed(plan_html(plan))
    text = text_of(tree)
    assert f"{plan.tokens} tokens: 16 reused by prefix" in text
    assert NASTY.split()[0] in text
    boxes = tree.findall(".//rect")
    assert len(boxes) == len(plan.spans)
    assert {box.get("fill") for box in boxes} <= set(COLOURS.values())
    assert sum(float(str(box.get("width"))) for box in boxes) == pytest.approx(1000, abs=0.1)
    for span in plan.spans:
        assert f"{span.start}–{span.end}" in text
        if span.explanation:
            assert span.explanation in text
    assert all(f"{words} (" in text for kind, words in KINDS.items() if kind != "miss")


def test_a_plan_of_many_spans_is_cut_and_says_so() -> None:
    spans = [
        {"start": n, "end": n + 1, "kind": "recompute", "reason": "fresh"} for n in range(3000)
    ]
    explained = [SimpleNamespace(explanation=None)] * 3000
    many: Any = SimpleNamespace(to_dict=lambda: {"tokens": 3000, "spans": spans}, spans=explained)
    tree = parsed(plan_html(many))
    assert len(tree.findall(".//tbody/tr")) == 40
    assert "and 2,960 more spans" in text_of(tree)


def test_a_head_map_is_a_grid(numbers: np.random.Generator) -> None:
    classes = numbers.choice([0, 64], (7, 3, 2)).astype(np.int32)
    scores = numbers.random((7, 3)).tolist()
    plain = class_map(classes, NASTY)
    measured = class_map(classes, NASTY, evidence={"score": scores})
    for heads in (plain, measured):
        tree = parsed(heads_html(heads))
        boxes = tree.findall(".//rect")
        assert len(boxes) == 21
        for box, at in zip(boxes, np.ndindex(7, 3), strict=True):
            words = text_of(box)
            assert words.startswith(f"layer {at[0]}, head {at[1]}: ")
            window, sink = classes[at]
            kept = f"{sink} first and {window} latest" if window else "everything"
            assert kept in words
        assert f"{int((classes[..., 0] == 0).sum())} of 21 KV heads" in text_of(tree)
    assert f"score {scores[0][0]:.3g}" in text_of(tree)


def test_reports_and_answers_show_the_plan_and_the_cost(plan: ReusePlan) -> None:
    report = report_of(plan)
    tree = parsed(report._repr_html_())
    text = text_of(tree)
    assert NASTY in text
    assert "3.0 MiB" in text
    assert "0–1" in text
    assert f"40 of {plan.tokens}" in text
    passes = [PassReport("layers", [9, 9, 9], {}, 0.5), PassReport("draft", [], {}, 0.1, 8)]
    text = text_of(parsed(report_of(plan, passes=passes)._repr_html_()))
    assert "8 drafted tokens" in text
    assert "500.0 ms" in text
    answer = Generation(f"{NASTY}\n  done", [1, 2], report)
    tree = parsed(answer._repr_html_())
    assert "".join(tree.findall("div")[0].itertext()) == f"{NASTY}\n  done"
    assert "2 tokens" in text_of(parsed(Generation("", [1, 2], report)._repr_html_()))
    assert repr(report).startswith("Report(")


def test_empty_reports_are_shown_too(plan: ReusePlan) -> None:
    bare = report_of(plan, rows_per_layer=[], flops={}, mode_reason="")
    assert "prefill 0.0 ms" in text_of(parsed(bare._repr_html_()))


@given(
    st.text(st.characters(exclude_categories=("Cs", "Cc"))),
    st.text(st.characters(exclude_categories=("Cs", "Cc"))),
)
def test_any_text_is_text(content: str, attribute: str) -> None:
    tree = ElementTree.fromstring(tag("p", content, tag("b", content), title=attribute))
    assert tree.text == (content or None)
    assert tree.findtext("b") == content
    assert tree.get("title") == attribute


def test_native_classes_show_themselves(plan: ReusePlan) -> None:
    heads = HeadClassMap.full(KvShape(2, 2, 8), "m")
    assert plan._repr_html_() == plan_html(plan)
    assert heads._repr_html_() == heads_html(heads)
    assert parsed(heads._repr_html_()) is not None


def test_progress_is_a_bar_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not progress.in_notebook()
    assert progress.track([1, 2], "work", True) == [1, 2]
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress.in_notebook()
    assert progress.track([1, 2], "work", False) == [1, 2]
    assert list(progress.track([1, 2, 3], "work", True)) == [1, 2, 3]
    assert "work" in capsys.readouterr().err
