"""The scheduler's half: which requests have markers, and where their next tokens go."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvweave.adapters.vllm.connector import IdleConnector
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.segments.document_weighing import StepWork
from kvweave.adapters.vllm.segments.eligibility import checked_markers
from kvweave.adapters.vllm.segments.events import events_of
from kvweave.adapters.vllm.segments.known_documents import Change
from kvweave.adapters.vllm.segments.markers import SECTION, Markers
from kvweave.adapters.vllm.segments.message import Chunk, Prompt, SegmentMessage
from kvweave.adapters.vllm.segments.outcome import PromptOutcome
from kvweave.adapters.vllm.segments.stats import SegmentConnectorStats
from kvweave.errors import InvalidArgument

# A logger of vLLM's: nobody listens to others in its processes.
_log = logging.getLogger("vllm.kvweave.segments")


@dataclass
class _Marked:
    """A request with markers: its blocks, and how many tokens its prefill has (0: not begun).

    `cached`: those of them that vLLM's own prefix cache had. `outcome`: what the workers have said
    of the prompt so far.
    """

    request: Any
    markers: Markers
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    outcome: PromptOutcome | None = None

    def said(self) -> dict[str, Any] | None:
        """What the response says of the prompt, if the workers have said anything."""
        if self.outcome is None:
            return None
        return {"tokens": self.tokens, "cached": self.cached, **self.outcome.to_dict()}


class MarkedRequests:
    """Follows requests with markers from their arrival to their end.

    `group`: the cache group whose blocks, of `block_size` tokens, say where a request's rows go.
    `layers`: those of the model. `weighs`: the workers want to know what all requests of a step
    come to, marked or not.
    """

    def __init__(
        self, block_size: int, layers: int, group: int = 0, *, weighs: bool = False
    ) -> None:
        self.block_size = block_size
        self.layers = layers
        self.group = group
        self.weighs = weighs
        self._marked: dict[str, _Marked] = {}
        self._ended: list[str] = []
        self._reset = False

    def arrived(self, request: Any) -> None:
        """A new request; why its markers are not followed is a warning in the log."""
        try:
            markers = checked_markers(request)
            if markers is not None:
                markers.check_layers(self.layers)
        except InvalidArgument as error:
            _log.warning("request %s: %s; its marks have no effect", request.request_id, error)
            return
        if markers is not None:
            self._marked[request.request_id] = _Marked(request, markers)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """A request ended, or was aborted; what its response says of its prompt."""
        marked = self._marked.pop(request_id, None)
        if marked is None:
            return None
        self._ended.append(request_id)
        return marked.said()

    def reset(self) -> None:
        """Has the workers' stores lose what requests left there."""
        self._reset = True

    def heard(self, outcomes: dict[str, PromptOutcome]) -> None:
        """What the workers did with prompts in a step."""
        for name, outcome in outcomes.items():
            marked = self._marked.get(name)
            if marked is not None:
                marked.outcome = marked.outcome or PromptOutcome()
                marked.outcome.add(outcome)

    def message(self, scheduled: Any) -> SegmentMessage:
        """What the workers must know of a step, from vLLM's `SchedulerOutput`."""
        message = SegmentMessage(ended=self._ended, reset=self._reset)
        self._ended, self._reset = [], False
        for name in scheduled.preempted_req_ids or ():
            if name in self._marked:
                message.ended.append(name)
                self._marked[name].tokens = 0
        if self.weighs:
            message.work = StepWork.of(scheduled)
        if self._marked:
            self._add_chunks(message, scheduled)
        return message

    def _add_chunks(self, message: SegmentMessage, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            self._chunk(
                message, scheduled, new.req_id, new.num_computed_tokens, new.block_ids[self.group]
            )
        cached = scheduled.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for name, start, new_blocks in rows:
            marked = self._marked.get(name)
            if marked is None:
                continue
            given = [] if new_blocks is None else new_blocks[self.group]
            if name in cached.resumed_req_ids:
                marked.tokens, marked.blocks = 0, []
            if start < marked.tokens or not marked.tokens:
                self._chunk(message, scheduled, name, start, marked.blocks + given)

    def _chunk(
        self, message: SegmentMessage, scheduled: Any, name: str, start: int, blocks: list[int]
    ) -> None:
        marked = self._marked.get(name)
        if marked is None:
            return
        marked.blocks = list(blocks)
        prompt = None
        if not marked.tokens:
            tokens = list(marked.request.all_token_ids)
            prompt, marked.tokens = Prompt(tokens, marked.markers), len(tokens)
            # One that was preempted is looked up again.
            marked.cached, marked.outcome = start, None
        end = min(start + scheduled.num_scheduled_tokens[name], marked.tokens)
        number, slot = divmod(start, self.block_size)
        first = marked.blocks[number] * self.block_size + slot
        message.chunks.append(Chunk(name, start, end, first, prompt))


class SegmentSchedulerConnector(IdleConnector):
    """Tells `requests` what vLLM's scheduler does, and the workers what follows from it."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        whole = next(n for n, spec in enumerate(specs) if not isinstance(spec, SlidingWindowSpec))
        weighs = options_of(vllm_config.additional_config).store is not None
        size = int(specs[whole].block_size)
        layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.requests = MarkedRequests(size, layers, whole, weighs=weighs)
        self._changes: list[Change] = []

    def on_new_request(self, request: Any) -> None:
        """Takes note of markers."""
        self.requests.arrived(request)

    def reset_cache(self) -> bool:
        """Has the workers' stores lose what requests left there, before the next look-up.

        vLLM asks for that when somebody resets its caches, and whenever it goes to sleep.
        """
        self.requests.reset()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The message of a step."""
        return self.requests.message(scheduler_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once; the response says what became of the prompt.

        That of an answer of one token does not: vLLM ends it before it hands on what workers say.
        """
        said = self.requests.finished(request.request_id)
        return False, None if said is None else {SECTION: said}

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers of a step say of its prompts."""
        report = connector_output.kv_connector_stats
        if isinstance(report, SegmentConnectorStats):
            self.requests.heard(report.take_outcomes())
            self._changes += report.take_documents()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Documents that came into the workers' stores and went, for who routes by them."""
        if not self._changes:
            return ()
        changes, self._changes = self._changes, []
        return list(events_of(changes))
