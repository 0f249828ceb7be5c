"""Our ops, as an engine's step calls them: tables lie on the device, and a workspace is kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvweave import ops
from kvweave.lab.bench.contenders.contender import Contender
from kvweave.lab.bench.device_timing import Call
from kvweave.lab.bench.problems import (
    Attention,
    Copies,
    Layers,
    Merges,
    Problem,
    Rotations,
    Scores,
    Writes,
)
from kvweave.lab.bench.shapes import Decode

NAME = "kvweave"


def missing(device: torch.device) -> str:
    """It is always there."""
    return ""


def contenders(problem: Problem) -> Iterator[Contender]:
    """The op of the problem."""
    match problem:
        case Attention():
            yield Contender(NAME, lambda: _attend(problem))
        case Layers():
            yield Contender(NAME, lambda: _layers(problem))
        case Scores():
            yield Contender(NAME, lambda: _score(problem))
        case Copies():
            yield Contender(NAME, lambda: _copy(problem))
        case Writes():
            yield Contender(NAME, lambda: _write(problem))
        case Rotations():
            yield Contender(NAME, lambda: _rotate(problem))
        case Merges():
            yield Contender(NAME, lambda: lambda: ops.merge_states(problem.outs, problem.lses)[0])


def _layers(problem: Layers) -> Call:
    """A launch a layer, over tables and a workspace that all share."""
    first = problem.each[0].pool
    tables, space = first.entries(), ops.Workspace(first.device)
    calls = [_attend(layer, tables, space) for layer in problem.each]
    return lambda: [call() for call in calls]


def _attend(
    problem: Attention,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    workspace: ops.Workspace | None = None,
) -> Call:
    pool = problem.pool
    s, reach, rope = pool.shape, pool.reach(), pool.shape.rope()
    entries, offsets = tables or pool.entries()
    positions = pool.put(problem.positions)
    # What is not written stays NaN, which no check lets pass.
    out = torch.full_like(problem.q, torch.nan)
    kv = ops.PagedKv(pool.pages, 0, s.kv_heads, s.head_dim**-0.5, rope, reach=reach)
    workspace = workspace or ops.Workspace(pool.device)
    if isinstance(problem.work, Decode):

        def decode() -> torch.Tensor:
            return ops.attend_decode(
                problem.q,
                positions,
                entries,
                kv,
                entry_offsets=offsets,
                out=out,
                workspace=workspace,
            )[0]

        return decode
    rows = torch.tensor([0, len(positions)], dtype=torch.int32, device=pool.device)

    def prefill() -> torch.Tensor:
        return ops.attend_prefill(
            problem.q,
            positions,
            entries,
            kv,
            row_offsets=rows,
            entry_offsets=offsets,
            out=out,
            workspace=workspace,
        )[0]

    return prefill


def _score(problem: Scores) -> Call:
    pool = problem.pool
    s = pool.shape
    kv = ops.PagedKv(pool.pages, 0, s.kv_heads, s.head_dim**-0.5, s.rope())
    entries, offsets = pool.entries()
    positions = pool.put(problem.positions)

    def call() -> torch.Tensor:
        return ops.score_tokens(
            problem.q,
            positions,
            entries,
            kv,
            entry_offsets=offsets,
            tokens=pool.tokens,
        )

    return call


def _copy(problem: Copies) -> Call:
    def call() -> torch.Tensor:
        ops.copy_rerotate(
            problem.pages,
            problem.copies,
            problem.rope,
            kv_heads=problem.work.shape.kv_heads,
            layers=problem.layers,
        )
        return problem.pages

    return call


def _write(problem: Writes) -> Call:
    def call() -> torch.Tensor:
        given = (problem.pages, 0, problem.k, problem.v, problem.slots)
        ops.write_pages(*given, reach=problem.reach)
        return problem.pages

    return call


def _rotate(problem: Rotations) -> Call:
    q, k = problem.parts(problem.rows)

    def call() -> torch.Tensor:
        ops.rotate_rows(q, k, problem.cos, problem.sin)
        return problem.rows

    return call
