"""Reports: what rows say against plain arithmetic, their table, and the figures drawn of them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from commands import call, refused
from eval_samples import contents, measured
from kvweave.errors import InvalidArgument
from kvweave.lab.drawing.front_figure import (
    FrontPoint,
    families_of,
    front_figure,
    front_of,
    save_front,
)
from kvweave.lab.eval import MeasurementLog, evaluations_of
from kvweave.lab.eval.report import paired, report_of
from kvweave.lab.eval.report_table import tables_of

KLS = {"naive": 0.8, "epic": 0.6, "foresight(share=0.1)": 0.2, "foresight(share=0.2)": 0.1}


def two_tasks():
    one, other = contents(KLS), contents(KLS, 5, "chain, 512", seed=1)
    return evaluations_of([one, other])


def test_all_tasks_count_the_same() -> None:
    tasks = two_tasks()
    report = report_of(tasks)
    assert [s.title for s in report.sections] == ["needles, 512", "chain, 512", "all 2 tasks"]
    *own, pooled = ({row.policy: row for row in section.rows} for section in report.sections)
    for name in KLS:
        by_task = []
        for task in tasks:
            kl = {p: np.mean([np.mean(m.kl) for m in task.of(p).values()]) for p in (name, "naive")}
            by_task.append(1 - kl[name] / kl["naive"])
        assert [rows[name].gap_closed.value for rows in own] == pytest.approx(by_task)
        assert pooled[name].gap_closed.value == pytest.approx(np.mean(by_task))
        assert pooled[name].samples == 17
    found = pooled["epic"].gap_closed
    assert found.low < found.value < found.high
    assert pooled["epic"].flops_ratio == pytest.approx(0.2)
    assert pooled["epic"].pays_after == pytest.approx(600 / 800)


def test_a_report_says_what_it_was_measured_on() -> None:
    report = report_of(two_tasks())
    data = report.to_dict()
    (subject,) = data["subjects"]
    assert subject["measured_on"] == {"model": "m" * 20, "seed": 0}
    assert list(subject["jobs"]) == ["needles, 512", "chain, 512"]
    assert subject["jobs"]["chain, 512"]["length"] == 512
    assert subject["policies"] == {name: name for name in KLS}
    row = data["sections"][0]["rows"][0]
    assert (row["agreed"], row["compared"], row["kv_bytes"]) == (3, 4, 10)
    assert row["peak_bytes"] is None  # none was measured: no GPU


def test_differences_are_of_pairs() -> None:
    tasks = two_tasks()
    by_hand = np.mean(
        [
            np.mean(
                [
                    np.mean(m.kl) - np.mean(task.of("epic")[i].kl)
                    for i, m in task.of("naive").items()
                ]
            )
            for task in tasks
        ]
    )
    found = paired(tasks, "naive", "epic")
    assert found.value == pytest.approx(by_hand)
    assert 0 < found.low < found.high
    row = {r.policy: r for r in report_of(tasks, "epic").sections[-1].rows}["naive"]
    assert row.less["kl"] == found
    assert row.less["gap_closed"].value < 0
    assert paired(tasks, "epic", "epic", "gap_closed").value == 0.0
    # A sample that one of them lacks is no pair.
    short = [replace(t, measurements=t.measurements[:9]) for t in tasks]
    assert math.isnan(paired(short, "naive", "nobody").value)
    with pytest.raises(InvalidArgument, match="one of kl, score, gap_closed"):
        paired(tasks, "naive", "epic", "beauty")


def test_what_is_not_finite_is_left_out_and_shown() -> None:
    log = contents(KLS)
    (job, _), *_ = log.samples
    log.samples[job, 3]["epic"] = measured(3, "epic", (0.1, math.nan))
    log.samples[job, 4]["epic"] = measured(4, "epic", (math.inf, 0.1))
    log.samples[job, 5]["epic"] = measured(5, "epic", ())
    (task,) = evaluations_of([log])
    (section,) = report_of([task]).sections
    rows = {row.policy: row for row in section.rows}
    assert rows["epic"].non_finite == 3
    assert rows["naive"].non_finite == 0
    rest = [np.mean(m.kl) for i, m in task.of("epic").items() if i not in (3, 4, 5)]
    assert rows["epic"].kl.value == pytest.approx(np.mean(rest))
    assert math.isfinite(rows["epic"].gap_closed.value)
    assert "12 !3" in printed(report_of([task]))
    json.dumps(report_of([task]).to_dict(), allow_nan=False)


def printed(report) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        for table in tables_of(report):
            console.print(table)
    return captured.get()


def test_the_table_fits_a_hundred_columns() -> None:
    long = "foresight(share=0.1, draft=16, depth=0.3333333333333333)[bold]"
    tasks = evaluations_of([contents({**KLS, long: 123.456}, job="x" * 150)])
    text = printed(report_of(tasks, "naive"))
    assert max(map(len, text.splitlines())) <= 100
    assert "never" not in text.split("foresight")[1].splitlines()[0]
    squeezed = "".join(text.split())
    for name in KLS:
        assert name in text
    # Folded over several lines, but whole, and no markup.
    assert "[bold]" in squeezed
    assert "less naive, in pairs" in text


def test_several_subjects_are_kept_apart() -> None:
    one, other = contents(KLS), contents(KLS)
    other.subject["seed"] = 9
    titles = [s.title for s in report_of(evaluations_of([one, other])).sections]
    assert titles == [f"needles, 512 · mmmmmmmmmmmm, seed {seed}" for seed in (0, 9)]
    with pytest.raises(InvalidArgument, match="expected measured samples"):
        report_of([])
    with pytest.raises(InvalidArgument, match="against: expected one of full, naive"):
        report_of(two_tasks(), "magic")


# ---- figures ---------------------------------------------------------------------------------


def test_policies_of_one_rule_are_one_line_over_its_budgets() -> None:
    names = ["naive", "foresight", "foresight(share=0.1)", "foresight(share=0.2)"]
    more = ["foresight(draft=0, share=0.1)", "foresight(draft=0, share=0.2)", "f(x)", "f(a=1)"]
    assert families_of([*names, *more]) == {
        "naive": ["naive"],
        "foresight": names[1:],
        "foresight(draft=0)": more[:2],
        "f(x)": ["f(x)"],
        "f": ["f(a=1)"],
    }


def test_the_front_is_what_no_other_reaches_for_as_little() -> None:
    at = [(0.1, 0.5), (0.2, 0.4), (0.2, 0.7), (0.3, 0.7), (0.05, 0.1)]
    points = [FrontPoint(str(i), cost, quality, None, None) for i, (cost, quality) in enumerate(at)]
    by_force = {
        p.policy
        for p in points
        if not any(
            (q.cost <= p.cost and q.quality > p.quality)
            or (q.cost < p.cost and q.quality >= p.quality)
            for q in points
        )
    }
    assert {p.policy for p in front_of(points)} == by_force == {"4", "0", "2"}
    assert front_of([]) == []


def test_figures_are_drawn_and_say_what_they_show(tmp_path: Path) -> None:
    tasks = two_tasks()
    strange = replace(tasks[0], job="a $\\frac{ task", measurements=tasks[0].measurements)
    data = report_of([strange, tasks[1]]).to_dict()
    figure = front_figure(data, "gap_closed", "flops_ratio")
    assert [axes.get_title(loc="left") for axes in figure.axes][1:] == ["chain, 512", "all 2 tasks"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["naive", "epic", "foresight"]
    for quality in ("gap_closed", "score"):
        for name in ("q.svg", "q.png"):
            save_front(tmp_path / name, data, quality, "ttft_ratio")
            assert (tmp_path / name).stat().st_size > 10_000
    with pytest.raises(InvalidArgument, match="expected one of gap_closed"):
        front_figure(data, "beauty", "flops_ratio")
    unscored = [replace(task, score_name="nll") for task in tasks]
    with pytest.raises(InvalidArgument, match="a policy with a score, got none"):
        front_figure(
            {"sections": report_of(unscored[:1]).to_dict()["sections"]}, "score", "ttft_ratio"
        )


def test_the_command_reads_many_files_together(tmp_path: Path) -> None:
    whole = contents(KLS)
    for part in range(2):
        log = MeasurementLog(tmp_path / f"{part}.jsonl", whole.subject)
        log.define(whole.jobs, whole.policies)
        for (job, sample), made in whole.samples.items():
            if sample % 2 == part:
                log.append(job, sample, list(made.values()))
    out = tmp_path / "out"
    done = call("report", tmp_path / "0.jsonl", tmp_path / "1.jsonl", "--out", out)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 100
    rows = json.loads((out / "report.json").read_text())["sections"][0]["rows"]
    assert {row["samples"] for row in rows} == {12}
    assert rows[0]["never_pays"]
    assert rows[0]["pays_after"] is None
    drawn = sorted(path.name for path in out.glob("*.svg"))
    assert drawn == [
        f"{quality}-over-{cost}.svg"
        for quality in ("gap-closed", "score")
        for cost in ("flops", "ttft")
    ]
    again = {path.name: path.read_bytes() for path in out.iterdir()}
    call("report", tmp_path / "0.jsonl", tmp_path / "1.jsonl", "--out", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == again
    (tmp_path / "letter").write_text("dear reader\n")
    assert "expected a log of measurements" in refused("report", tmp_path / "letter")
    assert "no such file" in refused("report", tmp_path / "nowhere")
    assert "against: expected one of" in refused("report", tmp_path / "0.jsonl", "--against", "x")
