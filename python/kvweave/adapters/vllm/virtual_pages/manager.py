"""vLLM's scheduler over virtual pages: it numbers them, and `Residency` says where they lie.

vLLM admits what its pool of numbers has room for. Here the arena has a say too: a request that it
has no blocks for needs, as far as vLLM is told, more numbers than are free, so it waits or another
is preempted; what is admitted always finds its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvweave.adapters.vllm import pool_managers
from kvweave.adapters.vllm.top_k.prompt_prefix import exact_tokens_of
from kvweave.adapters.vllm.virtual_pages.far_requests import FarRequests
from kvweave.adapters.vllm.virtual_pages.residency import Residency
from kvweave.adapters.vllm.virtual_pages.spec import VirtualPagesSpec


class VirtualPagesManager(FullAttentionManager):
    """Numbers of all pages of a request, and the blocks that its heads need of them."""

    supports_fine_grained_hash_lookup = False

    def __init__(self, kv_cache_spec: VirtualPagesSpec, **others: Any) -> None:
        super().__init__(kv_cache_spec, **others)
        layout, seats = kv_cache_spec.layout, kv_cache_spec.seats
        self.residency = Residency(layout, self.block_pool.num_gpu_blocks, seats)
        blocks = kv_cache_spec.home_blocks
        self.far = FarRequests(self.residency, blocks, seats) if layout.spills else None
        choosing = [pages for pages in layout.budgets if pages]
        # What later tokens are computed from, heads that choose have read a part of.
        self.exact = min(choosing) * self.block_size if choosing else None
        pool_managers.enter(self)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *others: Any,
        apply_admission_cap: bool = False,
        **named: Any,
    ) -> int:
        """Numbers that the request needs; more than are free where the arena has no room."""
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *others,
            apply_admission_cap=apply_admission_cap,
            **named,
        )
        if not (needed or apply_admission_cap or new_computed_blocks):
            # It goes on in a page that it has.
            return 0
        hit = _numbers(new_computed_blocks)
        held = len(self.req_to_blocks.get(request_id, ())) + len(hit)
        if apply_admission_cap:
            # Asked of a whole prompt before its first chunk is computed.
            in_flight: int = self.kv_cache_spec.in_flight
            lacking = partial(self.residency.lacking_in_time, num_tokens, in_flight, hit)
        else:
            fresh = max(-(-num_tokens // self.block_size) - held, 0)
            lacking = partial(self.residency.lacking, fresh, hit)
        missing = lacking()
        if missing and self.far is not None:
            with self.residency.sparing(hit):
                gone = self.far.make_room(lacking, self.pages_of, self._is_findable)
            self.block_pool.evict_blocks(set(gone))
            missing = lacking()
        if not missing:
            return needed
        return max(needed, int(self.block_pool.get_num_free_blocks()) + 1)

    def pages_of(self, request_id: str) -> list[int]:
        """The numbers of a request's pages."""
        return _numbers(self.req_to_blocks.get(request_id, ()))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Pages found in the prefix cache, with what their heads still keep of them."""
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        self.residency.adopt(request_id, _numbers(new_computed_blocks))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """New pages, and blocks for them; prefixes that lose theirs are no longer found."""
        fresh: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        if not fresh:
            return fresh
        numbers = _numbers(fresh)
        forgotten = self.residency.extend(request_id, numbers)
        self.block_pool.evict_blocks(set(forgotten))
        if self.far is not None:
            self.far.writes(request_id, numbers)
        return fresh

    def cache_blocks(self, request: Any, num_tokens: int, *others: Any, **named: Any) -> None:
        """Lets later requests find pages; of those that heads chose for, the exact ones alone."""
        if self.exact is not None:
            num_tokens = min(num_tokens, exact_tokens_of(request, self.exact))
        super().cache_blocks(request, num_tokens, *others, **named)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back what windows have left behind; the pages' numbers stay."""
        if not self.residency.has_left(request_id, processed_computed_tokens):
            return
        pages = _Numbers(self.req_to_blocks.get(request_id, ()))
        self.residency.advance(request_id, pages, processed_computed_tokens, self._is_findable)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Gives back all that a request holds."""
        self.residency.drop(request_id, self.pages_of(request_id), self._is_findable)
        if self.far is not None:
            self.far.drop(request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    @classmethod
    def find_longest_cache_hit(
        cls, *given: Any, block_pool: BlockPool, **named: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The stock manager's hit, up to where every class still has what the next row sees."""
        found, length = super().find_longest_cache_hit(*given, block_pool=block_pool, **named)
        (blocks,) = found
        manager = pool_managers.manager_of(block_pool, cls)
        assert manager is not None, "vLLM makes a pool's manager before it looks up prefixes"
        residency = manager.residency
        count = residency.longest_hit(_numbers(blocks))
        del blocks[count:]
        return (blocks,), min(length, count * residency.layout.page_tokens)

    def _is_findable(self, page: int) -> bool:
        return bool(self.block_pool.blocks[page].block_hash is not None)


class _Numbers(Sequence[int]):
    """The numbers of blocks, of which few are looked at in most steps."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return _numbers(self.blocks[index])
        return int(self.blocks[index].block_id)


def _numbers(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [int(block.block_id) for block in blocks]
