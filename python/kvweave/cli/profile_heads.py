"""`kvweave profile-heads`: which heads of a model need the whole context, as a head map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    from kvweave.cache import HeadClassMap

SINK, RECENT, SHARE = 16, 256, 0.15


@user_errors
def profile_heads(
    model: Annotated[str, typer.Argument(help="A packaged model, or a local folder.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the map as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw it to PNG, SVG or PDF.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt tokens.")] = "1024,2048,4096",
    share: Annotated[
        float | None, typer.Option(help=f"Heads that stay global, 0..1 ({SHARE}).")
    ] = None,
    kl: Annotated[
        float | None, typer.Option(help="Instead: the fewest within this KL, nats a token.")
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
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    duo: Annotated[
        Path | None, typer.Option(help="Import DuoAttention's full_attention_heads.tsv instead.")
    ] = None,
    duo_config: Annotated[
        Path | None, typer.Option(help="Its config.json: sink and recent window.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of a pattern: heads from here on stay global (0.5).")
    ] = None,
) -> None:
    """Measure where each KV head looks on real text, and class it global or local."""
    if figure is not None:
        from kvweave.drawing import check_suffix

        check_suffix(figure)
    if duo is None and (duo_config is not None or threshold is not None):
        raise InvalidArgument("duo-config, threshold: expected --duo with them, got none")
    if kl is not None and (share is not None or duo is not None):
        raise InvalidArgument("kl: expected no --share and no --duo beside it, got one")
    if share is not None and not 0.0 <= share <= 1.0:
        raise InvalidArgument(f"share: expected 0..1, got {share}")
    asked = _lengths(lengths)
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.profile import DuoPattern
        from kvweave.runner.model_spec import describe

        pattern = None if duo is None else DuoPattern.read(duo, duo_config)
        loaded = models.load(model, device=device)
    if pattern is not None:
        window = _window(sink, recent, pattern.sink, pattern.recent)
        made = pattern.map(describe(loaded[0]), share=share, threshold=threshold, **window)
    else:
        made = _measured(
            loaded, asked, text, _window(sink, recent), (share, kl), prompts=prompts, seed=seed
        )
    _show(made, f"Head classes of {model}", out_file, figure)


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(
            f"lengths: expected numbers parted by commas, got {text!r}"
        ) from error


def _window(
    sink: int | None, recent: int | None, own_sink: int | None = None, own_recent: int | None = None
) -> dict[str, int]:
    """What is asked for, else what comes with a pattern, else the defaults."""
    sinks = [value for value in (sink, own_sink, SINK) if value is not None]
    recents = [value for value in (recent, own_recent, RECENT) if value is not None]
    return {"sink": sinks[0], "recent": recents[0]}


def _measured(
    loaded: tuple[Any, Any],
    lengths: list[int],
    text: list[str] | None,
    window: dict[str, int],
    wanted: tuple[float | None, float | None],
    **settings: int,
) -> HeadClassMap:
    """Profiles the model, chooses by share or by KL, and measures what the map does to it."""
    from dataclasses import asdict

    from kvweave.profile import DEFAULT_TEXTS, EffectMeter, held_out, smallest_share
    from kvweave.profile import profile_heads as measure
    from kvweave.runner import Runner

    longest = max(lengths)

    def make_runner(heads: HeadClassMap | None) -> Runner:
        return Runner(*loaded, max_tokens=longest + 64, heads=heads, check=heads is None)

    texts = tuple(text or DEFAULT_TEXTS)
    whole = make_runner(None)
    profile = measure(whole, lengths=lengths, texts=texts, **window, **settings)
    beside = held_out(whole, texts, longest, **window, seed=settings["seed"])
    del whole
    with err().status("measuring what the map does"):
        meter = EffectMeter(make_runner, beside)
        share, kl = wanted
        if kl is not None:
            found = smallest_share(profile, meter, kl)
            effect: dict[str, Any] = found.to_dict()
            count = found.count
        else:
            count = profile.count_of(SHARE if share is None else share)
            effect = asdict(meter.measure(profile.map(count=count)))
    effect = {"length": longest, **effect}
    return profile.map(count=count, evidence={"held_out_kl": effect})


def _show(made: HeadClassMap, title: str, out_file: Path | None, figure: Path | None) -> None:
    from kvweave.drawing import draw_heads, save_heads

    text = made.to_json()
    plain = json.loads(text)
    out().print(draw_heads(plain))
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
    return said
