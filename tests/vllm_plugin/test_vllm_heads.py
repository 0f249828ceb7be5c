"""Head maps as the vLLM plugin splits them, and its options. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import CorruptHeadMap, InvalidArgument, Unsupported
from kvweave.adapters.vllm.heads.class_map import read_classes
from kvweave.adapters.vllm.heads.split import HeadSplit, in_order, split_of
from kvweave.adapters.vllm.options import Options, options_of

ROOT = Path(__file__).resolve().parents[2]
FULL = {"kind": "full"}
WINDOW = {"kind": "window", "sink": 4, "recent": 32}
TOP_K = {"kind": "top_k", "pages": 4, "rerank_every": 2}


def written(folder: Path, classes: list[list[dict[str, Any]]]) -> Path:
    made = {
        "schema_version": 1,
        "model_fingerprint": "m",
        "layers": len(classes),
        "kv_heads": len(classes[0]),
        "heads": [
            {"layer": x, "head": g, "class": kind, "reach": "global", "stability": "stable"}
            for x, layer in enumerate(classes)
            for g, kind in enumerate(layer)
        ],
    }
    path = folder / "map.json"
    path.write_text(json.dumps(made))
    return path


def read_split(path: Path, layers: int, kv_heads: int, ranks: int) -> HeadSplit | None:
    return split_of(read_classes(path, layers, kv_heads), ranks)


def test_global_heads_come_first_in_every_layer(tmp_path) -> None:
    path = written(tmp_path, [[WINDOW, FULL, WINDOW, WINDOW], [WINDOW, WINDOW, WINDOW, FULL]])
    split = read_split(path, 2, 4, 1)
    assert split == HeadSplit(((1, 0, 2, 3), (3, 0, 1, 2)), 1, ((1,), (1,)), 4, 32)
    assert (split.layers, split.kv_heads, split.heads) == (2, 4, (2, 6))
    assert split.parts(0) == [((1, 0), (3, 0)), ((1, 1), (3, 3))]


def test_each_rank_gets_its_share(tmp_path) -> None:
    path = written(tmp_path, [[WINDOW, FULL, WINDOW, FULL], [FULL, FULL, WINDOW, WINDOW]])
    split = read_split(path, 2, 4, 2)
    assert split == HeadSplit(((1, 0, 3, 2), (0, 2, 1, 3)), 2, ((1, 1), (1, 1)), 4, 32)
    assert split.heads == (2, 2)
    assert split.parts(0) == split.parts(1) == [((1, 0), (1, 0)), ((1, 1), (1, 1))]


def test_layers_have_any_number_of_global_heads(tmp_path) -> None:
    """What two ranks do not divide is shared out evenly over the layers."""
    classes = [
        [WINDOW, WINDOW, WINDOW, WINDOW],
        [WINDOW, FULL, WINDOW, WINDOW],
        [FULL, WINDOW, FULL, FULL],
        [FULL, FULL, FULL, FULL],
    ]
    path = written(tmp_path, classes)
    split = read_split(path, 4, 4, 1)
    assert split is not None
    assert split.heads == (8, 8)
    assert split.order == ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 3, 1), (0, 1, 2, 3))
    whole, local = zip(*split.parts(0), strict=True)
    assert whole == ((0, 0), (1, 0), (3, 1), (4, 4))
    assert local == ((4, 0), (3, 4), (1, 7), (0, 8))
    split = read_split(path, 4, 4, 2)
    assert split is not None
    assert split.whole == ((0, 0), (1, 0), (1, 2), (2, 2))
    assert split.order[1:3] == ((1, 0, 2, 3), (0, 1, 2, 3))
    assert split.heads == (4, 4)
    # Ranks that cannot have as many still have blocks of one size.
    split = read_split(written(tmp_path, classes[:2] + [[FULL] * 3 + [WINDOW]] * 3), 5, 4, 2)
    assert split is not None
    assert split.heads == (5, 5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_several_windows_the_widest_is_kept_and_each_head_sees_its_own(tmp_path, ranks) -> None:
    early, late = {**WINDOW, "sink": 9}, {**WINDOW, "recent": 50}
    classes = [[late, FULL, WINDOW, FULL], [FULL, early, WINDOW, FULL], [FULL] * 4]
    split = read_split(written(tmp_path, classes), 3, 4, ranks)
    assert split is not None
    assert (split.sink, split.recent) == (9, 50)
    seen = [
        [pair for rank in range(ranks) for pair in split.own_windows(layer, rank)]
        for layer in range(3)
    ]
    assert seen == [[(50, 4), (32, 4)], [(32, 9), (32, 4)], []]
    each = 4 // ranks
    for rank in range(ranks):
        for layer, part in enumerate(split.parts(rank)):
            assert len(split.own_windows(layer, rank)) == part[1].heads <= each
    alike = read_split(written(tmp_path, [[WINDOW, FULL, FULL, WINDOW]]), 1, 4, ranks)
    assert alike is not None
    assert alike.own_windows(0, 0) == []


@pytest.mark.parametrize("name", ["smollm2", "qwen-coder"])
def test_recorded_maps_are_carried(name: str) -> None:
    """Those that `kvweave profile-heads` wrote: most of their layers have no global head."""
    path = ROOT / "benchmarks" / "records" / "heads" / f"{name}.json"
    layers, kv_heads = (json.loads(path.read_text())[of] for of in ("layers", "kv_heads"))
    split = read_split(path, layers, kv_heads, 1)
    assert split is not None
    whole, local = split.blocks(16)
    assert whole.tokens * whole.pages == local.tokens * local.pages
    lost = [block.pages / heads for block, heads in zip((whole, local), split.heads, strict=True)]
    assert min(lost) >= 1
    assert max(lost) < 1.03


def test_full_heads_are_not_split(tmp_path) -> None:
    assert read_split(written(tmp_path, [[FULL, FULL]]), 1, 2, 1) is None


REFUSED = {
    "top-k": ([[TOP_K, FULL]], 1, "kinds of heads"),
    "none global": ([[WINDOW, WINDOW]], 1, "at least one for each of 1, got 0 of 2 global"),
    "one local": ([[WINDOW, FULL], [FULL, FULL]], 2, "at least one for each of 2, got 3 of 4"),
    "ranks": ([[WINDOW, FULL, FULL]], 2, "a number that 2 ranks divide"),
}


@pytest.mark.parametrize(("classes", "ranks", "says"), REFUSED.values(), ids=REFUSED)
def test_what_two_parts_cannot_carry_is_refused(tmp_path, classes, ranks, says) -> None:
    path = written(tmp_path, classes)
    with pytest.raises(Unsupported, match=says):
        read_split(path, len(classes), len(classes[0]), ranks)


def test_a_map_of_another_shape_or_no_map_is_refused(tmp_path) -> None:
    path = written(tmp_path, [[WINDOW, FULL]])
    with pytest.raises(InvalidArgument, match="a map of 2 layers of 2 KV heads, got 1 of 2"):
        read_split(path, 2, 2, 1)
    with pytest.raises(InvalidArgument, match="a readable file, got .*nowhere"):
        read_split(tmp_path / "nowhere", 1, 2, 1)
    with pytest.raises(InvalidArgument, match="a readable file"):
        read_split(tmp_path, 1, 2, 1)
    for text in ("{", "[]", path.read_text().replace('"head": 1', '"head": 0')):
        path.write_text(text)
        with pytest.raises(CorruptHeadMap):
            read_split(path, 1, 2, 1)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="no text"):
        read_split(path, 1, 2, 1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.sampled_from([16, 128]))
def test_blocks_of_both_classes_are_equal(counts: list[int], unit: int) -> None:
    """With few pages of nobody's, and none where a layer is like the other and blocks are small."""
    layer = tuple(range(8))
    counts[0] = min(max(counts[0], 1), 7)
    split = HeadSplit((layer,) * len(counts), 1, tuple((count,) for count in counts), 0, 1)
    blocks = split.blocks(unit)
    assert len({tokens * pages for tokens, pages in blocks}) == 1
    assert all(tokens % unit == 0 for tokens, _ in blocks)
    spare = [block.pages - heads for block, heads in zip(blocks, split.heads, strict=True)]
    assert min(spare) >= 0
    if len(set(counts)) == 1:
        assert spare == [0, 0]
    assert sum(s / heads for s, heads in zip(spare, split.heads, strict=True)) < 0.35


