"""`kvweave profile-heads`: which heads of a model need the whole context, as a head map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors
from kvweave.errors import CorruptHeadMap, InvalidArgument

if TYPE_CHECKING:
    import torch

    from kvweave.cache import HeadClassMap
    from kvweave.lab.profile import HeadProfile

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
    dtype: Annotated[
        str | None, typer.Option(help="f32, bf16 or f16; f32 on a CPU, bf16 on a GPU.")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="Take the scores of this earlier map, measure none.")
    ] = None,
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
        from kvweave.lab.drawing import check_suffix

        check_suffix(figure)
    if duo is None and (duo_config is not None or threshold is not None):
        raise InvalidArgument("duo-config, threshold: expected --duo with them, got none")
    if scores is not None and duo is not None:
        raise InvalidArgument("scores: expected no --duo beside them, got one")
    if kl is not None and (share is not None or duo is not None):
        raise InvalidArgument("kl: expected no --share and no --duo beside it, got one")
    if share is not None and not 0.0 <= share <= 1.0:
        raise InvalidArgument(f"share: expected 0..1, got {share}")
    asked = _lengths(lengths)
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.lab.profile import DuoPattern
        from kvweave.runner.model.model_spec import describe

        pattern = None if duo is None else DuoPattern.read(duo, duo_config)
        loaded = models.load(model, read_dtype(dtype), device=device)
    if pattern is not None:
        window = _window(sink, recent, pattern.sink, pattern.recent)
        made = pattern.map(describe(loaded[0]), share=share, threshold=threshold, **window)
    else:
        from kvweave.lab.profile import DEFAULT_TEXTS

        texts = text or DEFAULT_TEXTS
        settings = {"lengths": asked, "texts": texts, "prompts": prompts, "seed": seed}
        made = _measured(loaded, scores, (sink, recent), (share, kl), settings)
    _show(made, f"Head classes of {model}", out_file, figure)


def read_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by its short name, None for none; raises InvalidArgument for another name."""
    import torch

    known = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    if name is not None and name not in known:
        raise InvalidArgument(f"dtype: expected one of {', '.join(known)}, got {name!r}")
    return None if name is None else known[name]


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


def _measured(
    loaded: tuple[Any, Any],
    scores: Path | None,
    window: tuple[int | None, int | None],
    wanted: tuple[float | None, float | None],
    settings: dict[str, Any],
) -> HeadClassMap:
    """Profiles the model, or takes an earlier profile; chooses heads, and measures what that does.

    `wanted`: a share, or a bound on KL. `settings`: those of `kvweave.lab.profile.profile_heads`.
    """
    from dataclasses import asdict

    from kvweave.lab.profile import EffectMeter, check_lengths, held_out, smallest_share
    from kvweave.lab.profile import profile_heads as measure
    from kvweave.runner import Runner
    from kvweave.runner.model.model_spec import describe

    def make_runner(heads: HeadClassMap | None) -> Runner:
        return Runner(*loaded, max_tokens=longest + 64, heads=heads, check=heads is None)

    earlier = None if scores is None else _earlier(scores, loaded[0])
    if earlier is None:
        kept = _window(*window)
        # Before an arena of that size is asked for.
        longest = check_lengths(describe(loaded[0]), settings["lengths"], **kept)[-1]
        texts, seed = settings["texts"], settings["seed"]
    else:
        kept = _window(*window, earlier.sink, earlier.recent)
        longest = earlier.lengths[-1].length
        texts = [text["name"] for text in earlier.subject["texts"]]
        seed = earlier.subject["seed"]
    whole = make_runner(None)
    # Made first: text that is too short for this is said before anything is measured.
    beside = held_out(whole, texts, longest, **kept, seed=seed)
    profile = measure(whole, **kept, **settings) if earlier is None else earlier
    del whole
    meter = EffectMeter(make_runner, beside)
    share, kl = wanted
    if kl is not None:
        found = smallest_share(profile, meter, kl, **kept)
        count, effect = found.count, found.to_dict()
    else:
        count = profile.count_of(SHARE if share is None else share)
        effect = asdict(meter.measure(profile.map(count=count, **kept)))
    effect = {"length": longest, **effect}
    return profile.map(count=count, **kept, evidence={"held_out_kl": effect})


def _earlier(path: Path, model: Any) -> HeadProfile:
    """The profile of an earlier map of the same model."""
    from kvweave.cache import HeadClassMap
    from kvweave.lab.profile import HeadProfile
    from kvweave.runner.model.model_spec import describe

    heads = HeadClassMap.from_json(path.read_text(encoding="utf-8"))
    fingerprint = describe(model).fingerprint
    if heads.model_fingerprint != fingerprint:
        raise CorruptHeadMap(
            f"{path.name}: expected a map of this model, {fingerprint[:16]}…, "
            f"got one of {heads.model_fingerprint[:16]}…"
        )
    return HeadProfile.from_map(heads)


def _show(made: HeadClassMap, title: str, out_file: Path | None, figure: Path | None) -> None:
    from kvweave.lab.drawing import draw_heads, save_heads

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
