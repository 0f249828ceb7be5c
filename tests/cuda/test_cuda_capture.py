"""What a capture survives."""

from __future__ import annotations

import gc

import torch

from kvweave.runner.decode.capture import captured
from kvweave.runner.kv.pinned import pin, register, unregister
from versions import needs_cuda

pytestmark = needs_cuda
SIZE = 1 << 20


def test_pinned_memory_that_becomes_garbage_is_given_back_behind_the_capture() -> None:
    device = torch.device("cuda")
    numbers, pages = torch.zeros(4, device=device), torch.empty(SIZE, dtype=torch.uint8)
    address, kept = pages.data_ptr(), pages.numpy()
    assert pin(pages, device)
    held: list[object] = [pages]
    held.append(held)
    del pages
    graph, often = torch.cuda.CUDAGraph(), gc.get_threshold()
    try:
        with captured(graph):
            gc.set_threshold(1)
            del held
            others = [[number] for number in range(1000)]
            more = numbers + 1
    finally:
        gc.set_threshold(*often)
    numbers += 1
    graph.replay()
    assert more.tolist() == [2.0] * 4
    assert len(others) == 1000
    gc.collect()
    # What is pinned already is not pinned again.
    assert register(address, SIZE, device)
    unregister([address])
    assert kept.nbytes == SIZE
