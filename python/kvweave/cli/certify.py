"""`kvweave certify`: the cheapest policy, and head map, that keep a stated bound, as a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors
from kvweave.cli.dtype import Dtype, read_dtype
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

    from kvweave.policies.policy_profile import Evidence, PolicyProfile


@user_errors
def certify(
    model: Annotated[str, typer.Argument(help="A packaged model, a folder, or owner/name.")],
    kl: Annotated[
        float | None, typer.Option(help="The most KL to full prefill, nats a token, on average.")
    ] = None,
    score_drop: Annotated[
        float | None, typer.Option(help="Instead: the most a task's score (0..1) may drop.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the profile as JSON.")
    ] = None,
    corpus: Annotated[
        str, typer.Option(help="sotu, kjv, python, a text file or a folder of .txt files.")
    ] = "sotu",
    heads: Annotated[
        Path | None, typer.Option(help="Certify under this head map, against the whole model.")
    ] = None,
    find_heads: Annotated[
        bool,
        typer.Option("--find-heads", help="Profile the heads, and search head maps too."),
    ] = False,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Of each job, for the certificate.")
    ] = None,
    level: Annotated[float, typer.Option(help="How sure the certificate is.")] = 0.95,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short job, few samples: a few minutes.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="Keep each sample in this file, and go on from it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Dtype = None,
) -> None:
    """Find the cheapest policy within a bound, on text of one half, and certify it on the other."""
    if (kl is None) == (score_drop is None):
        raise _no_bound(model, "neither" if kl is None else "both")
    if find_heads and heads is not None:
        raise InvalidArgument(f"find-heads: expected no --heads beside it, got {heads.name}")
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.cache import HeadClassMap
        from kvweave.lab.profile import HeadLadder, effort_of
        from kvweave.lab.profile import certify as measure
        from kvweave.policies.policy_profile import Bound
        from kvweave.runner import Runner

        by_kl = Bound("kl", kl, level) if kl is not None else None
        bound = by_kl or Bound("score-drop", score_drop or 0, level)
        effort = effort_of(bound, quick, find_heads)
        if samples is not None:
            effort = replace(effort, certify=samples)
        kept = None if heads is None else HeadClassMap.from_json(heads.read_text(encoding="utf-8"))
        loaded = models.load(model, read_dtype(dtype), device=device)

        def make_runner(under: HeadClassMap | None) -> Runner:
            room = 4 * effort.longest + 4096
            return Runner(*loaded, max_tokens=room, heads=under, check=under is None)

        whole = make_runner(None)
        runner = whole if kept is None else make_runner(kept)
        ladder = HeadLadder(make_runner) if find_heads else None
    err().print(f"certifying {bound} by {_counted(effort.certify, len(effort.jobs))}", style="dim")
    settings: dict[str, Any] = {"effort": effort, "corpus": corpus, "seed": seed, "log": log}
    made = measure(runner, bound, whole=whole, ladder=ladder, **settings)
    _show(made, model, out_file)


def _no_bound(model: str, got: str) -> InvalidArgument:
    return InvalidArgument(
        f"bound: expected --kl or --score-drop, got {got}; "
        f"run: kvweave certify {model} --kl 0.05 --out profile.json"
    )


def _show(made: PolicyProfile, model: str, out_file: Path | None) -> None:
    out().print(table_of(made, model), highlight=False)
    out().print(_verdict(made), highlight=False)
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_text(made.to_json(), encoding="utf-8")
        out().print(f"written to {out_file}", style="dim")


def _counted(samples: int, jobs: int) -> str:
    return f"{samples * jobs} samples of {jobs} job{'s' * (jobs > 1)}"


def table_of(made: PolicyProfile, model: str) -> Table:
    """Every candidate, cheapest first; what was certified below the search."""
    from rich import box
    from rich.table import Table

    from kvweave.lab.profile.certifying import ALL_JOBS

    maps = {tried.digest: f"{tried.whole} of {tried.heads}" for tried in made.tried_heads}
    caption = "mean over jobs, each weighing alike · low–high: interval · n: samples"
    if maps:
        caption += " · whole: heads that keep all tokens · in order of FLOPs × KV"
    table = Table(
        title=f"Policies of {model}, bound {made.bound}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        collapse_padding=True,
    )
    table.add_column("stage", no_wrap=True)
    table.add_column("policy", overflow="fold")
    table.add_column("job", overflow="fold")
    if maps:
        table.add_column("whole", no_wrap=True)
    for head in ("n", "FLOPs", *(("KV",) if maps else ())):
        table.add_column(head, justify="right", no_wrap=True)
    # In a narrow terminal the interval stands below its mean.
    table.add_column("KL" if made.bound.kind == "kl" else "drop", justify="right", overflow="fold")
    last = ""
    for row in made.evidence:
        # Of the search only what all jobs come to; the profile's file has the rest.
        if row.stage == "search" and row.job != ALL_JOBS:
            continue
        if last and last != row.stage:
            table.add_section()
        last = row.stage
        whole = [maps.get(row.heads or "", "all")] if maps else []
        kv = [f"{row.kv_share:.3f}"] if maps else []
        figures = (str(row.samples), f"{row.flops_share:.3f}", *kv, _told(row))
        table.add_row(row.stage, row.policy, row.job, *whole, *figures)
    return table


def _told(row: Evidence) -> str:
    if row.value is None:
        return f"{row.lost} not finite"
    if row.low is None or row.high is None:
        return f"{row.value:.4f}"
    return f"{row.value:.4f} {row.low:.4f}–{row.high:.4f}"


def _verdict(made: PolicyProfile) -> str:
    from kvweave.policies.policy_profile import heads_digest

    if made.policy == "full" and made.heads is None:
        whole = ", with all heads whole" if made.tried_heads else ""
        return f"full{whole}: nothing was found within {made.bound}"
    cost = f"at {made.flops_share:.3f} of full's FLOPs"
    if made.heads is None:
        none = "; no head map was found that is cheaper" if made.tried_heads else ""
        return f"{made.policy} is within {made.bound}, {cost}{none}"
    under = next(t for t in made.tried_heads if t.digest == heads_digest(made.heads))
    return (
        f"{made.policy} with {under.whole} of {under.heads} heads whole is within {made.bound}, "
        f"{cost} and {made.kv_share:.3f} of its KV"
    )
