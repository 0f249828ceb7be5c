"""What is raised where memory runs out, and what goes on afterwards; on a GPU: test_cuda_*.py."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvweave import OutOfMemory, ops
from kvweave.device_memory import arena_pages, is_shortage, needs_memory
from kvweave.runner.decode.graph import StepGraphs


def test_a_result_beyond_the_hosts_memory_is_refused() -> None:
    outs = torch.zeros(1, 1, 1, 8).expand(2, 1 << 45, 1, 8)
    with pytest.raises(OutOfMemory, match="^merge_states: expected memory for it, got ") as refused:
        ops.merge_states(outs, torch.zeros(1, 1, 1).expand(2, 1 << 45, 1))
    assert isinstance(refused.value, MemoryError)
    assert isinstance(refused.value, RuntimeError)
    assert str(1 << 50) in refused.value.got


def test_pages_beyond_the_hosts_memory_are_refused() -> None:
    with pytest.raises(OutOfMemory, match="^arena: expected 72057594037927936 bytes on cpu") as why:
        arena_pages((1 << 40, 2, 16, 1024), torch.bfloat16, torch.device("cpu"))
    assert why.value.expected == "72057594037927936 bytes on cpu"


@pytest.mark.parametrize(
    ("error", "shortage"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_other_errors_stay_what_they_are(error, shortage) -> None:
    @needs_memory("this")
    def fail() -> None:
        raise error

    assert is_shortage(error) == shortage
    with pytest.raises(RuntimeError) as raised:
        fail()
    assert isinstance(raised.value, OutOfMemory) == shortage
    assert (raised.value is error) == (not shortage)


def test_the_innermost_name_stays() -> None:
    @needs_memory("inner")
    def inner() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with pytest.raises(OutOfMemory, match="^inner: expected memory for it, got Tried"):
        needs_memory("outer")(inner)()


class Graph:
    """What a captured step is to its owner."""

    replays = 0

    def pool(self) -> int:
        return 1

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch) -> Any:
    """Graphs of steps without a GPU, whose captures fail with what stands in `graphs.errors`."""
    made: Any = StepGraphs(SimpleNamespace(spec=None), None, None, None)
    made.errors = []

    @contextmanager
    def capture(*_: Any, **__: Any) -> Any:
        yield
        if made.errors:
            raise made.errors.pop(0)

    monkeypatch.setattr(made, "_forward", lambda size, rope: "logits")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


def a_size() -> Any:
    """A step of a size that reads no packed pages, before its first."""
    known = {"graph": None, "logits": None, "packed": None}
    return SimpleNamespace(tried=False, **known)


def test_a_capture_without_room_is_tried_again(graphs) -> None:
    size = a_size()
    graphs.errors = [torch.OutOfMemoryError("Tried to allocate 2.00 GiB")]
    captured = []
    for _ in range(5):
        assert graphs._run(size, None) == "logits"
        captured.append(size.graph is not None)
    assert captured == [False, False, False, True, True]
    assert size.graph.replays == 2
    assert graphs.capturable


def test_a_capture_that_fails_otherwise_is_the_last(graphs) -> None:
    size = a_size()
    graphs.errors = [RuntimeError("operation not permitted when stream is capturing")]
    for _ in range(4):
        assert graphs._run(size, None) == "logits"
    assert size.graph is None
    assert not graphs.capturable


def test_a_first_step_without_room_stays_the_first(graphs, monkeypatch) -> None:
    size = a_size()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "_forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            graphs._run(size, None)
    assert not size.tried
    assert graphs._run(size, None) == "logits"
    assert size.tried
