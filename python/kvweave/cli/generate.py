"""`kvweave generate`: one prompt with reusable segments, streamed to the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvweave.cli.console import err, user_errors
from kvweave.cli.dtype import Dtype, read_dtype
from kvweave.cli.prompt_file import (
    FILE_HELP,
    PROMPT_HELP,
    prompt_parts,
    read_prompt,
    read_segments,
)


@user_errors
def generate(
    prompt: Annotated[str, typer.Argument(help=PROMPT_HELP)],
    segment: Annotated[list[str] | None, typer.Option(help=FILE_HELP)] = None,
    model: Annotated[
        str, typer.Option(help="A packaged model, a folder, or owner/name.")
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Dtype = None,
    policy: Annotated[
        str | None, typer.Option(help="How reused text is corrected; the profile's, or foresight.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile of `kvweave certify` for this model.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    chat: Annotated[bool, typer.Option(help="Use the model's chat template.")] = True,
) -> None:
    """Answer a prompt; each segment is encoded alone first, then reused where it stands."""
    segments = read_segments(segment or [])
    parts = prompt_parts(read_prompt(prompt), segments)
    with err().status(f"loading {model}"):
        from kvweave import models
        from kvweave.policies import policy_of
        from kvweave.policies.policy_profile import PolicyProfile
        from kvweave.runner import Runner, Sampling, chat_parts

        chosen = None if policy is None else policy_of(policy)
        certified = None if profile is None else PolicyProfile.read(profile)
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        loaded, tokenizer = models.load(model, read_dtype(dtype), device=device)
        runner = Runner(loaded, tokenizer, profile=certified)
    if chat:
        parts = chat_parts(tokenizer, parts)
    runner.insert_many([(name, segments[name]) for name in segments])
    for token in runner.stream(parts, chosen, max_new_tokens=max_new_tokens, sampling=sampling):
        sys.stdout.write(token.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
