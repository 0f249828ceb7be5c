"""Head maps around a profile: shares, bounds, DuoAttention's patterns, pictures, commands."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from families import tiny
from kvweave.cache import HeadClassMap
from kvweave.cli import app
from kvweave.errors import CorruptHeadMap, InvalidArgument
from kvweave.lab.drawing import draw_heads, head_figure, save_heads
from kvweave.lab.profile import DuoPattern, Effect, HeadProfile, LengthScores, smallest_share
from kvweave.lab.profile.scores import agreement, rank_correlation, top
from kvweave.runner.model.model_spec import describe

# ---- shares and bounds -----------------------------------------------------------------------


def scores_of(length: int, **given: Any) -> LengthScores:
    zeros = np.zeros((2, 4))
    names = ("edge", "retrieval", "key_shift", "value_shift", "overlap")
    return LengthScores(length, **{name: np.asarray(given.get(name, zeros)) for name in names})


def test_heads_are_stable_only_where_every_length_says_so() -> None:
    rising = np.arange(8.0).reshape(2, 4)
    profile = HeadProfile(
        "m", 1, 2, (scores_of(10, overlap=rising), scores_of(20, overlap=rising[::-1]))
    )
    unstable = {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {tuple(at) for at in np.argwhere(~profile.stable()).tolist()} == unstable


def test_agreement_and_correlation_by_hand() -> None:
    one = np.array([[3.0, 1.0], [2.0, 4.0]])
    assert rank_correlation(one, 10 * one) == pytest.approx(1.0)
    assert rank_correlation(one, -one) == pytest.approx(-1.0)
    # Ranks 2, 0, 1, 3 against 1.5, 1.5, 0, 3: covariance 1.125 over √1.25 · √1.125.
    tied = np.array([[5.0, 5.0], [0.0, 9.0]])
    assert rank_correlation(one, tied) == pytest.approx(0.63246, abs=1e-5)
    assert np.isnan(rank_correlation(one, np.zeros((2, 2))))
    classes = [np.array([True, False, True, False]), np.array([True, True, True, False])]
    assert agreement(classes) == 0.75
    assert top(tied, 2).tolist() == [[True, False], [False, True]]


def test_every_share_gives_a_valid_map() -> None:
    profile = HeadProfile("m", 1, 2, (scores_of(10, retrieval=np.arange(8.0).reshape(2, 4)),))
    for share in (0.0, 0.3, 0.5, 1.0):
        plain = json.loads(profile.map(share=share).to_json())
        kept = [entry for entry in plain["heads"] if entry["reach"] == "global"]
        assert len(kept) == round(8 * share)
        assert all(entry["head"] + 4 * entry["layer"] >= 8 - len(kept) for entry in kept)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(InvalidArgument, match="share: expected 0..1"):
            profile.map(share=share)
    for wrong in ({}, {"share": 0.5, "count": 2}, {"count": 9}, {"count": -1}):
        with pytest.raises(InvalidArgument, match="expected"):
            profile.map(**wrong)
    with pytest.raises(InvalidArgument, match="recent >= 1, got 1 and 0"):
        profile.map(share=0.5, recent=0)


def meter_of(kl: list[float], answers: float | None = None) -> Any:
    """A meter whose KL depends on the number of global heads alone.

    With `answers` the KL is that of hidden numbers, and text has so much of it.
    """
    asked: list[int] = []

    def measure(heads: HeadClassMap) -> Effect:
        entries = json.loads(heads.to_json())["heads"]
        asked.append(sum(entry["reach"] == "global" for entry in entries))
        worst = kl[asked[-1]]
        return Effect(worst, None) if answers is None else Effect(answers * worst, worst)

    return SimpleNamespace(texts=(), measure=measure, asked=asked)


@given(
    st.lists(st.floats(0.0, 5.0), min_size=8, max_size=8).map(lambda k: [*sorted(k)[::-1], 0.0]),
    st.floats(1e-3, 6.0),
    st.sampled_from([None, 0.5, 0.0]),
)
def test_bisection_finds_the_smallest_share(
    kl: list[float], bound: float, answers: float | None
) -> None:
    profile = HeadProfile("m", 1, 2, (scores_of(10, retrieval=np.arange(8.0).reshape(2, 4)),))
    meter = meter_of(kl, answers)
    found = smallest_share(profile, meter, bound)
    assert found.count == next(count for count in range(9) if kl[count] <= bound)
    assert found.effect.worst == kl[found.count]
    assert [count for count, _ in found.tried] == sorted(meter.asked)
    assert len(meter.asked) <= 4


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_bounds_must_be_positive(bound: float) -> None:
    profile = HeadProfile("m", 1, 2, (scores_of(10),))
    with pytest.raises(InvalidArgument, match="kl: expected a bound > 0"):
        smallest_share(profile, meter_of([0.0] * 9), bound)


# ---- DuoAttention's patterns -----------------------------------------------------------------

GATES = "0.9\t0.1\n0.5\t0.0\n1.0\t1.0\n2.5e-01\t0.49\n"


def pattern_in(folder: Path, text: str = GATES, config: Any = None) -> tuple[Path, Path]:
    pattern, settings = folder / "full_attention_heads.tsv", folder / "config.json"
    pattern.write_text(text)
    settings.write_text(
        json.dumps({"sink_size": 8, "recent_size": 32} if config is None else config)
    )
    return pattern, settings


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, {(0, 0), (1, 0), (2, 0), (2, 1)}),
        ({"threshold": 0.95}, {(2, 0), (2, 1)}),
        ({"threshold": 0.0}, {(layer, head) for layer in range(4) for head in range(2)}),
        ({"share": 0.125}, {(2, 0)}),
        ({"share": 0.375}, {(2, 0), (2, 1), (0, 0)}),
        ({"share": 0.0}, set()),
    ],
)
def test_a_pattern_becomes_a_map(asked: dict[str, float], kept: set[Any], tmp_path: Path) -> None:
    spec = describe(tiny("llama"))
    made = DuoPattern.read(*pattern_in(tmp_path)).map(spec, **asked)
    plain = json.loads(made.to_json())
    assert plain["model_fingerprint"] == spec.fingerprint
    assert sorted(plain["weights"]) == sorted(each.name for each in spec.weights)
    found = {(e["layer"], e["head"]) for e in plain["heads"] if e["class"] == {"kind": "full"}}
    assert found == kept
    window = {"kind": "window", "sink": 8, "recent": 32}
    assert all(e["class"] == window for e in plain["heads"] if e["reach"] == "local")
    assert {e["stability"] for e in plain["heads"]} == {"unstable"}
    assert plain["evidence"]["imported_from"] == "DuoAttention"
    assert len(plain["evidence"]["pattern_sha256"]) == 64


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected rows of one length, got no rows"),
        ("0.1\t0.2\n0.3\n", "rows of 1 and of 2"),
        ("0.1\tx\n", "expected numbers parted by tabs"),
        ("0.1,0.2\n", "expected numbers parted by tabs"),
        ("0.1\t1.2\n", "expected numbers from 0 to 1, got 1.2"),
        ("nan\t0.2\n", "expected numbers from 0 to 1, got nan"),
        ("-0.1\t0.2\n", "got -0.1"),
        ("\udcff", "expected numbers"),
    ],
)
def test_malformed_patterns_are_refused(text: str, says: str, tmp_path: Path) -> None:
    pattern = tmp_path / "p.tsv"
    pattern.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CorruptHeadMap, match=says):
        DuoPattern.read(pattern)


@pytest.mark.parametrize(
    "config",
    [{}, [], {"sink_size": 1}, {"sink_size": -1, "recent_size": 5}, {"sink_size": 1.5,
     "recent_size": 5}, {"sink_size": True, "recent_size": 5}, {"sink_size": 1, "recent_size": 0}],
)  # fmt: skip
def test_malformed_configs_are_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptHeadMap, match="expected (sink_size|recent_size) to be an integer"):
        DuoPattern.read(*pattern_in(tmp_path, config=config))


def test_patterns_of_another_model_and_wrong_wishes(tmp_path: Path) -> None:
    spec = describe(tiny("llama"))
    with pytest.raises(CorruptHeadMap, match="4 layers x 2 KV heads, got 1 x 2"):
        DuoPattern.read(pattern_in(tmp_path, "0\t1\n")[0]).map(spec, sink=1, recent=2)
    pattern, config = pattern_in(tmp_path)
    with pytest.raises(InvalidArgument, match="expected sink and recent"):
        DuoPattern.read(pattern).map(spec)
    for wrong in ({"share": 0.5, "threshold": 0.5}, {"share": 2.0}, {"threshold": -1.0}):
        with pytest.raises(InvalidArgument, match="expected"):
            DuoPattern.read(pattern, config).map(spec, **wrong)
    config.write_text("{not json")
    with pytest.raises(CorruptHeadMap, match="config.json: expected JSON"):
        DuoPattern.read(pattern, config)


# ---- pictures --------------------------------------------------------------------------------


def example_map() -> dict[str, Any]:
    rising, zeros = np.arange(8.0).reshape(2, 4) / 8, np.zeros((2, 4))
    scores = [LengthScores(length, zeros, rising, zeros, zeros, zeros) for length in (10, 20)]
    profile = HeadProfile("m", 4, 64, tuple(scores))
    plain: dict[str, Any] = json.loads(profile.map(count=3).to_json())
    return plain


def test_figure_frames_what_reads_everything(tmp_path: Path) -> None:
    from matplotlib.patches import Rectangle

    figure = head_figure(example_map())
    strips = [axes for axes in figure.axes if axes.images]
    assert len(strips) == 6
    for axes in strips:
        frames = [p for p in axes.patches if isinstance(p, Rectangle)]
        places = {(frame.get_x() + 0.5, frame.get_y() + 0.5) for frame in frames}
        assert places == {(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)}
    save_heads(tmp_path / "heads.svg", example_map())
    assert (tmp_path / "heads.svg").stat().st_size > 2000
    with pytest.raises(InvalidArgument, match=".png, .svg, .pdf"):
        save_heads(tmp_path / "heads.gif", example_map())


def test_the_terminal_shows_classes_and_scores() -> None:
    console = Console(width=140, color_system="standard", force_terminal=True)
    with console.capture() as captured:
        console.print(draw_heads(example_map()))
    lines = captured.get().splitlines()
    assert "3 of 8 KV heads read everything (38%)" in lines[0]
    assert "the others 4 first and 64 latest tokens; prompts of 10, 20 tokens" in lines[0]
    rows = [line for line in lines if "head " in line and "KV" not in line]
    assert len(rows) == 4
    assert ["\x1b[32m" in row for row in rows] == [False, True, True, True]
    # Where there are no colours shapes say it, and the legend what they mean.
    assert [bool(re.search("[◔◑◕●]", row)) for row in rows] == [False, True, True, True]
    assert re.search("● .*reads everything.* █ sink and window.*fuller", lines[-1])


@pytest.mark.parametrize(
    "broken",
    [{}, {"layers": 2, "kv_heads": 2, "heads": [{}]}, {"layers": 1, "kv_heads": 1, "heads": 3},
     {"layers": 1, "kv_heads": 1, "heads": [], "evidence": {"score": [[1, 2]]}}],
)  # fmt: skip
def test_what_is_no_map_is_not_drawn(broken: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected a map's JSON"):
        draw_heads(broken)


# ---- command line ----------------------------------------------------------------------------


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["profile-heads", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gpt-17",), "expected one of smollm2"),
        (("smollm2", "--share", 1.5), "share: expected 0..1, got 1.5"),
        (("smollm2", "--share", 0.5, "--kl", 0.1), "kl: expected no --share"),
        (("smollm2", "--lengths", "1k"), "lengths: expected numbers"),
        (("smollm2", "--threshold", 0.5), "expected --duo"),
        (("smollm2", "--lengths", 10**12), "the model's context of 8192 tokens, got 1000000000000"),
        (("smollm2", "--dtype", "f64"), "dtype: expected one of f32, bf16, f16, got 'f64'"),
        (("smollm2", "--figure", "x.gif"), ".png, .svg, .pdf"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: tuple[object, ...], says: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert says in " ".join(result.stderr.split())


def test_the_command_imports_a_pattern(tmp_path: Path) -> None:
    gates = np.zeros((30, 3))
    gates[7, 2] = gates[14, 1] = 1.0
    text = "\n".join("\t".join(f"{gate:.18e}" for gate in row) for row in gates)
    pattern, config = pattern_in(tmp_path, text)
    written = tmp_path / "maps" / "duo.json"
    result = call(
        "smollm2", "--duo", pattern, "--duo-config", config, "--recent", 64, "--out", written
    )
    assert result.exit_code == 0, result.output
    assert "2 of 90 KV heads read everything" in result.output
    plain = json.loads(written.read_text())
    assert HeadClassMap.from_json(written.read_text()).layers == 30
    assert {"kind": "window", "sink": 8, "recent": 64} in [e["class"] for e in plain["heads"]]
    config.write_text("{}")
    refused = call("smollm2", "--duo", pattern, "--duo-config", config)
    assert refused.exit_code == 2
    assert "sink_size" in refused.stderr