def test_attention_does_not_depend_on_the_order_of_heads() -> None:
    """q, k, v and o permuted together are the same layer."""
    heads, group, dim, hidden = 4, 2, 8, 24
    split = HeadSplit(((2, 0, 1, 3), (3, 1, 0, 2)), 1, ((1,), (1,)), 0, 1)
    numbers = torch.Generator().manual_seed(1)
    sizes = {"q": heads * group * dim, "k": heads * dim, "v": heads * dim}
    weights = {
        f"model.layers.1.self_attn.{name}_proj.{kind}": torch.randn(shape, generator=numbers)
        for name, size in sizes.items()
        for kind, shape in (("weight", (size, hidden)), ("bias", (size,)))
    }
    o = torch.randn((hidden, sizes["q"]), generator=numbers)
    weights["model.layers.1.self_attn.o_proj.weight"] = o
    weights["model.layers.1.mlp.up_proj.weight"] = torch.randn((5, hidden), generator=numbers)
    weights["model.layers.1.self_attn.o_proj.bias"] = torch.randn(hidden, generator=numbers)
    x = torch.randn((6, hidden), generator=numbers)

    def layer(named: dict[str, torch.Tensor]) -> torch.Tensor:
        at = "model.layers.1.self_attn."
        q, k, v = (x @ named[f"{at}{n}_proj.weight"].T + named[f"{at}{n}_proj.bias"] for n in "qkv")
        q, k, v = (y.unflatten(1, (-1, dim)).transpose(0, 1) for y in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out = out.transpose(0, 1).flatten(1)
        return out @ named[f"{at}o_proj.weight"].T + named[f"{at}o_proj.bias"]

    loaded = dict(in_order(weights.items(), split))
    assert list(loaded) == list(weights)
    moved = [name for name in weights if not torch.equal(loaded[name], weights[name])]
    assert len(moved) == 7
    torch.testing.assert_close(layer(loaded), layer(weights), rtol=1e-5, atol=1e-5)
    k = weights["model.layers.1.self_attn.k_proj.weight"].unflatten(0, (heads, dim))
    got = loaded["model.layers.1.self_attn.k_proj.weight"].unflatten(0, (heads, dim))
    np.testing.assert_array_equal(got, k[[3, 1, 0, 2]])


@pytest.mark.parametrize("name", ["qkv_proj.weight", "q_proj.weight_scale", "k_proj.qweight"])
def test_weights_of_another_form_are_refused(name: str) -> None:
    split = HeadSplit(((1, 0),), 1, ((1,),), 0, 1)
    given = [(f"model.layers.0.self_attn.{name}", torch.zeros(8, 8))]
    with pytest.raises(Unsupported, match="weights and biases of q, k, v and o apart"):
        list(in_order(given, split))


def test_a_weight_that_heads_do_not_divide_is_refused() -> None:
    split = HeadSplit(((1, 0),), 1, ((1,),), 0, 1)
    with pytest.raises(InvalidArgument, match="a multiple of 2"):
        list(in_order([("model.layers.0.self_attn.k_proj.weight", torch.zeros(9, 8))], split))


BAD: dict[str, list[Any]] = {
    "heads": [3, ""],
    "segment_bytes": [0, 1.5, True, "1"],
    "store": [3, ""],
    "store_bytes": [0, True],
    "store_quota_bytes": [0.5],
    "store_reads": ["slower", True],
    "frozen_share": [-0.1, 1.1, True, "1", None],
}


def test_options() -> None:
    assert options_of({}) == options_of({"other": 1}) == options_of(None) == Options()
    assert options_of({"kvweave": {"heads": "m.json"}}) == Options(Path("m.json"))
    store = {"segment_bytes": 4096, "frozen_share": 1}
    assert options_of({"kvweave": store}) == Options(None, 4096, 1.0)
    kept = {**store, "store": "kv", "store_bytes": 7, "store_quota_bytes": 5}
    options = options_of({"kvweave": kept})
    assert (options.store, options.store_bytes, options.store_quota_bytes) == (Path("kv"), 7, 5)
    assert options.digest() == options_of({"kvweave": store}).digest()
    for alone in ({"store": "kv"}, {**store, "store_bytes": 7}):
        with pytest.raises(InvalidArgument, match="expected it beside"):
            options_of({"kvweave": alone})
    outside = {"KVWEAVE_HEADS": "n.json", "KVWEAVE_VIRTUAL_PAGES": "1", "KVWEAVE_FROZEN_SHARE": ""}
    assert options_of({}, outside) == Options(Path("n.json"), virtual_pages=True)
    inside = {"kvweave": {"heads": "m.json", "virtual_pages": False}}
    assert options_of(inside, outside) == Options(Path("m.json"))
    given = {"KVWEAVE_SEGMENT_BYTES": "4096", "KVWEAVE_FROZEN_SHARE": "0.25"}
    assert options_of(None, given) == Options(None, 4096, 0.25)
    for name, text in (("SEGMENT_BYTES", "8GB"), ("FROZEN_SHARE", "x"), ("VIRTUAL_PAGES", "2")):
        with pytest.raises(InvalidArgument, match=f"KVWEAVE_{name}: expected .*, got '{text}'"):
            options_of({}, {f"KVWEAVE_{name}": text})
    for name, text in (("SEGMENT_BYTES", "0"), ("FROZEN_SHARE", "nan")):
        with pytest.raises(InvalidArgument, match=f"^KVWEAVE_{name}: expected .*, got {text}$"):
            options_of({}, {f"KVWEAVE_{name}": text})
    refused = [{name: value} for name, values in BAD.items() for value in values]
    both = {"KVWEAVE_SEGMENT_BYTES": "4096"}
    with pytest.raises(InvalidArgument, match=r"^additional_config: kvweave\.segment_bytes: "):
        options_of({"kvweave": {"segment_bytes": 0}}, both)
    for section in ({"head": "m"}, "heads", ["heads"], *refused):
        with pytest.raises(InvalidArgument, match="additional_config: kvweave"):
            options_of({"kvweave": section})


@pytest.mark.parametrize("given", [-1, 65, True, 1.0, "1"])
def test_other_numbers_of_exact_first_tokens_are_refused(given: Any) -> None:
    beside = {"segment_bytes": 4096, "segment_dtype": "half-int4"}
    for count in (None, 0, 1, 64):
        assert options_of({"kvweave": {**beside, "exact_first": count}}).exact_first == count
    here = r"^additional_config: kvweave\.exact_first: expected 0 to 64 tokens, got "
    with pytest.raises(InvalidArgument, match=here):
        options_of({"kvweave": {**beside, "exact_first": given}})
    for alone in ({"exact_first": 1}, {"exact_first": 0, "segment_bytes": 4096}):
        with pytest.raises(InvalidArgument, match="exact_first: expected it beside segment_dtype"):
            options_of({"kvweave": alone})


def test_they_are_read_of_the_environment_and_change_no_graph() -> None:
    beside = {"KVWEAVE_SEGMENT_BYTES": "4096", "KVWEAVE_SEGMENT_DTYPE": "planes-3"}
    found = options_of({}, {**beside, "KVWEAVE_EXACT_FIRST": "2"})
    assert found.exact_first == 2
    assert found.digest() == options_of({}, beside).digest()
    for wrong in ("x", "65"):
        with pytest.raises(InvalidArgument, match="^KVWEAVE_EXACT_FIRST: expected 0 to 64 tokens"):
            options_of({}, {**beside, "KVWEAVE_EXACT_FIRST": wrong})


def test_another_map_in_the_same_file_is_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text("one")
    first = Options(path).digest()
    assert first == Options(path).digest() != Options(path, virtual_pages=True).digest()
    path.write_text("two")
    assert first != Options(path).digest()
    assert Options().digest() != Options(segment_bytes=1).digest()
