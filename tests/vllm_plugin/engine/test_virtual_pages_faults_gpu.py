"""On a GPU: memory that the driver does not pin, and transfers that fail beside graphs."""

from __future__ import annotations

from typing import Any

import pytest

from kvweave.adapters.vllm.virtual_pages.far_memory import waits_for_host
from kvweave.runner.kv import host_arena
from ranked_pages import FULL, top_k
from test_gpu import pytestmark
from test_top_k import CHANGES, defined, written
from test_virtual_pages_faults import SAYS, TARGET, Faults, finished, seated_of
from test_virtual_pages_top_k import LONG, manager_of, nothing_is_left, sizes_of, with_host
from test_virtual_pages_top_k_gpu import started
from vllm_engines import answer, answers, same

__all__ = ["pytestmark"]

PINNED = pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])


@PINNED
@pytest.mark.parametrize("every", [1, 16])
def test_whose_transfers_fail_fails_alone(
    checkpoint: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, pinned: bool, every: int
) -> None:
    """Copies of a request to the host fail; where the host copies itself, those back too."""
    if not pinned:
        monkeypatch.setattr(host_arena, "register", lambda *given: False)
    kinds = [top_k(4, every), FULL]
    model, path = checkpoint("llama", **CHANGES), written(tmp_path, kinds)
    wanted = [defined("llama", kinds, given, SAYS, paced=every > 1) for given in LONG]
    slots, charged = sizes_of(path, spills=True, device="cuda")
    blocks = {"num_gpu_blocks_override": int(1.3 * charged / slots)}
    changes = {"enable_prefix_caching": False, **blocks}
    with started(model, with_host(path), "graphs", "float32", **changes) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        layer = next(iter(config.static_forward_context.values()))
        assert waits_for_host(layer.host) is not pinned
        assert config.cudagraph_mode.has_full_cudagraphs() is pinned
        same(answers(llm, LONG, SAYS), wanted)
        assert manager_of(llm).far.spilled > 20
        nothing_is_left(llm)
        Faults.rows = manager_of(llm).residency.layout.bound_rows
        for way in ("spill",) if pinned else ("spill", "fetch"):
            faults = Faults(way, 10**9, lambda: seated_of(llm, str(TARGET)))
            with faults.at_work():
                found = finished(llm, LONG)
            assert faults.hit
            said = found.pop(str(TARGET)).outputs[0]
            assert said.finish_reason == "error"
            assert list(said.token_ids) == wanted[TARGET].tokens[: len(said.token_ids)]
            others = [of for number, of in enumerate(wanted) if number != TARGET]
            same([answer(found[name]) for name in sorted(found)], others)
            nothing_is_left(llm)
        same(answers(llm, LONG, SAYS), wanted)
