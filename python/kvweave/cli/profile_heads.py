"""`kvweave profile-heads`: which heads of a model need the whole context, as a head map."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors
from kvweave.cli.dtype import Dtype, read_dtype
from kvweave.errors import CorruptHeadMap, InvalidArgument

if TYPE_CHECKING:
    from kvweave.cache import HeadClassMap
    from kvweave.cli.recorded_scores import RecordedScores
    from kvweave.lab.profile import DuoPattern, Stability
    from kvweave.runner import Runner

SINK, RECENT, SHARE = 16, 256, 0.15
# Pages of FlexiCache (section 5.1): 1024 tokens. Of short prompts an eighth, as nothing is left out
# where all are chosen.
PAGES, PART = 64, 8


@user_errors
def profile_heads(
    model: Annotated[
        str | None, typer.Argument(help="Packaged, a folder or owner/name; none beside --scores.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the map as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it to PNG, SVG or PDF.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt tokens.")] = "1024,2048,4096",
    share: Annotated[
        float | None, typer.Option(help=f"Heads that stay global, 0..1 ({SHARE}).")
    ] = None,
    kl: Annotated[
        float | None, typer.Option(help="Instead: fewest within this KL a token.")
    ] = None,
    sink: Annotated[
        int | None, typer.Option(help=f"First tokens a local head keeps ({SINK}).")
    ] = None,
    recent: Annotated[
        int | None, typer.Option(help=f"Latest tokens a local head keeps ({RECENT}).")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="sotu, kjv, python, a text file or a folder of them.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each kind, text and length.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[
        int, typer.Option(min=0, help="Decode steps whose pages are compared; 0: none.")
    ] = 128,
    unstable_share: Annotated[float | None, typer.Option(help="Unstable ones (0.25).")] = None,
    stability_figure: Annotated[
        Path | None, typer.Option(help="Draw how pages stay to PNG, SVG or PDF.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=3, help="Pages a stable head reads.")] = None,
    rerank_every: Annotated[int, typer.Option(min=1, help="Steps between its rankings.")] = 16,
    estimate: Annotated[bool, typer.Option(help="Estimate those it does not read.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Dtype = None,
    scores: Annotated[Path | None, typer.Option(help="Take an earlier map's scores.")] = None,
    duo: Annotated[
        Path | None, typer.Option(help="Import DuoAttention's full_attention_heads.tsv instead.")
    ] = None,
    duo_config: Annotated[Path | None, typer.Option(help="Its config.json: sink, window.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of a pattern: heads from here on stay global (0.5).")
    ] = None,
) -> None:
    """Measure where each KV head looks on real text, and class it global or local."""
    _check_pictures(figure, stability_figure)
    _check_pattern(duo, duo_config, threshold)
    beside = {"scores": scores, "stability-figure": stability_figure, "kl": kl, "top-k": top_k}
    _check_alone("duo", duo, beside)
    _check_alone("kl", kl, {"share": share})
    _check_numbers(share, top_k, estimate)
    _check_unstable(unstable_share, steps, {"scores": scores, "duo": duo})
    settings: dict[str, Any] = {"lengths": _lengths(lengths), "prompts": prompts, "seed": seed}
    window = sink, recent
    if model is None:
        made = _recorded(scores, window, share, {"kl": kl, "duo": duo})
    elif duo is not None:
        pattern = _pattern(duo, duo_config)
        made = _imported(pattern, _loaded(model, dtype, device)[0], window, share, threshold)
    else:
        settings["texts"], loaded = text, _loaded(model, dtype, device)
        made = _measured(loaded, scores, window, (share, kl), (steps, unstable_share), settings)
    made = _ranked(made, top_k, rerank_every, estimate)
    of = model or f"model {made.model_fingerprint[:12]}"
    if stability_figure is not None:
        _draw_stability(made, f"Pages that heads of {of} choose", stability_figure)
    _show(made, f"Head classes of {of}", out_file, figure)


def _loaded(model: str, dtype: str | None, device: str) -> tuple[Any, Any]:
    with err().status(f"loading {model}"):
        from kvweave import models

        return models.load(model, read_dtype(dtype), device=device)


def _pattern(duo: Path, config: Path | None) -> DuoPattern:
    from kvweave.lab.profile import DuoPattern

    return DuoPattern.read(duo, config)


def _recorded(
    scores: Path | None,
    window: tuple[int | None, int | None],
    share: float | None,
    measured: Mapping[str, object],
) -> HeadClassMap:
    """Another choice of recorded scores; nothing says what it costs. `measured`: options that ask.

    The map is of the model that was scored: whoever loads both compares their fingerprints.
    """
    from kvweave.cli.recorded_scores import RecordedScores, map_of

    if scores is None:
        raise InvalidArgument(
            "model: expected one to measure, or --scores FILE of an earlier map, got neither; "
            "run: kvweave profile-heads smollm2 --out map.json"
        )
    for name, value in measured.items():
        if value is not None:
            raise InvalidArgument(f"{name}: expected a model to read beside it, got none")
    recorded = RecordedScores.read(scores)
    profile = recorded.profile
    count = profile.count_of(SHARE if share is None else share)
    kept = _window(*window, profile.sink, profile.recent)
    return map_of(recorded, count, (kept["sink"], kept["recent"]))


def _check_pattern(duo: Path | None, config: Path | None, threshold: float | None) -> None:
    if duo is None and (config is not None or threshold is not None):
        raise InvalidArgument("duo-config, threshold: expected --duo with them, got none")


def _check_numbers(share: float | None, top_k: int | None, estimate: bool) -> None:
    if estimate and top_k is None:
        raise InvalidArgument("estimate: expected --top-k with it, got none")
    if share is not None and not 0.0 <= share <= 1.0:
        raise InvalidArgument(f"share: expected 0..1, got {share}")


def _check_unstable(share: float | None, steps: int, others: Mapping[str, object]) -> None:
    _check_alone("unstable-share", share, others)
    if share is not None and not 0.0 <= share <= 1.0:
        raise InvalidArgument(f"unstable-share: expected 0..1, got {share}")
    if share is not None and not steps:
        raise InvalidArgument("unstable-share: expected --steps of at least 17 with it, got 0")


def _ranked(made: HeadClassMap, pages: int | None, every: int, estimate: bool) -> HeadClassMap:
    """The same map, its stable global heads reading few pages in decode steps, if any number."""
    if pages is None:
        return made
    from kvweave.lab.profile import with_ranked_pages

    return with_ranked_pages(made, pages, rerank_every=every, estimate=estimate)


def _check_alone(name: str, option: object, others: Mapping[str, object]) -> None:
    """Refuses options that mean nothing beside another one."""
    for other, value in others.items():
        if option is not None and value is not None:
            raise InvalidArgument(f"{name}: expected no --{other} beside it, got {value}")


def _check_pictures(*paths: Path | None) -> None:
    from kvweave.lab.drawing import check_suffix

    for path in filter(None, paths):
        check_suffix(path)


def _draw_stability(made: HeadClassMap, title: str, path: Path) -> None:
    from kvweave.lab.drawing import save_stability

    save_stability(path, json.loads(made.to_json())["evidence"].get("stability", {}), title)


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(
            f"lengths: expected numbers parted by commas, got {text!r}"
        ) from error


def _window(
    sink: int | None, recent: int | None, own_sink: int | None = None, own_recent: int | None = None
) -> dict[str, Any]:
    """What is asked for, else what comes with a pattern, else the defaults."""
    sinks = [value for value in (sink, own_sink, SINK) if value is not None]
    recents = [value for value in (recent, own_recent, RECENT) if value is not None]
    return {"sink": sinks[0], "recent": recents[0]}


def _imported(
    pattern: DuoPattern,
    model: Any,
    window: tuple[int | None, int | None],
    share: float | None,
    threshold: float | None,
) -> HeadClassMap:
    """The map of another project's pattern."""
    from kvweave.runner.model.model_spec import describe

    kept = _window(*window, pattern.sink, pattern.recent)
    return pattern.map(describe(model), share=share, threshold=threshold, **kept)


