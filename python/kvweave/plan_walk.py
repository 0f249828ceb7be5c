"""The one protocol between a policy and whoever carries its plans out: what comes next.

A walk asks a policy's generator for its steps, refuses those that cannot be carried out, and hands
the others out as tasks, one after the other. It knows positions and what was measured, and nothing
of the model: the runner and vLLM's layers carry out the same tasks, and refuse the same plans with
the same words.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from kvweave.closing import Closing
from kvweave.errors import InvalidArgument
from kvweave.plan import Draft, LayerPlan, Plans, PlanStep, Probe, ProbeResult, Rows, Salience

EARLY = (Probe.DEVIATION, Probe.SALIENCE)
"""Probes that are answered before the attention of their layer: `PlanWalk.measured`."""


@dataclass(frozen=True)
class LayerTask:
    """Rows of a layer are to be computed: which states go in is said by the kind of the task."""

    plan: LayerPlan


class Begin(LayerTask):
    """A pass begins: layer 0, of the embeddings of the plan's rows."""


class Further(LayerTask):
    """Layer 0 once more in the same pass, of the embeddings of rows that it did not compute yet.

    Their states join those of the rows before. Nothing is measured and no head restored.
    """


class Deeper(LayerTask):
    """The next layer, of the states behind the layer before, narrowed to the plan's rows."""


Task: TypeAlias = LayerTask | Draft


