"""What is packed anew lies on the device before it is put in place."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from kvweave.runner.kv.aside import Aside
from kvweave.runner.tiers import staging
from kvweave.runner.tiers.staging import BETWEEN_BYTES, Staging
from versions import needs_cuda

CPU = torch.device("cpu")


def test_where_nothing_is_aside_it_stays() -> None:
    packed = torch.ones(5, 3)
    assert Staging(Aside(CPU)).sent(packed) is packed


def test_without_memory_it_is_sent_when_it_is_put_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_given: Any, **_named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    aside = Aside(CPU)
    aside.stream = cast("Any", "one of a device without memory")
    monkeypatch.setattr(staging.torch, "empty", refuses)
    packed = torch.ones(5, 3)
    assert Staging(aside).sent(packed) is packed


@needs_cuda
@pytest.mark.parametrize("size", [0, 1, 12, BETWEEN_BYTES, 2 * BETWEEN_BYTES + 4])
def test_it_is_there_when_it_has_been_sent(size: int) -> None:
    device = torch.device("cuda")
    staged, busy = Staging(Aside(device)), torch.randn(4096, 4096, device=device)
    packed = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for _ in range(20):
        busy = busy @ busy
    there = staged.sent(packed)
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), packed)
    if size % 4 == 0:
        numbers = packed.view(torch.float32)
        assert torch.equal(staged.sent(numbers).view(torch.uint8).cpu(), packed)
    staged.close()
