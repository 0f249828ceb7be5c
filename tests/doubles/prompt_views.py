"""Made-up prompts for policies, and a driver that answers their plans with made-up measurements."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from kvweave.plan import Draft, Probe, PromptView, Salience

KV_HEADS = 2


def view_of(tokens, fresh, segments, *, prefix=0, layers=4, heads=None):
    """A prompt in pages of 16; every head is full unless told otherwise."""
    if heads is None:
        heads = np.zeros((layers, KV_HEADS, 2), np.int32)
    rows = np.asarray(fresh, np.int32)
    return PromptView(tokens, layers, 16, prefix, rows, tuple(segments), heads)


@st.composite
def views(draw, local=False):
    """A prompt with an exact prefix and reused segments, or none, between fresh intervals.

    With `local`, any head of any layer may have a window and a sink.
    """
    layers = draw(st.integers(2, 12))
    cursor = prefix = draw(st.integers(0, 40))
    fresh, segments = [], []
    for _ in range(draw(st.integers(0, 5))):
        gap = draw(st.integers(0, 30))
        fresh.extend(range(cursor, cursor + gap))
        cursor += gap
        length = draw(st.integers(1, 90))
        segments.append((cursor, cursor + length))
        cursor += length
    fresh.append(cursor)
    heads = np.zeros((layers, KV_HEADS, 2), np.int32)
    if local:
        reach = st.sampled_from([(0, 0), (1, 0), (8, 4), (64, 16), (1000, 300)])
        drawn = draw(st.lists(reach, min_size=heads.shape[0] * 2, max_size=heads.shape[0] * 2))
        heads = np.asarray(drawn, np.int32).reshape(heads.shape)
    return view_of(cursor + 1, fresh, segments, prefix=prefix, layers=layers, heads=heads)


def noise(view, plan, generator):
    """What a step may have measured: numbers in 0..1, of the shapes that it promises."""
    if isinstance(plan, Draft):
        return torch.rand(view.tokens, generator=generator)
    if plan.probe in (Probe.SCORES, Probe.CONTEXT, Probe.NORMS, Probe.VALUES):
        return torch.rand(view.tokens, generator=generator)
    if plan.probe is Probe.DEVIATION:
        return torch.rand(len(plan.rows), generator=generator)
    if plan.probe is Probe.SALIENCE:
        edge = torch.rand(view.heads.shape[1], generator=generator)
        return Salience(torch.rand(view.tokens, generator=generator), edge)
    return None


def drive(policy, view, seed=0, measure=noise):
    """Runs a policy's generator with made-up measurements; returns the plans and drafts."""
    generator = torch.Generator().manual_seed(seed)
    steps, plans = policy.plan(view), []
    plan = next(steps)
    while True:
        plans.append(plan)
        try:
            plan = steps.send(measure(view, plan, generator))
        except StopIteration:
            return plans