def _measured(
    loaded: tuple[Any, Any],
    scores: Path | None,
    window: tuple[int | None, int | None],
    wanted: tuple[float | None, float | None],
    stability: tuple[int, float | None],
    settings: dict[str, Any],
) -> HeadClassMap:
    """Profiles the model, or takes an earlier profile; chooses heads, and measures what that does.

    `wanted`: a share, or a bound on KL. `stability`: how many decode steps tell which heads are
    stable, and which share of them is not.
    `settings`: those of `kvweave.lab.profile.profile_heads`; no texts: its own.
    """
    from dataclasses import asdict

    from kvweave.cli.recorded_scores import RecordedScores, map_of
    from kvweave.lab.profile import (
        DEFAULT_TEXTS,
        EffectMeter,
        check_lengths,
        held_out,
        smallest_share,
    )
    from kvweave.lab.profile import profile_heads as measure
    from kvweave.runner import Runner
    from kvweave.runner.model.model_spec import describe

    def make_runner(heads: HeadClassMap | None) -> Runner:
        room = longest + max(64, stability[0])
        return Runner(*loaded, max_tokens=room, heads=heads, check=heads is None)

    settings = {**settings, "texts": settings["texts"] or DEFAULT_TEXTS}
    earlier = None if scores is None else _earlier(scores, loaded[0])
    if earlier is None:
        kept = _window(*window)
        # Before an arena of that size is asked for.
        longest = check_lengths(describe(loaded[0]), settings["lengths"], **kept)[-1]
        texts, seed = settings["texts"], settings["seed"]
    else:
        scored = earlier.profile
        kept = _window(*window, scored.sink, scored.recent)
        longest = scored.lengths[-1].length
        texts = [text["name"] for text in scored.subject["texts"]]
        seed = scored.subject["seed"]
    whole = make_runner(None)
    # Made first: text that is too short for this is said before anything is measured.
    beside = held_out(whole, texts, longest, **kept, seed=seed)
    if earlier is None:
        found = measure(whole, **kept, **settings)
        after = {**kept, "seed": seed}
        changes = _stability(whole, texts, longest, stability, after)
        earlier = RecordedScores(found, None if changes is None else changes.to_dict())
    del whole
    meter = EffectMeter(make_runner, beside)
    share, kl = wanted
    if kl is not None:
        smallest = smallest_share(earlier.profile, meter, kl, **kept)
        count, effect = smallest.count, smallest.to_dict()
    else:
        count = earlier.profile.count_of(SHARE if share is None else share)
        effect = asdict(meter.measure(earlier.profile.map(count=count, **kept)))
    evidence = {"held_out_kl": {"length": longest, **effect}}
    return map_of(earlier, count, (kept["sink"], kept["recent"]), evidence)