class PlanWalk(Closing):
    """A policy on its way through the layers of a model for one prompt.

    L layers; T `tokens`, of which plans may name those from `done` on. The logits from position
    `logits_from` on are wanted of the last pass, so that position and the last one have to be among
    its rows; with `logits_from` = T none are wanted, and layers may be without rows.

    A context manager: the policy's generator is closed at its end, whatever happened. After a
    refusal, or what the policy raised itself, the walk is over.
    """

    def __init__(
        self, policy: Plans, layers: int, tokens: int, *, done: int = 0, logits_from: int
    ) -> None:
        self.layers = layers
        self.tokens = tokens
        self.done = done
        self.logits_from = logits_from
        self._policy = _generator(policy)
        self._over = False
        # The plan of the layer that was handed out last, in the pass that is going on.
        self._plan: LayerPlan | None = None
        # Rows with states behind it, and whether layer 0 was planned a second time.
        self._states = self._last_rows = np.zeros(0, np.int32)
        self._extended = False
        self._seen: list[Rows] = []
        self._inside: list[tuple[Rows, Rows]] = []

    def close(self) -> None:
        """Ends the policy; safe to call twice.

        What the policy says to that is not heard: something else has gone wrong already.
        """
        self._over = True
        with suppress(Exception):
            self._policy.close()

    def advance(self, result: ProbeResult = None) -> Task | None:
        """What comes next, once a task is carried out; None at the end.

        `result`: what was measured behind the attention of its layer, or of a draft.

        # Errors
        `InvalidArgument` for a step that cannot be carried out, and an end before the last layer or
        without the rows whose logits are wanted; whatever the policy raises.
        """
        if self._measuring():
            raise InvalidArgument("plan walk: expected what was measured before attention first")
        try:
            return self._task(self._ask(result))
        except BaseException:
            self.close()
            raise

    def measured(self, result: torch.Tensor | Salience) -> LayerPlan:
        """The layer's own plan, once the policy knows what was measured before its attention.

        Its probe may be another that is answered before attention: SALIENCE after DEVIATION.

        # Errors
        As for `advance`.
        """
        before = self._plan
        if before is None or not self._measuring():
            raise InvalidArgument("plan walk: expected a probe that is answered before attention")
        try:
            said = self._ask(result)
            if before.probe is Probe.DEVIATION:
                plan = self._narrowed(before, said)
            else:
                plan = self._finished(before, said)
        except BaseException:
            self.close()
            raise
        self._plan, self._states = plan, plan.rows
        return plan

    def _measuring(self) -> bool:
        return not self._over and self._plan is not None and self._plan.probe in EARLY

    def _ask(self, result: ProbeResult) -> PlanStep | None:
        if self._over:
            raise InvalidArgument("plan walk: expected no question behind its end, got one")
        try:
            step = self._policy.send(result)
        except StopIteration:
            return None
        if step is None:
            # Not its end: what the policy meant to say next would be passed over.
            _refuse("policy: expected a LayerPlan or a Draft, got NoneType")
        return step

    def _task(self, step: PlanStep | None) -> Task | None:
        if step is None:
            self._end()
            return None
        if isinstance(step, Draft):
            return self._draft(step)
        plan = self._lawful(step)
        before = self._plan
        if before is None or before.layer + 1 == self.layers:
            if plan.layer != 0:
                _refuse(f"layer plan: expected layer 0 first, got {plan.layer}")
            return self._begin(plan)
        if plan.layer == 0 and before.layer > 0:
            return self._begin(plan)
        if plan.layer == 0 and not self._extended:
            return self._further(plan)
        if plan.layer != before.layer + 1:
            _refuse(f"layer plan: expected layer {before.layer + 1}, got {plan.layer}")
        self._expect_states(plan.rows)
        self._plan, self._states = plan, plan.rows
        return Deeper(plan)

    def _begin(self, plan: LayerPlan) -> Begin:
        self._plan, self._states, self._extended = plan, plan.rows, False
        return Begin(plan)

    def _further(self, plan: LayerPlan) -> Task | None:
        """Layer 0 once more: what the second plan says is of the rows that are new."""
        self._extended = True
        if plan.probe is not None or plan.restore:
            got = "heads to restore" if plan.probe is None else plan.probe.value
            _refuse(f"layer plan: expected nothing measured in layer 0 once more, got {got}")
        rows: Rows = np.setdiff1d(plan.rows, self._states, assume_unique=True)
        if not len(rows):
            return self._task(self._ask(None))
        self._states = self._known(np.union1d(self._states, rows))
        self._plan = some = among(plan, self._known(rows))
        return Further(some)

    def _draft(self, draft: Draft) -> Draft:
        tokens = _whole("draft: expected tokens", draft.tokens)
        since = _whole("draft: expected since", draft.since)
        drafts = _whole("draft: expected drafts", draft.drafts)
        if drafts < 1:
            _refuse(f"draft: expected drafts >= 1, got {drafts}")
        if tokens < 1 or not 0 <= since < self.layers:
            expected = f"tokens >= 1 and 0 <= since < {self.layers}"
            _refuse(f"draft: expected {expected}, got {tokens} and {since}")
        if self._plan is None:
            _refuse("draft: expected a pass with the last token before it, got none")
        if self._plan.layer + 1 < self.layers:
            _refuse(
                f"draft: expected all {self.layers} layers before it, got {self._plan.layer + 1}"
            )
        if not self._computed(self.tokens - 1):
            _refuse("draft: expected a pass with the last token before it, got none")
        return Draft(tokens, since, drafts)

    def _end(self) -> None:
        self._over = True
        reached = 0 if self._plan is None else self._plan.layer + 1
        if reached < self.layers:
            _refuse(f"layer plan: expected {self.layers} layers, got {reached}")
        if self.logits_from >= self.tokens:
            return
        for position in (self.logits_from, self.tokens - 1):
            if not self._computed(position):
                _refuse(
                    f"logits: expected position {position} among the computed rows, "
                    f"got {len(self._states)} rows without it"
                )

    def _computed(self, position: int) -> bool:
        at = int(np.searchsorted(self._states, position))
        return at < len(self._states) and int(self._states[at]) == position

    def _narrowed(self, before: LayerPlan, step: PlanStep | None) -> LayerPlan:
        """The same layer with the rows that the policy keeps once it knows how far KV moved."""
        if not isinstance(step, LayerPlan) or step.layer != before.layer:
            _refuse("layer plan: expected the same layer after a deviation probe")
        plan = self._lawful(step)
        self._expect_states(plan.rows)
        if plan.probe is Probe.DEVIATION:
            _expect_no_further(plan)
        return plan

    def _finished(self, before: LayerPlan, step: PlanStep | None) -> LayerPlan:
        """The same layer and rows, with what the policy chose once it knows the salience.

        What is written was written before: the first plan's local rows stay.
        """
        same = isinstance(step, LayerPlan) and step.layer == before.layer
        plan = self._lawful(step) if same else None
        if plan is None or plan.rows is not before.rows:
            _refuse("layer plan: expected the same layer and rows after a salience probe")
        if plan.probe in EARLY:
            _expect_no_further(plan)
        if plan.local_rows is not None and plan.local_rows is not before.local_rows:
            _refuse("local_rows: expected those of before the salience probe, got others")
        return replace(plan, local_rows=before.local_rows)

    def _lawful(self, step: Any) -> LayerPlan:
        """A plan whose fields can be carried out, with arrays of its own.

        Arrays of the same rows are the same array in all plans.
        """
        if not isinstance(step, LayerPlan):
            got = type(step).__name__
            _refuse(f"policy: expected a LayerPlan or a Draft, got {got}")
        layer = _whole("layer plan: expected a layer", step.layer)
        if step.probe is not None and not isinstance(step.probe, Probe):
            _refuse(f"layer plan: expected a Probe or none, got {type(step.probe).__name__}")
        rows = self._rows("rows", step.rows)
        if not len(rows) and self.logits_from < self.tokens:
            _refuse("layer plan: expected at least one row, got none")
        if len(rows) and not self.done <= int(rows[0]) <= int(rows[-1]) < self.tokens:
            _refuse(
                f"layer plan: expected rows in [{self.done}, {self.tokens}), "
                f"got {int(rows[0])} to {int(rows[-1])}"
            )
        plan = LayerPlan(
            layer,
            rows,
            step.probe,
            self._some("score_rows", step.score_rows, rows),
            None if step.local_rows is None else self._some("local_rows", step.local_rows, rows),
            None if step.ffn_rows is None else self._some("ffn_rows", step.ffn_rows, rows),
            _heads(step.restore),
        )
        if plan.probe in EARLY and (plan.ffn_rows is not None or plan.restore):
            assert plan.probe is not None
            _refuse(
                f"layer plan: expected ffn_rows and restore behind the {plan.probe.value} probe, "
                "got them before"
            )
        return plan

    def _rows(self, name: str, given: Any) -> Rows:
        """Sorted positions i32 [R] that nobody else writes to; the same array for the same rows."""
        if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in "iu":
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else None
            _refuse(f"{name}: expected positions i32 [R], got {got or type(given).__name__}")
        kept = self._seen_before(given)
        if kept is not None:
            return kept
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < 2**31:
            _refuse(f"{name}: expected positions >= 0, got {int(given.min())}")
        if np.any(given[1:] <= given[:-1]):
            _refuse(f"{name}: expected sorted positions, each once, got others")
        return self._known(given.astype(np.int32))

    def _known(self, rows: Rows) -> Rows:
        """The array that stands for these rows: one that is kept of the same rows, or this one."""
        kept = self._seen_before(rows)
        if kept is not None:
            return kept
        self._seen = [*self._seen, rows][-8:]
        return rows

    def _seen_before(self, rows: Rows) -> Rows | None:
        for at, kept in enumerate(self._seen):
            if np.array_equal(kept, rows):
                self._seen.append(self._seen.pop(at))
                return kept
        return None

    def _some(self, name: str, given: Any, rows: Rows) -> Rows:
        some = self._rows(name, given)
        if self._outside(some, rows):
            _refuse(f"{name}: expected some of the plan's rows, got others")
        return some

    def _expect_states(self, rows: Rows) -> None:
        outside = self._outside(rows, self._states)
        if outside:
            _refuse(
                f"layer plan: expected rows that the layer before computed, got {outside} others"
            )

    def _outside(self, some: Rows, rows: Rows) -> int:
        """How many of some rows are not among others; layers mostly plan the very same."""
        if some is rows or any(a is some and b is rows for a, b in self._inside):
            return 0
        outside = int(len(some) - np.isin(some, rows, assume_unique=True).sum())
        if not outside:
            self._inside = [*self._inside, (some, rows)][-8:]
        return outside


def among(plan: LayerPlan, rows: Rows) -> LayerPlan:
    """A plan of some of its rows: nothing is measured, nothing restored."""

    def kept(some: Rows | None) -> Rows | None:
        return None if some is None else np.intersect1d(some, rows, assume_unique=True)

    local, ffn = kept(plan.local_rows), kept(plan.ffn_rows)
    return LayerPlan(plan.layer, rows, local_rows=local, ffn_rows=ffn)


def _generator(given: Any) -> Plans:
    if not isinstance(given, Generator):
        _refuse(f"policy: expected a generator of plans, got {type(given).__name__}")
    return given


def _whole(what: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        _refuse(f"{what}, got {type(given).__name__}")
    return int(given)


def _heads(given: Any) -> tuple[int, ...]:
    if not isinstance(given, (tuple, list)):
        _refuse(f"restore: expected a tuple of heads, got {type(given).__name__}")
    return tuple(_whole("restore: expected heads", head) for head in given)


def _expect_no_further(plan: LayerPlan) -> NoReturn:
    assert plan.probe is not None
    _refuse(f"layer plan: expected no further probe before attention, got {plan.probe.value}")


def _refuse(text: str) -> NoReturn:
    raise InvalidArgument(text)
