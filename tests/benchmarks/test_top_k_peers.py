"""Others' calls for the best of each row: those that are here find it, others say why not."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.cases import top_k_peers
from benchmarks.cases.top_k_peers import NOT_INSTALLED, peers

NAMES = [
    "torch.topk",
    "torch.topk, sorted",
    "flashinfer.top_k",
    "flashinfer.top_k_ragged_transform",
    "vllm cooperative_topk",
    "vllm persistent_topk",
    "vllm top_k_per_row_decode",
]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    return scores, torch.full((3,), 600, dtype=torch.int32)


def best(call) -> list[list[int]]:
    return call().long().sort().values.tolist()


def test_who_is_not_here_says_so(monkeypatch) -> None:
    spec = top_k_peers.find_spec
    monkeypatch.setattr(
        top_k_peers, "find_spec", lambda name: spec(name) if name == "torch" else None
    )
    found = peers(*rows(), 64)
    assert list(found) == NAMES
    assert [found[name] for name in NAMES[2:]] == [NOT_INSTALLED] * 5
    scores, _ = rows()
    wanted = torch.topk(scores, 64).indices.sort().values
    for name in NAMES[:2]:
        assert best(found[name]) == wanted.tolist()
    assert torch.equal(found["torch.topk, sorted"](), wanted)


@pytest.mark.parametrize("most", [64, 512])
def test_who_is_here_is_called_as_its_signature_says(monkeypatch, most: int) -> None:
    """Doubles with the signatures of FlashInfer 0.6 and 0.7 and of vLLM 0.26 and 0.33."""
    scores, counts = rows()

    def ragged(logits, offsets, lengths, k):
        assert offsets.dtype == lengths.dtype == torch.int32
        return (torch.topk(logits, k).indices + offsets[:, None]).int()

    def of_indexer(logits, lengths, indices, workspace, k, longest):
        assert workspace.dtype == torch.uint8
        assert longest == logits.shape[1]
        indices.copy_(torch.topk(logits, k).indices)

    def per_row(logits, next_n, lengths, indices, count, stride0, stride1, k):
        assert (next_n, count, stride0, stride1) == (1, 3, 600, 1)
        indices.copy_(torch.topk(logits, k).indices)

    flashinfer = ModuleType("flashinfer")
    flashinfer.top_k = lambda x, k: torch.topk(x, k)
    flashinfer.top_k_ragged_transform = ragged
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", ModuleType("vllm._custom_ops"))
    own = SimpleNamespace(top_k_per_row_decode=per_row)
    own.cooperative_topk = own.persistent_topk = of_indexer
    monkeypatch.setattr(top_k_peers.torch.ops, "_C", own, raising=False)
    monkeypatch.setattr(top_k_peers, "find_spec", lambda _: object())
    found = peers(scores, counts, most)
    wanted = torch.topk(scores, most).indices.sort().values.tolist()
    if most == 64:
        refusal = "ValueError: expected K of 512, 1024, 2048, got 64"
        for name in ("vllm cooperative_topk", "vllm persistent_topk"):
            assert found.pop(name) == refusal
    for name, call in found.items():
        assert best(call) == wanted, name


def test_many_rows_are_not_for_few(monkeypatch) -> None:
    monkeypatch.setattr(top_k_peers, "find_spec", lambda _: object())
    scores, counts = torch.zeros(65, 600), torch.full((65,), 600, dtype=torch.int32)
    found = peers(scores, counts, 512)
    assert found["vllm cooperative_topk"] == "ValueError: expected rows up to 64, got 65"


def test_a_package_without_its_kernels_says_why(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setattr(top_k_peers, "find_spec", lambda _: object())
    found = peers(*rows(), 64)
    assert str(found["flashinfer.top_k"]).startswith("AttributeError: ")
