"""`kvweave plan`: what of a prompt is reused, from where, and why the rest is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.console import err, out, user_errors, write_json
from kvweave.cli.dtype import Dtype, read_dtype
from kvweave.cli.prompt_file import (
    FILE_HELP,
    PROMPT_HELP,
    name_of,
    prompt_parts,
    read_prompt,
    read_segments,
)
from kvweave.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    from kvweave.cache import KvCache
    from kvweave.runner import Part, TokenizedPrompt


@user_errors
def plan(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)],
    segment: Annotated[list[str] | None, typer.Option(help=FILE_HELP)] = None,
    cold: Annotated[
        list[str] | None, typer.Option(help="A segment's name that is not in the cache yet.")
    ] = None,
    earlier: Annotated[
        list[str] | None,
        typer.Option(help="A prompt that was served before this one; text or @FILE."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Also run it, to draw the rows each layer computes.")
    ] = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="Also match unmarked text by its content.")
    ] = False,
    model: Annotated[str, typer.Option(help="Whose tokenizer (and weights).")] = "smollm2",
    dtype: Dtype = None,
    page_tokens: Annotated[int, typer.Option(min=8, max=64)] = 16,
    width: Annotated[
        int | None,
        typer.Option(min=20, help="Characters of the bar; as the terminal has, 96 at most."),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Draw to PNG, SVG or PDF.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
) -> None:
    """Draw the reuse plan of a prompt. Without --policy no model is run, only its tokenizer."""
    from kvweave.lab.drawing import check_suffix, draw_plan, save_plan

    if out_file is not None:
        check_suffix(out_file)
    texts = read_segments(segment or [])
    for name in cold or ():
        if name not in texts:
            raise InvalidArgument(
                f"cold: expected one of {', '.join(texts) or 'no segments'}, got {name!r}"
            )
    if dtype is not None and policy is None:
        raise InvalidArgument(f"dtype: expected a policy to run beside it, got {dtype} alone")
    case = _Case(
        model=model,
        dtype=read_dtype(dtype),
        page_tokens=page_tokens,
        parts=prompt_parts(read_prompt(prompt), texts),
        warm={name: text for name, text in texts.items() if name not in (cold or ())},
        before=[prompt_parts(read_prompt(text, "earlier"), {}) for text in earlier or ()],
        discover=discover,
    )
    with err().status(f"loading {model}"):
        found = _look_up(case) if policy is None else _run(case, policy)
    made, rows = found.plan, found.rows_per_layer
    previews = [
        found.tokenizer.decode(found.tokens[s["start"] : s["end"]][:24]) for s in made["spans"]
    ]
    console = out()
    bar = min(96, console.width) if width is None else width
    console.print(draw_plan(made, rows, previews=previews, width=bar))
    if out_file is not None:
        save_plan(out_file, made, rows, title=f"Reuse plan of {name_of(prompt)}")
        out().print(f"drawn to {out_file}", style="dim")
    if json is not None:
        write_json(json, {**made, "rows_per_layer": rows})


@dataclass(frozen=True)
class _Case:
    """What is asked: the prompt, what the cache holds before it, and how it looks."""

    model: str
    dtype: torch.dtype | None
    page_tokens: int
    parts: list[Part]
    warm: dict[str, str]
    before: list[list[Part]]
    discover: bool


@dataclass(frozen=True)
class _Found:
    """The plan as plain data, the prompt's tokens, and rows by layer if it was run."""

    plan: dict[str, Any]
    tokens: list[int]
    tokenizer: Any
    rows_per_layer: list[int] | None = None


def _look_up(case: _Case) -> _Found:
    """The plan alone: a cache of the smallest pages knows all that admission needs."""
    from kvweave import models
    from kvweave.cache import KvCache, KvShape
    from kvweave.runner.prompt import PromptTokenizer

    tokenizer = models.load_tokenizer(case.model)
    prompts = PromptTokenizer(tokenizer, len(tokenizer))
    wanted = prompts.tokenize(case.parts)
    knowledge = {name: prompts.tokenize([text]) for name, text in case.warm.items()}
    served = [prompts.tokenize(part) for part in case.before]
    held = [wanted, *knowledge.values(), *served]
    blocks = 4 * sum(len(p.tokens) // case.page_tokens + 1 for p in held)
    shape = KvShape(1, 1, 8, case.page_tokens, "f16")
    cache = KvCache(shape, blocks=blocks)
    for name, text in knowledge.items():
        _serve(cache, text, name)
    for text in served:
        _serve(cache, text, None)
    request = cache.admit(wanted.tokens, segments=wanted.segments, discover=case.discover)
    made: dict[str, Any] = request.plan.to_dict()
    request.release()
    return _Found(made, wanted.tokens.tolist(), tokenizer)


def _serve(cache: KvCache, prompt: TokenizedPrompt, name: str | None) -> None:
    """Leaves a text in the cache as if it had been prefilled, frozen when it has a name."""
    request = cache.admit(prompt.tokens, reuse="none")
    request.commit(len(prompt.tokens), len(prompt.tokens))
    if name is not None:
        request.freeze(name, 0, len(prompt.tokens))
    request.release()


def _run(case: _Case, policy: str) -> _Found:
    """The plan and the rows of each layer, from prefilling the prompt."""
    from kvweave import models
    from kvweave.policies import policy_of
    from kvweave.runner import Runner

    chosen = policy_of(policy)
    loaded, tokenizer = models.load(case.model, case.dtype)
    runner = Runner(loaded, tokenizer, page_tokens=case.page_tokens)
    runner.insert_many(list(case.warm.items()))
    for prompt in case.before:
        runner.prefill(prompt, "full").release()
    with runner.prefill(case.parts, chosen, discover=case.discover, watched=False) as done:
        report = done.report
    tokens = runner.tokenize(case.parts).tokens.tolist()
    return _Found(report.plan.to_dict(), tokens, tokenizer, report.rows_per_layer)
