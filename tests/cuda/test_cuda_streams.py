"""Every op on CUDA runs on the current stream, waits for nothing, and is captured in graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from cuda_steps import NAMES, Step, steps
from kvweave import InvalidArgument, ops
from kvweave.ops.dispatch import stream_of
from versions import needs_cuda

pytestmark = needs_cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], dtype) -> None:
    for a, b in zip(got, wanted, strict=True):
        limit = LIMIT[dtype]
        torch.testing.assert_close(
            a.cpu().double(), b.double(), rtol=limit, atol=limit, equal_nan=True
        )


def renewed(step: Step, seed: int) -> dict[str, torch.Tensor]:
    numbers = step.renew(torch.Generator().manual_seed(seed))
    return {name: values.pin_memory() for name, values in numbers.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_the_current_stream(name, dtype) -> None:
    step = steps(dtype)[name]
    step.place(renewed(step, 1))
    step.run()
    torch.cuda.synchronize()
    numbers = renewed(step, 2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        step.place(numbers)
        results = tuple(x.to("cpu", non_blocking=True) for x in step.run())
    stream.synchronize()
    same(results, step.wanted(numbers), dtype)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_the_handle_is_that_of_the_current_stream(device) -> None:
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert stream_of(torch.device(device)) == stream.cuda_stream


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_captured_in_a_graph(name, dtype) -> None:
    step = steps(dtype)[name]
    step.place(renewed(step, 0))
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step.run()
    for seed in range(1, 4):
        numbers = renewed(step, seed)
        step.place(numbers)
        graph.replay()
        torch.cuda.synchronize()
        same(results, step.wanted(numbers), dtype)


def capture_everything_cold() -> None:
    """The first calls of a process, tables not yet on the device and kernels not loaded."""
    every = steps(torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {name: step.run() for name, step in every.items()}
    for name, step in every.items():
        numbers = renewed(step, 5)
        step.place(numbers)
        graph.replay()
        torch.cuda.synchronize()
        same(results[name], step.wanted(numbers), torch.bfloat16)


def test_the_first_call_may_be_captured() -> None:
    code = "import test_cuda_streams as t; t.capture_everything_cold(); print('captured')"
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("captured"), done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits(name) -> None:
    """With a long kernel ahead on the stream, calls with tables on either side return at once."""
    step = steps(torch.bfloat16)[name]
    numbers = renewed(step, 1)
    step.place(numbers)
    step.run()
    tables = {k: v.clone() for k, v in numbers.items() if v.dtype == torch.int32}
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    marker = torch.cuda.Event()
    marker.record()
    step.run()
    if step.host_tables:
        step.call({**step.inputs, **tables})
    assert not marker.query()
    torch.cuda.synchronize()


def test_a_table_on_the_host_is_not_captured() -> None:
    pages = torch.zeros(6, 2, 16, 64, device="cuda")
    k = torch.zeros(1, 2, 64, device="cuda")
    slots = np.array([[2, 0]], np.int32)
    ops.write_pages(pages, 0, k, k, slots)
    graph = torch.cuda.CUDAGraph()
    words = "slots: expected a table on cuda while a graph is captured, got one on cpu"
    with torch.cuda.graph(graph), pytest.raises(InvalidArgument, match=words):
        ops.write_pages(pages, 0, k, k, slots)


def test_threads_call_the_same_op() -> None:
    step = steps(torch.float32)["attend_prefill"]
    numbers = renewed(step, 3)
    step.place(numbers)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(step.run) for _ in range(8)]
        results = [future.result() for future in futures]
    torch.cuda.synchronize()
    wanted = step.wanted(numbers)
    for result in results:
        same(result, wanted, torch.float32)
