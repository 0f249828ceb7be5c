"""The scheduler's part of the connector: each step's changes for the workers, and reports."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvweave.adapters.vllm.metrics.scheduler import PoolReporter, group_name
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.virtual_pages.manager import VirtualPagesManager
from kvweave.adapters.vllm.virtual_pages.message import PageChanges


class PageSchedulerConnector(PoolReporter):
    """Sends changes of tables to the workers; reports what classes keep."""

    manager: VirtualPagesManager | None = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Finds the manager whose tables are sent.

        Errors: `Unsupported` where there is none: the model was not told to use virtual pages.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        ours = len(managers) == 1 and isinstance(managers[0], VirtualPagesManager)
        require("KvweavePages", ours, "kvweave.virtual_pages to be set", "a cache without")
        self.manager = managers[0]
        layout, spec = self.manager.residency.layout, self.manager.kv_cache_spec
        self.block_bytes = layout.block_pages * spec.num_states * spec.state_content_size_bytes
        self.home_bytes = layout.bound_rows * self.block_bytes // layout.block_pages
        pairs = zip(layout.spans, layout.budgets, strict=True)
        self.names = [group_name(span, pages) for span, pages in pairs]

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a token that a preempted request was computed meanwhile is to be dropped.

        Where pages may lie in the host's memory the step may have failed to bring them.
        """
        return options_of(self._vllm_config.additional_config).host_bytes is not None

    def build_connector_meta(self, scheduler_output: Any) -> PageChanges:
        """What changed since the last step."""
        assert self.manager is not None, "the scheduler binds its cache manager first"
        self.count_stalls(scheduler_output)
        far, pages = self.manager.far, self.manager.residency.pages
        return PageChanges(pages.take_changes(), None if far is None else far.take_changes())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There were blocks, for all that the request has by now."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.manager is not None and self.manager.far is not None:
            self.manager.far.know(request, self.manager.pages_of(request.request_id))

    def bytes_now(self) -> list[tuple[str, str, int]]:
        """What each class keeps, for requests or to be found again; all else is free to any."""
        assert self.manager is not None, "the scheduler binds its cache manager first"
        residency = self.manager.residency
        found = [
            (name, "resident", blocks)
            for name, blocks in zip(self.names, residency.resident_blocks(), strict=True)
        ]
        if residency.layout.spills and self.manager.far is not None:
            blocks = residency.layout.slots * len(residency.layout.choosing)
            found.append(("top-k", "slots", self.manager.far.away * blocks))
        found.append(("any", "free", residency.pages.stats()["free"]))
        return [(group, state, blocks * self.block_bytes) for group, state, blocks in found]

    def host_now(self) -> list[tuple[str, str, int]]:
        """What heads that choose keep in the host's memory; nothing where none may be there."""
        far = None if self.manager is None else self.manager.far
        if far is None:
            return []
        counts = {"held": far.held, "free": far.blocks - far.held}
        return [("top-k", state, blocks * self.home_bytes) for state, blocks in counts.items()]

    def spilled_now(self) -> int:
        """Bytes that one worker has copied there since the engine started."""
        far = None if self.manager is None else self.manager.far
        return 0 if far is None else far.spilled * self.home_bytes

    def given_back_now(self) -> Counter[str]:
        """Bytes that each class's windows left behind."""
        assert self.manager is not None, "the scheduler binds its cache manager first"
        blocks = zip(self.names, self.manager.residency.given_back, strict=True)
        return Counter({name: count * self.block_bytes for name, count in blocks if count})

    def is_idle(self) -> bool:
        """Whether no request holds pages."""
        assert self.manager is not None, "the scheduler binds its cache manager first"
        return not any(self.manager.req_to_blocks.values())