def _stability(
    runner: Runner,
    texts: Sequence[str],
    length: int,
    asked: tuple[int, float | None],
    settings: dict[str, int],
) -> Stability | None:
    """How stable heads are behind prompts of a length, made as the profile's are; None: not asked.

    `asked`: decode steps, and the share of unstable heads, None for the usual one.
    """
    from kvweave.lab.profile import measure_stability, text_tasks

    steps, share = asked
    if not steps:
        return None
    tasks = text_tasks(runner, texts, length, **settings)
    pages = max(1, min(PAGES, length // runner.cache.shape.page_tokens // PART))
    found = measure_stability(runner, tasks, pages=pages, steps=steps)
    return found if share is None else found.with_share(share)


def _earlier(path: Path, model: Any) -> RecordedScores:
    """The scores of an earlier map of the same model, and values of its weights."""
    from dataclasses import replace

    from kvweave.cli.recorded_scores import RecordedScores
    from kvweave.runner.model.model_spec import describe

    recorded, spec = RecordedScores.read(path), describe(model)
    if recorded.profile.model_fingerprint != spec.fingerprint:
        raise CorruptHeadMap(
            f"{path.name}: expected a map of this model, {spec.fingerprint[:16]}…, "
            f"got one of {recorded.profile.model_fingerprint[:16]}…"
        )
    return replace(recorded, profile=replace(recorded.profile, weights=spec.weights))


def _show(made: HeadClassMap, title: str, out_file: Path | None, figure: Path | None) -> None:
    from kvweave.lab.drawing import draw_heads, save_heads

    text = made.to_json()
    plain = json.loads(text)
    console = out()
    console.print(draw_heads(plain, console.width))
    for line in _words(plain["evidence"]):
        out().print(line, highlight=False)
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_text(text + "\n", encoding="utf-8")
        out().print(f"written to {out_file}", style="dim")
    if figure is not None:
        save_heads(figure, plain, title)
        out().print(f"drawn to {figure}", style="dim")


def _words(evidence: dict[str, Any]) -> list[str]:
    """What was found, a sentence a line."""
    said = []
    if "agreement" in evidence and len(evidence["lengths"]) > 1:
        alike = evidence["agreement"]
        said.append(
            f"between lengths: {alike['same_class']:.0%} of heads in one class (two random maps: "
            f"{alike['same_class_by_chance']:.0%}), least rank correlation of scores "
            f"{alike['rank_correlation_score']:.2f}"
        )
    if "held_out_kl" in evidence:
        effect = evidence["held_out_kl"]
        said.append(
            f"KL to the whole model at {effect['length']} tokens of held-out text: "
            f"{effect['text']:.4f} nats a token; on hidden numbers {effect['answers']:.4f}"
        )
    elif "agreement" in evidence:
        said.append("KL to the whole model: not measured; name the model to measure it")
    if "stability" in evidence:
        found = evidence["stability"]
        names, shared = found["tasks"], found["shared_by_tasks"]
        pairs = [shared[i][j] for i in range(len(names)) for j in range(i)]
        alike = f"; two tasks share {sum(pairs) / len(pairs):.0%} of them" if pairs else ""
        said.append(
            f"unstable: {found['shared_by_chance']:.3g} of heads, whose {found['pages']} pages "
            f"changed most within 16 of {found['steps']} decode steps{alike} "
            f"(by chance {found['shared_by_chance']:.3g})"
        )
    return said
