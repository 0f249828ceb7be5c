"""kvpress' own pipeline and presses over kvweave's pages, on a real model.

kvpress wants an older transformers than the tests' own: `make test-kvpress` has an environment.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed (make test-kvpress)")

from kvweave import HeadClassMap, InvalidArgument, Unsupported  # noqa: E402
from kvweave.adapters.kvpress import HeadMapPress, PagedPress, PressedCache  # noqa: E402
from page_meaning import random_packing  # noqa: E402

CONTEXT = (
    "The harbour was built in 1871. Its wall is repaired every spring. " * 8
    + "The code of the north gate is 4417. "
    + "Ships that come at night wait for the pilot, whose house is red. " * 8
)
QUESTION = "\nWhat is the code of the north gate?"
PRESSES = {
    "knorm": lambda: kvpress.KnormPress(0.5),
    "snapkv": lambda: kvpress.SnapKVPress(0.5),
    "streaming": lambda: kvpress.StreamingLLMPress(0.5),
    "expected attention": lambda: kvpress.ExpectedAttentionPress(0.5),
    "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(0.5)),
}


@pytest.fixture(scope="module")
def pipe(smollm2: Any) -> Any:
    model, tokenizer = smollm2
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    yield kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    model.set_attn_implementation(before)


FULL = {"kind": "full"}


def answer(pipe: Any, press: Any, cache: Any = None) -> str:
    asked = {"question": QUESTION, "press": press, "max_new_tokens": 12}
    return pipe(CONTEXT, **asked, cache=cache)["answer"]


@pytest.mark.parametrize("name", PRESSES)
def test_a_press_says_the_same_in_fewer_bytes(pipe: Any, name: str) -> None:
    """The same words as over its own cache; here what it drops is given back."""
    wanted = answer(pipe, PRESSES[name]())
    with PressedCache(pipe.model, max_tokens=2048) as cache:
        assert answer(pipe, PRESSES[name](), cache) == wanted
        assert 0.4 < cache.bytes / cache.dense_bytes < 0.58


def windows(pipe: Any, recent: int) -> Any:
    """A map of SmolLM2 in which every second head has a window."""
    config = pipe.model.config
    classes = np.zeros((config.num_hidden_layers, config.num_key_value_heads, 2), np.int64)
    classes.reshape(-1, 2)[::2] = recent, 4
    return head_map_of(classes)


def head_map_of(classes: np.ndarray) -> Any:
    def kind(layer: int, head: int) -> dict[str, Any]:
        window, sink = classes[layer, head].tolist()
        return {"kind": "window", "sink": sink, "recent": window} if window else FULL

    return map_of_kinds(*classes.shape[:2], kind)


def map_of_kinds(layers: int, heads: int, kind: Any) -> Any:
    """A map of a model whose heads have the class of `kind(layer, head)`."""
    entries = [
        {
            "layer": layer,
            "head": head,
            "class": kind(layer, head),
            "reach": "local" if kind(layer, head)["kind"] == "window" else "global",
            "stability": "stable",
        }
        for layer in range(layers)
        for head in range(heads)
    ]
    known = {"schema_version": 1, "model_fingerprint": "any", "layers": layers, "kv_heads": heads}
    return HeadClassMap.from_json(json.dumps({**known, "heads": entries}))


def choosing(pages: int, **more: Any) -> Any:
    """A map of SmolLM2 of which two heads in three choose pages, and the others read all."""
    top_k = {"kind": "top_k", "pages": pages, "rerank_every": 4, **more}
    return map_of_kinds(30, 3, lambda _layer, head: FULL if head == 1 else top_k)


def test_a_head_map_is_a_press(pipe: Any) -> None:
    """By our pages as by the masks of kvpress itself; half of the heads keep 68 tokens."""
    press = HeadMapPress(windows(pipe, 64))
    wanted = answer(pipe, press)
    with PressedCache(pipe.model, max_tokens=2048) as cache:
        assert answer(pipe, press, cache) == wanted
        lengths = np.asarray(cache.lengths).reshape(-1)
        assert set(lengths[::2]) == {68}
        kept = lengths.sum() / (len(lengths) * lengths.max())
        assert press.compression_ratio == pytest.approx(1 - kept)
        assert cache.bytes < 0.75 * cache.dense_bytes


def test_a_map_of_another_model_is_refused(pipe: Any) -> None:
    press = HeadMapPress(head_map_of(np.zeros((2, 3, 2), np.int64)))
    with pytest.raises(InvalidArgument, match="expected a map of 30 layers"), press(pipe.model):
        pass


def test_several_questions_over_one_context(pipe: Any) -> None:
    asked = {"questions": [QUESTION, "\nWhen was the harbour built?"], "max_new_tokens": 10}
    wanted = pipe(CONTEXT, press=kvpress.KnormPress(0.3), **asked)["answers"]
    with PressedCache(pipe.model, max_tokens=2048) as cache, torch.inference_mode():
        said = pipe(CONTEXT, press=kvpress.KnormPress(0.3), cache=cache, **asked)["answers"]
        assert said == wanted
        cache.kv.check()


LONG = CONTEXT * 3


@pytest.mark.parametrize("name", [None, "snapkv", "adakv"])
def test_a_paged_press_alone_says_what_its_press_says(pipe: Any, name: str | None) -> None:
    """Without packing and with all pages read it is the press, and the bytes are fewer."""
    inner = PRESSES[name]() if name else None
    wanted = answer(pipe, inner)
    press = PagedPress(PRESSES[name]() if name else None)
    assert answer(pipe, press) == wanted
    assert pipe.model.config._attn_implementation == "sdpa"
    assert press.bytes / press.dense_bytes < (0.58 if name else 1.05)
    assert press.bytes < press.arena_bytes


GIVEN = random_packing("half-int4", 90, 64)[0]
"""A basis for each head of each layer."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (None, {"kv_dtype": "int4"}),
        ("adakv", {"kv_dtype": "int4"}),
        (None, {"kv_dtype": GIVEN, "top_k_pages": 4}),
        ("knorm", {"top_k_pages": 12}),
        ("adakv", {"top_k_pages": 12}),
    ],
)
def test_a_paged_press_is_a_cache_of_the_same_form(
    pipe: Any, name: str | None, settings: dict[str, Any]
) -> None:
    """What a press leaves in the pipeline's own cache is what a `PressedCache` holds."""
    asked = {"question": QUESTION, "max_new_tokens": 12}
    inner = PRESSES[name]() if name else None
    with PressedCache(pipe.model, max_tokens=2048, **settings) as cache:
        wanted = pipe(LONG, press=inner, cache=cache, **asked)["answer"]
        lengths, held, dense = cache.lengths, cache.bytes, cache.dense_bytes
        held -= sum(layer.pages.bound_bytes for layer in cache.layers)
    press = PagedPress(PRESSES[name]() if name else None, **settings)
    assert pipe(LONG, press=press, **asked)["answer"] == wanted
    assert press.lengths == lengths
    assert (press.bytes, press.dense_bytes) == (held, dense)


