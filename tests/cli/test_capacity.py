"""`kvweave capacity`: sessions that the allocator admits, the arithmetic beside them, bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from commands import call, refused
from kvweave.cache import HeadClassMap, KvCache, KvShape
from kvweave.cli import capacity_count
from kvweave.cli.capacity_count import count_sessions
from kvweave.cli.capacity_plan import (
    ALIASES,
    ModelShape,
    capacity_of,
    parse_bytes,
    presets,
    shape_of,
)
from kvweave.errors import CorruptHeadMap, InvalidArgument, PoolFull
from kvweave.models import PACKAGED
from local_heads import local_heads

LLAMA = KvShape(32, 8, 128)


@pytest.fixture
def eighth(tmp_path: Path) -> Path:
    """A map of 32 layers by 8 heads with one full head a layer: 12.5 %."""
    path = tmp_path / "heads.json"
    path.write_text(local_heads(LLAMA, 7).to_json())
    return path


# ---- counting --------------------------------------------------------------------------------


def test_sessions_of_a_well_known_shape(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    result = call(
        "capacity", "Llama-3.1-8B", "--length", 131072, "--memory", "80GiB", "--json", path
    )
    assert result.exit_code == 0, result.output
    assert "128.00 KiB" in result.output
    written = json.loads(path.read_text())
    assert (written["memory_bytes"], written["page_tokens"]) == (80 << 30, 16)
    (found,) = written["lengths"]
    # 2 (K and V) × 32 layers × 8 heads × 128 dims × 2 bytes.
    assert found["reckoned"]["token_bytes"] == 131072
    assert found["reckoned"]["request_bytes"] == 131072 * 131072
    assert found["reckoned"]["request_blocks"] == 8192
    # Four sessions of 16 GiB and the null block; five do not fit 80 GiB with it.
    assert found["counted"] == {
        "dense": {"fit": 4, "session_bytes": 16 << 30},
        "mapped": None,
    }


@pytest.mark.parametrize(("tokens", "page_tokens"), [(1, 16), (64, 16), (100, 8), (129, 64)])
def test_what_is_counted_fits_a_cache_with_memory(tokens: int, page_tokens: int) -> None:
    shape, memory = shape_of("smollm2-135m"), 40 << 20
    found = count_sessions(shape, tokens, page_tokens, memory)
    kv = KvShape(shape.layers, shape.kv_heads, shape.head_dim, page_tokens, shape.dtype)
    cache = KvCache(kv, arena_bytes=memory)
    prompt = np.zeros(tokens, np.int32)
    requests = [cache.admit(prompt, reuse="none") for _ in range(found.fit)]
    assert {r.kv_bytes() for r in requests} <= {(found.session_bytes, 0)}
    with pytest.raises(PoolFull):
        cache.admit(prompt, reuse="none")
    reckoned = capacity_of(shape, tokens, page_tokens, memory)
    assert reckoned.requests == found.fit
    assert reckoned.request_bytes == found.session_bytes


@pytest.mark.parametrize("chunk", [1, 100, 512, 10**6])
def test_a_map_lets_more_sessions_in(eighth: Path, tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "c.json"
    words = ("--length", 8192, "--length", 2048, "--memory", "24GB", "--chunk", chunk)
    result = call("capacity", "llama-3.1-8b", *words, "--heads", eighth, "--json", path)
    assert result.exit_code == 0, result.output
    assert "times" in result.output
    for found in json.loads(path.read_text())["lengths"]:
        page, tokens = 2 * 16 * 128 * 2, found["length"]
        dense, mapped = found["counted"]["dense"], found["counted"]["mapped"]
        assert dense["session_bytes"] == 256 * page * tokens // 16
        # 32 pairs keep all blocks; 224 keep the sink's and those that the next token sees.
        assert mapped["session_bytes"] == 32 * page * tokens // 16 + 224 * page * 17
        # Nothing is promised of a map whose prompt is prefilled whole in one chunk.
        if chunk <= 512:
            assert mapped["fit"] > dense["fit"] * (5 if tokens == 8192 else 2.9)
        assert found["reckoned"]["request_bytes"] == mapped["session_bytes"]
        # Slabs, and the chunk of the session that is being prefilled, take their share.
        assert 0.9 < mapped["fit"] / found["reckoned"]["requests"] <= 1 or chunk > 512


def test_nothing_is_promised_where_nothing_fits(eighth: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    words = ("--length", 131072, "--memory", "100MiB", "--json", path, "--heads", eighth)
    result = call("capacity", "llama-3.1-8b", *words)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(path.read_text())["lengths"]
    nothing = {"fit": 0, "session_bytes": 0}
    assert found["counted"] == {"dense": nothing, "mapped": nothing}


def test_the_count_is_of_the_allocator_and_not_of_the_arithmetic(
    eighth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums that are wrong change the explanation alone."""
    shape = shape_of("llama-3.1-8b")
    heads = HeadClassMap.from_json(eighth.read_text())
    found = count_sessions(shape, 4096, 16, 4 << 30, heads)
    monkeypatch.setattr(
        capacity_count, "capacity_of", lambda *_: capacity_of(shape, 1 << 20, 16, 4 << 30)
    )
    assert count_sessions(shape, 4096, 16, 4 << 30, heads) == found
    assert found.fit > 0


