"""How vLLM's scheduler keeps the blocks of a sink: a manager for `SinkWindowSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from kvweave.adapters.vllm import pool_managers
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec

WINDOWS_APART = 1024
"""So many tokens at least are between two windows of a prompt that later prompts may find."""
_APART_BY = 4
"""And so many times a window, so that they are a quarter of what local heads compute at most."""


class SinkWindowManager(SlidingWindowManager):
    """Blocks between the sink and the window are given back; those of the sink stay.

    `given_back`: blocks that became free so, since the engine started.
    """

    def __init__(self, kv_cache_spec: SinkWindowSpec, **others: Any) -> None:
        super().__init__(kv_cache_spec, **others)
        self.sink_blocks = kv_cache_spec.sink_blocks
        self.given_back = 0
        pool_managers.enter(self)

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, **named: Any
    ) -> None:
        """Lets later prompts find windows of this one at intervals where vLLM asks for none.

        By default (0) it keeps those at the ends of prompts alone, so that the second prompt of a
        prefix computes it again. Blocks that are found so are free: whoever needs them has them.
        """
        if retention_interval == 0:
            retention_interval = self._windows_apart
        super().cache_blocks(request, num_tokens, retention_interval, **named)

    @property
    def _windows_apart(self) -> int:
        """Tokens between two such windows: whole blocks of all heads."""
        least = max(WINDOWS_APART, _APART_BY * int(self.sliding_window))
        whole = int(self.cache_hit_alignment_tokens)
        return -(-least // whole) * whole

    def held_blocks(self) -> int:
        """Blocks that requests hold now; one that several share counts once."""
        held: set[int] = set()
        for blocks in self.req_to_blocks.values():
            kept = blocks[: self.sink_blocks]
            for number in range(len(blocks) - 1, len(kept) - 1, -1):
                if blocks[number].is_null:
                    break
                held.add(blocks[number].block_id)
            held.update(block.block_id for block in kept if not block.is_null)
        return len(held)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back what no row to come sees."""
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        if skipped <= self.sink_blocks:
            return
        blocks = self.req_to_blocks[request_id]
        end = min(skipped, len(blocks))
        # Blocks are given back from the first on: where the last of them is gone, all are.
        if end <= self.sink_blocks or blocks[end - 1].is_null:
            return
        free = self.block_pool.get_num_free_blocks()
        self._remove_blocks_in_range(request_id, self.sink_blocks, end)
        self.given_back += self.block_pool.get_num_free_blocks() - free

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *others: Any,
        **named: Any,
    ) -> int:
        """Blocks that the request takes from the free ones, cached sink blocks among them."""
        taken = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *others, **named
        )
        if not new_computed_blocks:
            return int(taken)
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        kept = new_computed_blocks[: min(self.sink_blocks, skipped)]
        return int(taken) + int(self._get_num_evictable_blocks(kept))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Blocks found in the prefix cache: those of the sink are kept though the window is past.

        The stock manager leaves out all that is skipped, so the sink's are put in afterwards.
        """
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        blocks = self.req_to_blocks[request_id]
        for number, block in enumerate(new_computed_blocks[: self.sink_blocks]):
            if blocks[number] is not block:
                self.block_pool.touch([block])
                blocks[number] = block

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: SinkWindowSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **others: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The stock manager's hit, if the blocks of the sink are still there too."""
        found, length = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            **others,
        )
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for number in range(min(kv_cache_spec.sink_blocks, len(found[0]))):
            cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[number] = block
        return found, length

    @classmethod
    def reachable_block_mask(
        cls, start_block: int, end_block: int, *others: Any, **named: Any
    ) -> list[bool] | None:
        """Which blocks a later request may find: the stock manager's, and the sink's."""
        mask: list[bool] | None = super().reachable_block_mask(
            start_block, end_block, *others, **named
        )
        spec = named["kv_cache_spec"]
        if mask is not None:
            for number in range(start_block, min(spec.sink_blocks, end_block)):
                mask[number - start_block] = True
        return mask
