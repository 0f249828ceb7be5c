"""vLLM's tiered offloading for engines on CPUs: all of it vLLM's own, but for the copies to a host.

vLLM makes the part in its workers for GPUs alone, where copies are streams and events. Here they
are done at once, by torch, between the engine's tensors and vLLM's shared region.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """`spec_name`, with this module's name as `spec_module_path`."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker's part; vLLM asks for it once in each worker."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyWorker(kv_caches, region, self.blocks_per_chunk)


class CopyWorker(OffloadingWorker):
    """Copies blocks as soon as it is told to."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self.region, self.blocks_per_chunk = region, blocks_per_chunk
        self.groups = kv_caches.group_data_refs
        self.blocks, self.chunks = [], []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self.blocks.append(cache.tensor.view(torch.int8).view(-1, page))
            view = region.create_next_worker_view(page * blocks_per_chunk)
            self.chunks.append(view.view(len(view), blocks_per_chunk, page))
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the engine's blocks to the host's chunks."""
        return self._copy(job_id, src_spec, dst_spec, to_chunks=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """From the host's chunks to the engine's blocks."""
        return self._copy(job_id, dst_spec, src_spec, to_chunks=False)

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All is done."""

    def shutdown(self) -> None:
        """Lets go of the region."""
        self.blocks, self.chunks = [], []
        self.region.cleanup()

    def _copy(self, job_id: int, engine: Any, host: Any, to_chunks: bool) -> bool:
        first_block = first_chunk = size = 0
        for group, count, index in zip(
            self.groups, engine.group_sizes, engine.block_indices, strict=True
        ):
            skip = index % self.blocks_per_chunk
            for at in range(count):
                chunk, place = divmod(skip + at, self.blocks_per_chunk)
                number = int(host.block_ids[first_chunk + chunk])
                block = int(engine.block_ids[first_block + at])
                for ref in group:
                    there = self.chunks[ref.tensor_idx][number, place]
                    here = self.blocks[ref.tensor_idx][block]
                    (there if to_chunks else here).copy_(here if to_chunks else there)
                    size += here.numel()
            first_block += count
            first_chunk += -(-(skip + count) // self.blocks_per_chunk) if count else 0
        self.done.append(TransferResult(job_id, True, size, 0.0))
        return True