# ---- arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_are_shapes(name: str) -> None:
    shape = shape_of(name)
    assert shape.head_dim % 8 == 0
    assert 1 <= shape.kv_heads <= 64
    assert shape.context is not None


def test_smaller_elements_let_more_sessions_in() -> None:
    counts = {
        dtype: count_sessions(shape_of("qwen3-8b", dtype), 4096, 16, 20 << 30).fit
        for dtype in ("f32", "bf16", "fp8_e4m3")
    }
    assert counts == {"f32": 17, "bf16": 35, "fp8_e4m3": 71}


def test_packaged_models_have_a_shape_under_their_own_names() -> None:
    assert ALIASES.keys() == PACKAGED.keys()
    assert shape_of("smollm2") == shape_of("SmolLM2-135M")
    assert shape_of("qwen-coder").layers == 24
    assert call("capacity", "smollm2", "--memory", "1GiB").exit_code == 0


def test_capacity_reads_a_config(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "float32",
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    shape = shape_of(str(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.dtype) == (4, 2, 64, "f32")
    words = ("--length", 100, "--dtype", "bf16", "--memory", "1MiB")
    result = call("capacity", tmp_path / "config.json", *words)
    assert result.exit_code == 0, result.output
    assert "longer than the model's context" in result.output


@pytest.mark.parametrize(("sink", "recent"), [(0, 16), (5, 40), (16, 256), (300, 17), (64, 4000)])
def test_the_arithmetic_of_windows(sink: int, recent: int) -> None:
    """It says what the allocator gives, whatever the window and the length."""
    shape = ModelShape(2, 4, 64, "bf16")
    heads = local_heads(KvShape(2, 4, 64), 3, sink, recent)
    for length in (1, 15, 16, 17, 250, 271, 272, 273, 700, 4001):
        found = count_sessions(shape, length, 16, 64 << 20, heads, 128)
        reckoned = capacity_of(shape, length, 16, 64 << 20, heads)
        assert found.session_bytes == reckoned.request_bytes, length
        assert found.fit <= reckoned.requests


# ---- bad input -------------------------------------------------------------------------------


def test_capacity_refuses_corrupt_head_maps(tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    for text in (
        "not json",
        "{}",
        '{"heads": [{"layer": 0}]}',
        local_heads(KvShape(2, 8, 128), 1).to_json(),
    ):
        path.write_text(text)
        assert "expected" in refused("capacity", "llama-3.1-8b", "--heads", path)
    for broken, says in (
        ({"kind": "psychic"}, "psychic"),
        ({"kind": "window"}, "missing field `sink`"),
        ({"kind": "window", "sink": -5, "recent": 4}, "-5"),
        ({"kind": "window", "sink": [1], "recent": 4}, "expected u32"),
        ("window", "expected internally tagged"),
    ):
        corrupt = json.loads(local_heads(LLAMA, 1).to_json())
        corrupt["heads"][0]["class"] = broken
        path.write_text(json.dumps(corrupt))
        assert says in refused("capacity", "llama-3.1-8b", "--heads", path)
    assert issubclass(CorruptHeadMap, ValueError)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("80GB", 80 * 10**9), ("1.5 mib", 3 << 19), ("4096", 4096), ("2k", 2000)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "3XB", "GiB", "9" * 400, "99999999TiB"])
def test_other_sizes_are_not(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected a size"):
        parse_bytes(text)


def test_capacity_says_what_it_knows() -> None:
    assert "llama-3.1-8b" in refused("capacity", "gpt-17")
    assert "smollm2" in refused("capacity", "gpt-17")
    assert "f32, bf16, f16" in refused("capacity", "qwen3-32b", "--dtype", "int4")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--length", 1 << 30), "length: expected at most"),
        (("--memory", "900TiB", "--length", 1), "memory: expected room for at most"),
        (("--memory", "30TiB", "--length", 1 << 24), "arena pages: expected"),
        (("--memory", "1"), "arena pages: expected"),
    ],
)
def test_sizes_that_no_cache_has(words: tuple[object, ...], says: str) -> None:
    assert says in refused("capacity", "llama-3.1-8b", *words)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**30},
        {"num_attention_heads": 0},
        {"num_attention_heads": "many"},
        {"head_dim": -1},
        {"head_dim": 1e400},
        {"max_position_embeddings": "far"},
    ],
)
def test_configs_that_are_none(tmp_path: Path, change: dict[str, object]) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    assert "expected" in refused("capacity", tmp_path)
