"""The runner on a CUDA device: against transformers' own forward there, and against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from cached_prompts import knowledge, logits_of
from families import FAMILIES, greedy, random_tokens, reference, tiny
from head_maps import CLASSES, classes_of, head_map, masked_greedy, masked_reference
from kvweave.policies import CacheBlend, Epic, SparseX
from kvweave.runner import Runner, Sampling
from kvweave.runner.clock import Clock
from kvweave.runner.decode.graph import moves_for, rows_for
from plan_policies import Planned, Restoring
from scarce_memory import room_on_gpu

STATUS = kvweave.cuda_status()
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not STATUS.startswith("available"), reason=f"kvweave: {STATUS}"),
]

DEVICE = "cuda"
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""Largest difference of two logits of the tiny models that are the same but for rounding."""


def has_experts(model: Any) -> bool:
    """Experts pick their rows by looking at numbers on the host: such a step is not captured."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def on_device(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return tiny(name, **changes).to(DEVICE, dtype)


def runner_of(model: Any, **settings: Any) -> Runner:
    return Runner(model, **{"max_tokens": 2048, "progress": False, **settings})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param, on_device(request.param)


@pytest.mark.parametrize("length", [1, 17, 150])
def test_families_full(family, length) -> None:
    _, model = family
    tokens = random_tokens(length, length)
    with runner_of(model).prefill(tokens, "full", logits_from=0) as done:
        assert done.logits.is_cuda
        assert torch.allclose(done.logits.cpu(), reference(model, tokens), atol=1e-4, rtol=0)


def test_families_decode(family) -> None:
    _, model = family
    runner, tokens = runner_of(model), random_tokens(50, 3)
    made = runner.generate(tokens, "full", max_new_tokens=40, stop=())
    assert made.tokens == greedy(model, tokens, 40)
    graphs = runner._decoder.graphs
    if runner._prefiller.rotary.is_fixed:
        assert graphs is not None
        assert graphs.capturable == (not has_experts(model))
    else:
        assert graphs is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_half_precision_full(name, dtype) -> None:
    model, tokens = on_device(name, dtype, head_dim=64), random_tokens(200, 1)
    with runner_of(model).prefill(tokens, "full", logits_from=0) as done:
        apart = (done.logits.cpu() - reference(model, tokens)).abs().max()
        assert float(apart) <= ROUNDING[dtype]


def test_the_pages_are_the_only_arena() -> None:
    runner = runner_of(on_device())
    pages = runner._prefiller.pages
    assert runner.cache.arena is pages
    assert pages.is_cuda
    runner.cache.check()


# ---- reuse --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["materialise", "share"])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma3"])
@pytest.mark.parametrize(
    "policy",
    [
        SparseX(boundary=0, top_k=1.0),
        SparseX(boundary=100),
        CacheBlend(1.0, 1.0),
        Epic(first=1000),
    ],
    ids=["sparsex-all-rows", "sparsex-all-layers", "cacheblend-all", "epic-all"],
)
def test_recomputing_every_row_is_full(name, mode, policy) -> None:
    runner = runner_of(on_device(name), mode=mode)
    parts = knowledge(runner, 3)
    exact, _ = logits_of(runner, parts, "full")
    got, report = logits_of(runner, parts, policy)
    assert report.reused_segment > 0.8 * report.tokens
    assert torch.allclose(got, exact, atol=1e-4, rtol=0)
    runner.cache.check()


@pytest.mark.parametrize("policy", ["naive", "epic", "cacheblend", "sparsex", SparseX(boundary=0)])
def test_the_gpu_plans_and_computes_what_the_cpu_does(policy) -> None:
    host, device = runner_of(tiny("qwen3")), runner_of(on_device("qwen3"))
    made = [logits_of(runner, knowledge(runner, 3), policy) for runner in (host, device)]
    (wanted, planned), (got, report) = made
    assert report.rows_per_layer == planned.rows_per_layer
    assert torch.allclose(got.cpu(), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_sharing_is_materialising_within_rounding(dtype) -> None:
    logits, held = [], []
    for mode in ("materialise", "share"):
        runner = runner_of(on_device("llama", dtype), mode=mode)
        got, report = logits_of(runner, knowledge(runner, 3), "naive")
        logits.append(got)
        held.append(report.kv_bytes)
        assert report.mode == mode
    assert float((logits[0] - logits[1]).abs().max()) <= ROUNDING[dtype]
    assert held[1] < 0.6 * held[0]


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shared", [16, 64, 80, 300])
def test_prefix_hit_is_full_within_rounding(shared, dtype) -> None:
    """A library of a GPU picks kernels by shape: bits may differ, where on the CPU they do not."""
    runner = runner_of(on_device("llama", dtype))
    tokens, first = random_tokens(341, shared), random_tokens(341, shared + 1)
    first[:shared] = tokens[:shared]
    with runner.prefill(tokens, "full", logits_from=shared) as done:
        exact = done.logits.clone()
    runner.prefill(first, "prefix", namespace="prefix").release()
    with runner.prefill(tokens, "prefix", logits_from=shared, namespace="prefix") as done:
        assert done.report.reused_prefix >= shared
        start = done.report.reused_prefix - shared
        apart = (done.logits - exact)[start:].abs().max()
        assert float(apart) <= ROUNDING[dtype]


# ---- decode -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoding() -> Runner:
    return runner_of(on_device(), max_tokens=8192)


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 9, 20])
def test_batch_equals_alone(decoding, requests) -> None:
    """Requests of unlike lengths that end at unlike times, beyond the room made for entries."""
    prompts = [random_tokens(5 + 13 * i, i) for i in range(requests)]
    stop = tuple(range(8))
    alone = [decoding.generate(p, "full", max_new_tokens=30, stop=stop).tokens for p in prompts]
    batch = decoding.generate_batch(prompts, "full", max_new_tokens=30, stop=stop)
    assert [made.tokens for made in batch] == alone
    decoding.cache.check()


def test_a_long_answer_outgrows_its_tables(decoding) -> None:
    model_tokens = greedy(on_device(), random_tokens(3, 1), 900)
    made = decoding.generate(random_tokens(3, 1), "full", max_new_tokens=900, stop=())
    assert made.tokens == model_tokens


def test_decoding_over_shared_segments() -> None:
    runner = runner_of(on_device(), mode="share")
    copied = runner_of(on_device())
    made = [
        r.generate_batch([knowledge(r, 3)] * 2, "naive", max_new_tokens=24, stop=(), remember=False)
        for r in (runner, copied)
    ]
    assert [m.tokens for m in made[0]] == [m.tokens for m in made[1]]
    assert made[0][0].tokens == made[0][1].tokens


def test_stream_says_what_generate_says(decoding) -> None:
    whole = decoding.generate(random_tokens(40, 2), "full", max_new_tokens=20, stop=())
    said = list(decoding.stream(random_tokens(40, 2), "full", max_new_tokens=20, stop=()))
    assert [token.token for token in said] == whole.tokens
    assert decoding.cache.stats()["held"] == 0


def test_sampling_is_seeded_and_batch_independent(decoding) -> None:
    prompt = random_tokens(30, 4)
    hot = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7)
    once = decoding.generate(prompt, "full", max_new_tokens=8, sampling=hot, stop=())
    again = decoding.generate_batch(
        [prompt] * 2, "full", max_new_tokens=8, sampling=hot, stop=(), remember=False
    )
    assert once.tokens == again[0].tokens == again[1].tokens
    cold = Sampling(temperature=1.0, seed=8)
    other = decoding.generate(prompt, "full", max_new_tokens=8, sampling=cold, stop=())
    assert other.tokens != once.tokens


def test_second_turn_reuses_the_first_turns_blocks(decoding) -> None:
    first = random_tokens(100, 6)
    answer = decoding.generate(first, "prefix", max_new_tokens=40, namespace="chat", stop=())
    tokens = [*first.tolist(), *answer.tokens, 1, 2, 3]
    with decoding.prefill(tokens, "full", logits_from=0) as done:
        exact = done.logits[-1].clone()
    with decoding.prefill(tokens, "prefix", namespace="chat") as done:
        assert done.report.reused_prefix == len(tokens) - 4
        assert torch.allclose(done.logits[-1], exact, atol=1e-4, rtol=0)


# ---- heads of unlike reach ------------------------------------------------------------------

MAPPED = ["llama", "qwen2-sliding", "gemma3", "qwen3", "llama-dynamic"]


def mapped(model: Any, classes: Any = CLASSES, **settings: Any) -> tuple[Runner, np.ndarray]:
    """A runner with a head map, and its classes."""
    plain = runner_of(model, max_tokens=64, check=False)
    dealt = classes_of(model, classes)
    return runner_of(model, heads=head_map(plain.spec, dealt), **settings), dealt


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("name", MAPPED)
def test_local_heads_are_the_models_own_under_a_mask(name, chunk) -> None:
    model, tokens = on_device(name), random_tokens(150, 2)
    runner, classes = mapped(model, chunk_tokens=chunk)
    with runner.prefill(tokens, "full", logits_from=0, remember=False) as done:
        wanted = masked_reference(model, classes, tokens)
        assert torch.allclose(done.logits.cpu(), wanted, atol=1e-4, rtol=0)
    runner.cache.check()


@pytest.mark.parametrize("name", MAPPED)
def test_decoding_with_local_heads_is_the_models_own_under_a_mask(name) -> None:
    """Far enough that windows leave blocks behind and tables run out of room."""
    model = on_device(name)
    runner, classes = mapped(model)
    prompts = [random_tokens(n, n) for n in (5, 70)]
    wanted = [masked_greedy(model, classes, tokens, 60) for tokens in prompts]
    made = runner.generate_batch(prompts, "full", max_new_tokens=60, stop=())
    assert [one.tokens for one in made] == wanted
    assert runner.cache.stats()["held"] == 0


@pytest.mark.parametrize("requests", [1, 3, 9])
def test_a_batch_of_local_heads_is_each_alone(requests) -> None:
    runner, _ = mapped(on_device(), max_tokens=8192)
    prompts = [random_tokens(5 + 13 * i, i) for i in range(requests)]
    alone = [runner.generate(p, "full", max_new_tokens=90, stop=()).tokens for p in prompts]
    batch = runner.generate_batch(prompts, "full", max_new_tokens=90, stop=())
    assert [made.tokens for made in batch] == alone
    runner.cache.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_local_heads(dtype) -> None:
    model, tokens = on_device("llama", dtype, head_dim=64), random_tokens(200, 1)
    runner, classes = mapped(model)
    with runner.prefill(tokens, "full", logits_from=0) as done:
        apart = (done.logits.cpu() - masked_reference(model, classes, tokens)).abs().max()
        assert float(apart) <= ROUNDING[dtype]


def test_a_map_of_full_heads_changes_no_bit() -> None:
    model, tokens = on_device("llama", torch.bfloat16, head_dim=64), random_tokens(200, 1)
    said = []
    for runner in (runner_of(model), mapped(model, [None])[0]):
        with runner.prefill(tokens, "full", logits_from=0, remember=False) as done:
            logits = done.logits.clone()
        answer = runner.generate(tokens, "full", max_new_tokens=30, stop=(), remember=False)
        said.append((logits, answer.tokens))
    assert torch.equal(said[0][0], said[1][0])
    assert said[0][1] == said[1][1]


@pytest.mark.parametrize("policy", ["naive", "epic"])
def test_sharing_with_local_heads_is_materialising(policy) -> None:
    said = []
    for mode in ("materialise", "share"):
        runner, _ = mapped(on_device(), mode=mode)
        parts = knowledge(runner, 3)
        logits, _ = logits_of(runner, parts, policy)
        made = runner.generate(parts, policy, max_new_tokens=24, stop=(), remember=False)
        said.append((logits, made.tokens))
    assert torch.allclose(said[0][0], said[1][0], atol=1e-4, rtol=0)
    assert said[0][1] == said[1][1]


@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_local_rows_on_the_gpu_are_those_of_the_cpu(mode) -> None:
    said = []
    for model in (tiny("llama"), on_device()):
        runner, _ = mapped(model, mode=mode)
        policy = Planned(lambda view, layer: {"local_rows": view.fresh, "ffn_rows": view.fresh})
        logits, report = logits_of(runner, knowledge(runner, 3), policy)
        said.append((logits.cpu(), report.flops))
    assert torch.allclose(said[0][0], said[1][0], atol=1e-4, rtol=0)
    assert said[0][1] == said[1][1]


def test_restored_heads_are_full_ones() -> None:
    model, tokens = on_device(), random_tokens(150, 15)
    runner, classes = mapped(model)
    local = classes[..., 0] > 0
    policy = Restoring(lambda layer, _: tuple(np.flatnonzero(local[layer])))
    made = runner.generate_batch([tokens, tokens[:40]], policy, max_new_tokens=40, stop=())
    full = np.zeros_like(classes)
    assert [len(one.report.restored) for one in made] == [int(local.sum())] * 2
    for one, ids in zip(made, (tokens, tokens[:40]), strict=True):
        assert one.tokens == masked_greedy(model, full, ids, 40)
    assert len(policy.seen) == 8
    assert all(found.edge.is_cuda and found.mass.is_cuda for found in policy.seen)


def test_a_prefill_with_local_heads_waits_only_at_its_end(monkeypatch) -> None:
    runner, _ = mapped(on_device("qwen3", torch.bfloat16, head_dim=64), chunk_tokens=64)
    parts = knowledge(runner, 3)
    logits_of(runner, parts, "full")

    def wait(_: Clock) -> None:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()

    monkeypatch.setattr(Clock, "wait", wait)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with runner.prefill(parts, "full", remember=False) as done:
            assert len(done.logits) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sizes_of_graphs() -> None:
    assert [rows_for(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]
    assert [moves_for(8, n) for n in (1, 2, 3, 4, 5)] == [16, 32, 64, 64, 128]


# ---- what must not happen -----------------------------------------------------------------


def test_full_pool_takes_nothing() -> None:
    runner = runner_of(on_device(), max_tokens=256, check=False)
    with pytest.raises(kvweave.PoolFull):
        runner.prefill(random_tokens(1000, 1), "full")
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0
    with runner.prefill(random_tokens(200, 2), "full") as held:
        with pytest.raises(kvweave.PoolFull):
            runner.generate(random_tokens(100, 3), "full", max_new_tokens=4)
        runner.cache.check()
        tokens = random_tokens(40, 4)
        made = runner.generate(tokens, "full", max_new_tokens=4, stop=(), remember=False)
        assert made.tokens == greedy(on_device(), tokens, 4)
        assert held.request.length == 200
    runner.cache.check()


def test_an_arena_beyond_the_devices_memory_is_refused() -> None:
    model, tokens = on_device(), random_tokens(40, 4)
    most = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(kvweave.OutOfMemory, match=r"arena: expected \d+ bytes on cuda") as refused:
        Runner(model, arena_bytes=2 * most, progress=False)
    assert "Tried to allocate" in refused.value.got
    made = runner_of(model).generate(tokens, "full", max_new_tokens=4, stop=())
    assert made.tokens == greedy(model, tokens, 4)


def test_memory_that_runs_out_takes_nothing() -> None:
    """The device has no room for what a long prompt needs besides its pages."""
    model, tokens = on_device(hidden_size=1024, intermediate_size=8192), random_tokens(8000, 1)
    runner = runner_of(model, max_tokens=16384, check=False)
    short = tokens[:40]
    wanted = runner.generate(short, "full", max_new_tokens=4, stop=(), remember=False).tokens
    with (
        room_on_gpu(32 << 20),
        pytest.raises(kvweave.OutOfMemory, match="^prefill: expected memory for it") as refused,
    ):
        runner.prefill(tokens, "full")
    assert "Tried to allocate" in refused.value.got
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0
    again = runner.generate(short, "full", max_new_tokens=4, stop=(), remember=False)
    assert again.tokens == wanted
    with runner.prefill(tokens, "full") as done:
        assert done.request.length == len(tokens)
    runner.cache.check()


@pytest.mark.parametrize("policy", ["full", "naive", "epic"])
def test_a_prefill_waits_only_at_its_end(policy, monkeypatch) -> None:
    runner = runner_of(on_device("qwen3", torch.bfloat16, head_dim=64))
    parts = knowledge(runner, 3)
    prompt = runner.tokenize(parts)
    wanted, _ = logits_of(runner, parts, policy)

    def wait(_: Clock) -> None:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()

    monkeypatch.setattr(Clock, "wait", wait)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with runner.prefill(parts, policy, remember=False) as done:
            assert len(done.logits) == 1
            assert done.report.tokens == len(prompt.tokens)
            apart = (done.logits[-1] - wanted[-1]).abs().max()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(apart) <= ROUNDING[torch.bfloat16]


def test_memory_is_what_the_report_says() -> None:
    model = on_device(
        "llama",
        torch.bfloat16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=32768,
    )
    runner = runner_of(model, max_tokens=40960)
    tokens = random_tokens(20000, 1)
    runner.prefill(tokens[:100], "full", remember=False).release()
    before = torch.cuda.memory_allocated()
    others = before - runner.spec.weight_bytes - runner._prefiller.pages.nbytes
    torch.cuda.reset_peak_memory_stats()
    with runner.prefill(tokens, "full", remember=False) as done:
        peak = torch.cuda.max_memory_allocated() - others
        assert abs(peak / done.report.device_bytes - 1) <= 0.02


def test_weights_on_two_devices_are_refused() -> None:
    model = on_device()
    model.lm_head.to("cpu")
    with pytest.raises(kvweave.Unsupported, match="on one device, got cpu, cuda:0"):
        Runner(model)


def test_unknown_arithmetic_is_refused() -> None:
    model = on_device()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Tanh()
    plain = runner_of(model)
    assert plain.spec.device.type == "cuda"
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda _m, _i, out: out * 2)
    runner_of(model)
    model.model.layers[1].register_forward_hook(lambda _m, _i, out: out * 2)
    with pytest.raises(kvweave.Unsupported, match="expected our forward"):
        runner_of(model)


def test_tokens_of_numpy_and_lists_are_one_prompt() -> None:
    runner, tokens = runner_of(on_device()), random_tokens(33, 9)
    with runner.prefill(tokens, "full") as a, runner.prefill(np.asarray(tokens), "full") as b:
        assert torch.equal(a.logits, b.logits)
