"""Plans and evaluations as pictures: what they say, what they refuse, and no global state."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvweave.errors import InvalidArgument
from kvweave.lab.drawing import (
    draw_plan,
    plan_figure,
    quality_figure,
    read_plan,
    save_plan,
    save_quality,
)


def span(start: int, end: int, kind: str, **rest: object) -> dict[str, object]:
    return {"start": start, "end": end, "kind": kind, **rest}


PLAN = {
    "tokens": 400,
    "spans": [
        span(0, 48, "prefix", reason=None, delta=None, source=None),
        span(48, 90, "recompute", reason="fresh"),
        span(90, 96, "recompute", reason="misaligned-start"),
        span(96, 320, "segment", delta=-130, source="handbook"),
        span(320, 399, "recompute", reason="not-cached"),
        span(399, 400, "recompute", reason="last-token"),
    ],
}
ROWS = [352, 352, 120, 120]


def printed(plan: dict[str, object], rows: list[int] | None = None, width: int = 60) -> str:
    console = Console(width=140, color_system=None)
    with console.capture() as captured:
        console.print(draw_plan(plan, rows, width=width))
    return captured.get()


def test_the_terminal_tells_outcomes_shifts_and_reasons() -> None:
    text = printed(PLAN, ROWS)
    assert "400 tokens: 48 reused by prefix, 224 by segment, 128 recomputed (68% reused)" in text
    spans = [
        {"start": 0, "end": 999, "kind": "prefix"},
        {"start": 999, "end": 1000, "kind": "recompute", "reason": "last-token"},
    ]
    assert "1 recomputed (99% reused)" in printed({"tokens": 1000, "spans": spans})
    assert "−130" in text
    assert "handbook" in text
    for reason in ("fresh", "misaligned-start", "not-cached", "last-token"):
        assert reason in text
    assert "layers 0–1: 352 of 400 tokens (88%)" in text
    assert "layers 2–3: 120 of 400 tokens (30%)" in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_long_texts_leave_the_other_columns_their_room(width: int) -> None:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(draw_plan(PLAN, previews=["many words " * 30] * 6, width=width))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if "source or reason" in line)
    assert all(head in heads for head in ("tokens", "count", "outcome", "Δ", "text"))
    (row,) = [line for line in lines if "misaligned-start" in line]
    assert "90–96" in row
    assert "recompute" in row
    assert "many words" in row


def test_every_outcome_is_seen_in_the_bar_without_colour() -> None:
    bar = printed(PLAN).splitlines()[1]
    assert len(bar.rstrip()) == 60
    # One glyph a kind: prefix, fresh, a miss, segment; six tokens of a miss fill under a cell.
    assert set(bar.rstrip()) == {"▓", "░", "▒", "█"}


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_short_prompt_gets_a_short_bar(tokens: int) -> None:
    plan = {"tokens": tokens, "spans": [span(0, tokens, "recompute", reason="last-token")]}
    assert printed(plan).splitlines()[1].rstrip() == "░" * tokens


def test_figures_say_the_same_and_keep_no_global_state(tmp_path: Path) -> None:
    figure = plan_figure(PLAN, ROWS, title="A plan")
    words = [text.get_text().strip() for axes in figure.axes for text in axes.texts]
    assert "handbook\nΔ −130" in words
    assert "misaligned-start (6)" in words
    assert "not-cached (79)" in words
    assert "352 rows (88%)" in words
    for name in ("plan.png", "plan.svg", "deeper/plan.pdf"):
        save_plan(tmp_path / name, PLAN, ROWS)
        assert (tmp_path / name).stat().st_size > 2000
    code = (
        "import sys; from pathlib import Path; from kvweave.lab.drawing import save_plan; "
        f"save_plan(Path({str(tmp_path / 'x.png')!r}), {PLAN!r}); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reason_labels_never_overlap() -> None:
    spans = []
    for index in range(60):
        spans.append(span(20 * index, 20 * index + 4, "recompute", reason="misaligned-start"))
        spans.append(span(20 * index + 4, 20 * index + 20, "segment", delta=index, source="a"))
    figure = plan_figure({"tokens": 1200, "spans": spans})
    figure.canvas.draw()
    labels = [t for t in figure.axes[0].texts if t.get_text().strip().startswith("misaligned")]
    boxes = [label.get_window_extent() for label in labels]
    assert len(boxes) > 10
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert not (one.overlaps(other) and min(one.x1, other.x1) - max(one.x0, other.x0) > 3)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"tokens": 9, "spans": [span(0, 8, "prefix")]}, "spans up to 9 tokens, got 8"),
        ({"tokens": 9, "spans": [span(1, 9, "prefix")]}, "a span from token 0 on"),
        ({"tokens": 0, "spans": []}, "got 0"),
        ({"tokens": 9, "spans": [span(0, 9, "guessed")]}, "got 'guessed'"),
    ],
)
def test_a_plan_that_covers_not_its_tokens_is_refused(plan: dict, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        read_plan(plan)


def test_more_rows_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="rows of layer 1"):
        draw_plan(PLAN, [400, 401])


def policy(name: str, role: str, kl: float, closed: float | None) -> dict[str, object]:
    return {
        "policy": name,
        "role": role,
        "samples": 4,
        "kl": {"value": kl, "low": kl / 2, "high": kl * 2},
        "gap_closed": {"value": closed, "low": None, "high": None},
        "ttft_ratio": 0.3,
        "row_share": 0.4,
    }


def test_the_quality_figure_shows_floor_control_and_policies(tmp_path: Path) -> None:
    policies = [
        policy("full", "full", 0.0, None),
        policy("chunked", "floor", 0.0, None),
        policy("naive-no-rope", "control", 0.3, None),
        policy("naive", "policy", 0.05, 0.0),
        policy("sparsex", "policy", 0.01, 0.8),
    ]
    found = {"task": "lm", "length": 1024, "seed": 0, "policies": policies}
    figure = quality_figure(found)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["chunked", "naive-no-rope", "naive", "sparsex"]
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "0.0100  (gap closed 80%)" in words
    save_quality(tmp_path / "q.svg", found)
    assert (tmp_path / "q.svg").read_text().startswith("<?xml")
    with pytest.raises(InvalidArgument, match=r"\.png, \.svg, \.pdf"):
        save_quality(tmp_path / "q.bmp", found)
    with pytest.raises(InvalidArgument, match="at least one policy"):
        quality_figure({**found, "policies": policies[:1]})
