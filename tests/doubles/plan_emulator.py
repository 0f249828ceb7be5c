"""What a policy's plans mean, in plain torch: no pages, no ops, every mask written out.

Slow and whole: K, V of all tokens of a prompt lie in one tensor a layer. Segments are encoded
where they stand, which is the same as encoding them at 0 and moving their keys, but for rounding.
"""

from __future__ import annotations

import numpy as np
import torch

from kvweave.plan import Draft, LayerPlan, Probe, PromptView, Salience
from kvweave.policies import Full
from kvweave.runner.model.rope import Rotary
from rotary import rotated_by_torch


class Emulator:
    """Prefill by plans of one model under a head map; heads i32 [L, G, 2], (window, sink)."""

    def __init__(self, spec, heads):
        self.spec, self.heads, self.rotary = spec, heads, Rotary(spec)
        self.plans: list[LayerPlan] = []

    def prefill(self, tokens, segments, policy):
        """Logits f32 [R, V] of the last layer's rows, and the rows; segments are half-open."""
        length = len(tokens)
        shape = (length, self.spec.kv_heads, self.spec.head_dim)
        # One pair a layer, K then V: [T, G, D] each.
        self.kv = [[torch.zeros(shape) for _ in "kv"] for _ in self.spec.layers]
        self.table = self.rotary.table(length)
        reused = np.zeros(length, bool)
        for start, end in segments:
            self._run(tokens, Full(), start, end, np.arange(start, end), ())
            reused[start:end] = True
        reused[-1] = False
        spans = tuple((a, min(b, length - 1)) for a, b in segments)
        return self._run(tokens, policy, 0, length, np.flatnonzero(~reused), spans)

    def _run(self, tokens, policy, start, end, fresh, segments):
        """A policy over positions [start, end) that see nothing before `start`."""
        heads, rows = self.heads, np.asarray(fresh, np.int32)
        view = PromptView(end, len(self.spec.layers), 16, start, rows, segments, heads)
        ids = torch.as_tensor(np.asarray(tokens)).long()
        self.plans, self.start, self.end = [], start, end
        steps = policy.plan(view)
        plan, known, states = next(steps), None, None
        while True:
            self.plans.append(plan)
            if isinstance(plan, Draft):
                plan = steps.send(self._draft(plan, states))
                continue
            if plan.layer == 0:
                states = self.spec.embed(ids[None, plan.rows])[0]
            else:
                states = states[np.searchsorted(known, plan.rows)]
            q, k, v = self._project(plan, states)
            answer = None
            if plan.probe is Probe.DEVIATION:
                old_k, old_v = self.kv[plan.layer]
                apart = (k - old_k[plan.rows]).square() + (v - old_v[plan.rows]).square()
                known, plan = plan.rows, steps.send(apart.sum((1, 2)))
                continue
            self._write(plan, k, v)
            if plan.probe is Probe.SALIENCE:
                plan = steps.send(self._salience(plan, q, whole=True))
                self.plans.append(plan)
                self._write(plan, k, v)
            elif plan.probe is not None:
                answer = self._asked(plan, q)
            attended = self._attend(plan, q)
            states = self._finish(plan, states, attended)
            known = plan.rows
            try:
                plan = steps.send(answer)
            except StopIteration:
                return self.spec.head(self.spec.final_norm(states)).float(), known

    def _draft(self, step, states):
        """Mass f32 [T] that drafts give, a mean over their first tokens.

        `states` are those behind the last layer, the last token's the last of them.
        """
        logits = self.spec.head(self.spec.final_norm(states[-1]))
        firsts = logits.sort(descending=True).indices[: step.drafts]
        return sum(self._one_draft(step, first[None]) for first in firsts) / len(firsts)

    def _one_draft(self, step, said):
        """Mass f32 [T] that the likeliest tokens from one on give; all is as before."""
        length, kept, table = self.end, self.kv, self.table
        self.kv, mass = [list(pair) for pair in kept], torch.zeros(length)
        self.table = self.rotary.table(length + step.tokens)
        for at in range(length, length + step.tokens):
            states, rows = self.spec.embed(said[None])[0], np.asarray([at], np.int32)
            self.end = at + 1
            for layer, pair in enumerate(self.kv):
                plan = LayerPlan(layer, rows, Probe.SCORES, rows)
                q, k, v = self._project(plan, states)
                pair[:] = (torch.cat(both) for both in zip(pair, (k, v), strict=True))
                if layer >= step.since:
                    mass += self._asked(plan, q)[:length]
                states = self._finish(plan, states, self._attend(plan, q))
            said = self.spec.head(self.spec.final_norm(states[-1:])).argmax(-1)
        self.end, self.kv, self.table = length, kept, table
        return mass

    def _project(self, plan, states):
        layer, rows = self.spec.layers[plan.layer], len(plan.rows)
        x = layer.attention_in_norm(states)
        attention = layer.attention
        q, k, v = (
            part(x).view(rows, -1, self.spec.head_dim)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        turn = self.table.turns(torch.as_tensor(plan.rows).long())[layer.rope_key]
        return rotated_by_torch(q, *turn), rotated_by_torch(k, *turn), v

    def _write(self, plan, k, v):
        for head, (window, _) in enumerate(self.heads[plan.layer]):
            kept = np.ones(len(plan.rows), bool)
            if window and plan.local_rows is not None and head not in plan.restore:
                kept = np.isin(plan.rows, plan.local_rows)
            for stored, new in zip(self.kv[plan.layer], (k, v), strict=True):
                stored[plan.rows[kept], head] = new[kept, head]

    def _seen(self, rows, window, sink):
        """Bool [R, T]: what rows of a head with that window and sink may read."""
        at, row = torch.arange(self.end), torch.as_tensor(rows).long()[:, None]
        causal = (at <= row) & (at >= self.start)
        if not window:
            return causal
        return causal & ((at > row - window) | (at < self.start + sink))

    def _scores(self, plan, q, head):
        per = q.shape[1] // self.spec.kv_heads
        keys = self.kv[plan.layer][0][: self.end, head]
        mine = q[:, head * per : (head + 1) * per]
        return torch.einsum("rhd,td->hrt", mine, keys) * self.spec.layers[plan.layer].scale

    def _salience(self, plan, q, whole):
        """What score rows attend to; `whole`: every head reads everything up to the row."""
        asked = q[np.searchsorted(plan.rows, plan.score_rows)]
        mass, edges = torch.zeros(self.end), []
        for head, (window, sink) in enumerate(self.heads[plan.layer].tolist()):
            inside = self._seen(plan.score_rows, window, sink)
            seen = self._seen(plan.score_rows, 0, 0) if whole else inside
            share = self._scores(plan, asked, head).masked_fill(~seen, -torch.inf).softmax(-1)
            mass += share.sum((0, 1))
            edges.append((share * ~inside).sum(-1).mean())
        return Salience(mass, torch.stack(edges))

    def _asked(self, plan, q):
        """What a probe after the layer's K, V are written measures, f32 [T]."""
        asked = q[np.searchsorted(plan.rows, plan.score_rows)]
        places = plan.score_rows
        if plan.probe is Probe.CONTEXT:
            places = np.full(len(places), places[0] - 1)
        each, valued = torch.zeros(len(asked), self.end), torch.zeros(self.end)
        for head, (window, sink) in enumerate(self.heads[plan.layer].tolist()):
            seen = self._seen(places, window, sink)
            share = self._scores(plan, asked, head).masked_fill(~seen, -torch.inf).softmax(-1)
            share = share.nan_to_num(0.0)
            each += share.sum(0)
            valued += share.sum((0, 1)) * self.kv[plan.layer][1][: self.end, head].norm(dim=-1)
        if plan.probe is Probe.NORMS:
            return each.div(q.shape[1]).norm(dim=0)
        return valued if plan.probe is Probe.VALUES else each.sum(0)

    def _attend(self, plan, q):
        parts = []
        for head, (window, sink) in enumerate(self.heads[plan.layer]):
            reach = 0 if head in plan.restore else int(window)
            seen = self._seen(plan.rows, reach, int(sink))
            share = self._scores(plan, q, head).masked_fill(~seen, -torch.inf).softmax(-1)
            values = self.kv[plan.layer][1][: self.end, head]
            parts.append(torch.einsum("hrt,td->rhd", share, values))
        return torch.cat(parts, 1).flatten(1)

    def _finish(self, plan, states, attended):
        layer = self.spec.layers[plan.layer]
        states = states + layer.attention.o_proj(attended)
        ran = np.ones(len(plan.rows), bool)
        if plan.ffn_rows is not None:
            ran = np.isin(plan.rows, plan.ffn_rows)
        chosen = torch.as_tensor(ran)
        states[chosen] += layer.feed_forward(layer.feed_forward_in_norm(states[chosen]))
        return states