def test_int4_takes_a_fraction_and_finds_the_code(pipe: Any) -> None:
    press = PagedPress(kv_dtype="int4")
    said = pipe(LONG, question=QUESTION, press=press, max_new_tokens=12)["answer"]
    assert "4417" in said
    tokens = press.lengths[0][0]
    packed = (tokens - 192) // 64
    exact = -(-(tokens - 64 * packed) // 16)
    heads = sum(map(len, press.lengths))
    size = pipe.model.dtype.itemsize
    assert press.bytes == heads * (packed * 4608 + exact * 16 * 2 * 64 * size)


def test_it_is_a_press_under_generate(pipe: Any) -> None:
    """`with press(model)` around a generate of one's own; the model's attention comes back."""
    ids = pipe.tokenizer(CONTEXT + QUESTION, return_tensors="pt").input_ids
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = pipe.model.generate(ids, **options)
    press = PagedPress()
    with press(pipe.model):
        assert torch.equal(pipe.model.generate(ids, **options), wanted)
    assert press.dense_bytes > 0
    assert pipe.model.config._attn_implementation == "sdpa"
    assert torch.equal(pipe.model.generate(ids, **options), wanted)
    assert not pipe.model.model._forward_pre_hooks


def test_a_head_map_goes_with_it(pipe: Any) -> None:
    press = HeadMapPress(windows(pipe, 64))
    wanted = answer(pipe, press)
    paged = PagedPress(HeadMapPress(windows(pipe, 64)))
    assert answer(pipe, paged) == wanted
    assert set(np.asarray(paged.lengths).reshape(-1)[::2]) == {68}


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int4"}])
def test_heads_of_a_map_read_the_pages_that_it_says(pipe: Any, settings: dict[str, Any]) -> None:
    """Of all heads alike it is the cache's own number; of some neither that nor all."""
    asked = {"question": QUESTION, "max_new_tokens": 24}
    every = map_of_kinds(30, 3, lambda *_at: {"kind": "top_k", "pages": 4, "rerank_every": 1})
    said = {}
    for name, press, number in (
        ("all pages", None, None),
        ("few", None, 4),
        ("few by a map", HeadMapPress(every), None),
        ("some by a map", HeadMapPress(choosing(4)), None),
        ("some by means", HeadMapPress(choosing(4, score="mean")), None),
    ):
        with PressedCache(pipe.model, max_tokens=2048, top_k_pages=number, **settings) as cache:
            said[name] = pipe(LONG, press=press, cache=cache, **asked)["answer"]
    assert said["few by a map"] == said["few"]
    assert "4417" in said["all pages"]
    assert all(said.values())
    paged = PagedPress(HeadMapPress(choosing(4)), **settings)
    assert pipe(LONG, press=paged, **asked)["answer"] == said["some by a map"]
    composed = kvpress.ComposedPress([kvpress.KnormPress(0.1), HeadMapPress(choosing(4))])
    assert pipe(LONG, press=PagedPress(composed, **settings), **asked)["answer"]


def test_heads_that_choose_want_pages_to_choose_from(pipe: Any) -> None:
    """Beside kvpress' own cache, and for a class that pages here do not serve."""
    with pytest.raises(Unsupported, match=r"expected a PressedCache, or a PagedPress .* DynamicC"):
        answer(pipe, HeadMapPress(choosing(8)))
    with pytest.raises(InvalidArgument, match="compression_ratio: expected 0 beside a map"):
        PagedPress(HeadMapPress(choosing(8))).compression_ratio = 0.5
    few, means = HeadMapPress(choosing(2)), HeadMapPress(choosing(8, estimate=True))
    with pytest.raises(InvalidArgument, match="top_k.pages of at least 3"), few(pipe.model):
        pass
    with pytest.raises(Unsupported, match=r"without estimate.*kvweave\.Runner"), means(pipe.model):
        pass


def test_what_a_paged_press_is_not_for_is_refused(pipe: Any) -> None:
    with pytest.raises(Unsupported, match="acts while the context is prefilled"):
        PagedPress(kvpress.DecodingPress(kvpress.KnormPress()))
    with pytest.raises(InvalidArgument, match="kv_dtype"), PagedPress(kv_dtype="x")(pipe.model):
        pass
    with (
        PressedCache(pipe.model, max_tokens=2048) as cache,
        pytest.raises(Unsupported, match="expected a DynamicCache, got a PressedCache"),
    ):
        answer(pipe, PagedPress(), cache)
