"""torch's own operations: what one would write without us, and the plain device copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvweave.lab.bench.contenders.contender import Contender
from kvweave.lab.bench.device_timing import Call
from kvweave.lab.bench.problems import Copies, Merges, Problem, Rotations, Scores, Writes


def missing(device: torch.device) -> str:
    """It is always there."""
    return ""


def contenders(problem: Problem) -> Iterator[Contender]:
    """Everything but attention."""
    match problem:
        case Copies():
            yield Contender("device copy", lambda: _copy(problem), same=False)
        case Writes():
            yield Contender("torch index_put", lambda: _write(problem))
        case Rotations():
            yield Contender("torch addcmul", lambda: _rotate(problem))
        case Merges():
            yield Contender("torch", lambda: _merge(problem))
        case Scores():
            yield Contender("torch softmax", lambda: _score(problem))


def _copy(problem: Copies) -> Call:
    """The same bytes between halves in order, nothing turned."""
    half = len(problem.pages) // 2
    flat = problem.pages.view(torch.uint8).flatten(1)
    source, target = flat[:half], flat[-half:]
    return lambda: target.copy_(source)


def _write(problem: Writes) -> Call:
    targets = problem.targets()

    def call() -> torch.Tensor:
        for source, page, slot in targets:
            problem.pages[page, 0, slot] = problem.k[source]
            problem.pages[page, 1, slot] = problem.v[source]
        return problem.pages

    return call


def _rotate(problem: Rotations) -> Call:
    """Three launches for queries and three for keys, which move few bytes beyond the least."""
    out, half = torch.empty_like(problem.rows), problem.work.shape.head_dim // 2
    pairs = list(zip(problem.parts(problem.rows), problem.parts(out), strict=True))
    cos, sin = problem.cos[:, None], problem.sin[:, None]

    def call() -> torch.Tensor:
        for x, turned in pairs:
            torch.mul(x, cos, out=turned)
            turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
            turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    return call


def _merge(problem: Merges) -> Call:
    def call() -> torch.Tensor:
        weights = problem.lses.softmax(0)[..., None]
        return (problem.outs * weights).sum(0).to(problem.outs.dtype)

    return call


def _score(problem: Scores) -> Call:
    """Scores of one KV head at a time in bf16, softmax in f32: the matrix goes through memory."""
    pool = problem.pool
    k, _, _ = pool.dense()
    s = pool.shape
    q = problem.q.view(len(problem.q), s.kv_heads, -1, s.head_dim).permute(1, 2, 0, 3)
    keys = torch.arange(pool.tokens, device=pool.device)
    hidden = keys > pool.put(problem.positions)[:, None]

    def call() -> torch.Tensor:
        mass = torch.zeros(pool.tokens, device=pool.device)
        for head in range(s.kv_heads):
            scores = (q[head] @ k[0, head].T).float() * s.head_dim**-0.5
            mass += scores.masked_fill_(hidden, -torch.inf).softmax(-1).sum((0, 1))
        return mass

    return call
