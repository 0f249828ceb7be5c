"""A chunk of an admitted prompt, as a recovery policy sees it: a prompt of its own."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.adapters.vllm.segments.store import AdmittedPrompt
from kvweave.errors import InvalidArgument
from kvweave.plan import LayerPlan, Plans, ProbeResult, PromptView, Rows, Salience, one_pass
from kvweave.plan_walk import LayerTask, PlanWalk, Task


class ChunkWalk:
    """The walk of a policy over tokens [start, end) of a prompt, and what is next of it.

    Tokens before `start` are done, so they count as the chunk's exact prefix. A chunk that is exact
    in the store has no row to compute. Logits are wanted of the prompt's last token alone, and a
    chunk before it may leave its layers without rows. `task`: what comes next, None at the end.
    """

    def __init__(
        self, admitted: AdmittedPrompt, start: int, end: int, layers: int, kv_heads: int
    ) -> None:
        self.admitted = admitted
        self.start, self.end = start, end
        at = np.flatnonzero(admitted.reused[start:end]).astype(np.int32)
        self.reused: Rows = at + np.int32(start)
        prefix = min(max(start, admitted.prefix), end)
        fresh = admitted.fresh
        inside = fresh[np.searchsorted(fresh, prefix) : np.searchsorted(fresh, end)]
        clipped = [(max(a, prefix), min(b, end)) for a, b in admitted.segments]
        view = PromptView(
            tokens=end,
            layers=layers,
            page_tokens=16,
            prefix=prefix,
            fresh=inside,
            segments=tuple((a, b) for a, b in clipped if a < b),
            heads=np.zeros((layers, kv_heads, 2), np.int32),
        )
        nothing = one_pass(layers, np.zeros(0, np.int32))
        policy: Plans = nothing if prefix == end else admitted.policy.plan(view)
        wanted = end - 1 if self.ends_prompt else end
        self.walk = PlanWalk(policy, layers, end, done=prefix, logits_from=wanted)
        self.task: Task | None = self._expected(self.walk.advance())

    @property
    def ends_prompt(self) -> bool:
        """Whether the prompt's last token is the chunk's."""
        return self.end == self.admitted.tokens

    @property
    def plan(self) -> LayerPlan:
        """The plan of the layer that is being computed."""
        assert isinstance(self.task, LayerTask)
        return self.task.plan

    def advance(self, result: ProbeResult) -> None:
        """The current task is carried out; `result` is what it measured, if anything."""
        self.task = self._expected(self.walk.advance(result))

    def measured(self, result: torch.Tensor | Salience) -> None:
        """The same layer goes on by what was measured before its attention."""
        assert isinstance(self.task, LayerTask)
        self.task = type(self.task)(self.walk.measured(result))
        self._expected(self.task)

    def close(self) -> None:
        """Ends the policy."""
        self.walk.close()

    def _expected(self, task: Task | None) -> Task | None:
        """Refuses what only a head map has: all heads of the store are full."""
        if isinstance(task, LayerTask) and task.plan.restore:
            self.close()
            raise InvalidArgument(
                "restore: expected a head of a window group, got one that is full: "
                f"{task.plan.restore[0]} in layer {task.plan.layer}"
            )
        return task
