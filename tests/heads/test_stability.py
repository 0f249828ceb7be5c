"""Stability of heads: chosen pages and their overlap by definition, and whole measurements."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_names import cache_of
from commands import refused
from families import random_tokens, tiny
from kvweave.errors import CorruptHeadMap, InvalidArgument
from kvweave.lab.drawing import save_stability
from kvweave.lab.profile import HeadProfile, LengthScores, Stability, measure_stability
from kvweave.lab.profile.page_choice import chosen_pages, overlap
from kvweave.lab.profile.stability import WINDOW, TaskStability
from kvweave.runner import Runner

PAGE = 16


def by_hand(
    q: np.ndarray, row: int, keys: np.ndarray, window: int | None, budget: int
) -> list[list[int]]:
    """The pages that each KV head of one row chooses, in plain loops."""
    _, kv_heads, dim = keys.shape
    group = len(q) // kv_heads
    first = 0 if window is None else max(0, row + 1 - window) // PAGE
    found = []
    for head in range(kv_heads):
        scores = {}
        for page in range(first, row // PAGE + 1):
            of_page = keys[page * PAGE : min(row + 1, (page + 1) * PAGE), head]
            scores[page] = max(
                sum(
                    max(q[h, d] * of_page[:, d].min(), q[h, d] * of_page[:, d].max())
                    for d in range(dim)
                )
                for h in range(head * group, (head + 1) * group)
            )
        found.append(sorted(sorted(scores, key=lambda page: (-scores[page], page))[:budget]))
    return found


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 130),
    heads=st.sampled_from([(1, 1), (2, 4), (2, 2)]),
    window=st.sampled_from([None, 1, 20, 500]),
    budget=st.integers(1, 12),
)
def test_pages_are_chosen_by_their_bounds(
    seed: int, tokens: int, heads: tuple[int, int], window: int | None, budget: int
) -> None:
    rng = np.random.default_rng(seed)
    # Whole numbers, so that sums are exact and many scores are equal.
    keys = rng.integers(-3, 4, (tokens, heads[0], 8)).astype(np.float32)
    rows = np.unique(rng.integers(0, tokens, 5)).astype(np.int32)
    q = rng.integers(-2, 3, (len(rows), heads[1], 8)).astype(np.float32)
    chosen = chosen_pages(
        torch.from_numpy(q),
        rows,
        torch.from_numpy(keys),
        window=window,
        page_tokens=PAGE,
        budget=budget,
    )
    assert chosen.shape == (len(rows), heads[0], -(-tokens // PAGE))
    for number, row in enumerate(rows.tolist()):
        wanted = by_hand(q[number], row, keys, window, budget)
        assert [np.flatnonzero(head).tolist() for head in chosen[number]] == wanted


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), budget=st.integers(1, 6), window=st.integers(1, 5))
def test_overlap_is_corrected_for_chance(seed: int, budget: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    rows, heads, pages = window + int(rng.integers(1, 5)), 2, 9
    seen = np.sort(rng.integers(1, pages + 1, rows))
    sets = [
        [set(rng.permutation(n)[:budget].tolist()) for _ in range(heads)] for n in seen.tolist()
    ]
    chosen = np.zeros((rows, heads, pages), bool)
    for row, of_row in enumerate(sets):
        for head, of_head in enumerate(of_row):
            chosen[row, head, list(of_head)] = True
    found = overlap(chosen, seen, budget, window)
    assert found.shape == (rows - window, heads, window)
    for (start, head, after), value in np.ndenumerate(found):
        later = start + after + 1
        n = int(seen[later])
        if n <= budget:
            assert value == 1.0
            continue
        same = len(sets[start][head] & sets[later][head]) / budget
        assert value == pytest.approx(max(0.0, (same - budget / n) / (1 - budget / n)))


def measured(runner: Runner, **tasks: Any) -> Stability:
    return measure_stability(runner, tasks, pages=3, steps=WINDOW + 9)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_a_quarter_of_the_heads_is_unstable(name: str) -> None:
    runner = Runner(tiny(name), max_tokens=512, progress=False)
    prompts = [random_tokens(200, seed) for seed in range(2)]
    found = measured(runner, one=prompts, same=prompts, other=[random_tokens(170, 9)])
    layers, heads = len(runner.spec.layers), runner.spec.kv_heads
    assert found.overlap.shape == (layers, heads, WINDOW)
    assert (found.overlap >= 0).all()
    assert (found.overlap <= 1).all()
    quarter = round(layers * heads / 4)
    assert all(task.unstable().sum() == quarter for task in found.tasks)
    assert found.unstable().sum() == quarter
    assert [task.windows for task in found.tasks] == [18, 18, 9]
    shared = found.shared()
    np.testing.assert_array_equal(np.diag(shared), 1.0)
    assert shared[0, 1] == 1.0
    np.testing.assert_array_equal(shared, shared.T)
    # What a map keeps of it is plain data.
    assert json.loads(json.dumps(found.to_dict()))["unstable"] == found.unstable().tolist()
    # The least stable heads of a task have changed most often, whatever their mean is.
    one = found.tasks[0]
    assert one.least[one.unstable()].min() >= one.least[~one.unstable()].max()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), share=st.floats(0.0, 1.0), windows=st.integers(1, 6))
def test_any_share_of_the_heads_may_be_unstable(seed: int, share: float, windows: int) -> None:
    """By hand: the share that is most often among the lowest so many, then by the mean."""
    rng = np.random.default_rng(seed)
    by_window = rng.random((windows, 3, 4))
    task = TaskStability("one", by_window.mean(0)[..., None], by_window)
    found = Stability("m", 3, 20, (task,), {}).with_share(share)
    few = round(share * 12)
    order = [np.argsort(window.ravel(), kind="stable")[:few].tolist() for window in by_window]
    often = [sum(head in some for some in order) for head in range(12)]
    mean = by_window.mean(0).ravel()
    wanted = sorted(range(12), key=lambda head: (-often[head], mean[head]))[:few]
    assert np.flatnonzero(found.unstable()).tolist() == sorted(wanted)
    assert found.tasks[0].unstable().tolist() == found.unstable().tolist()
    assert found.to_dict()["shared_by_chance"] == share


def test_a_share_of_heads_is_one() -> None:
    found = Stability("m", 3, 20, (), {})
    for wrong in (-0.1, 1.5, float("nan"), "half"):
        with pytest.raises(InvalidArgument, match="unstable_share: expected"):
            found.with_share(wrong)


def test_heads_that_ask_nothing_always_choose_the_same_pages() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    found = measured(Runner(model, max_tokens=512, progress=False), one=[random_tokens(150, 1)])
    np.testing.assert_allclose(found.overlap, 1.0)


def test_the_pages_are_those_of_the_decode_steps() -> None:
    """Against the model's own forward: keys before rotation tell pages apart where heads do."""
    model = tiny("llama")
    runner = Runner(model, max_tokens=512, progress=False)
    prompt = random_tokens(200, 4)
    found = measured(runner, one=[prompt])
    said = runner.generate(prompt, "full", max_new_tokens=WINDOW + 9, stop=[]).tokens
    tokens = torch.tensor([[*prompt.tolist(), *said[:-1]]])
    heard: dict[str, torch.Tensor] = {}
    attention = model.model.layers[1].self_attn
    hook = attention.q_proj.register_forward_hook(
        lambda _m, _i, out: heard.__setitem__("q", out[0])
    )
    with torch.inference_mode():
        kept = cache_of(model(tokens, use_cache=True))
        length = tokens.shape[1]
        cos, sin = model.model.rotary_emb(heard["q"][None], torch.arange(length)[None])
    hook.remove()
    dim, kv_heads = runner.spec.head_dim, runner.spec.kv_heads
    q = heard["q"].view(length, -1, dim)
    half = torch.cat((-q[..., dim // 2 :], q[..., : dim // 2]), -1)
    q = (q * cos[0][:, None] + half * sin[0][:, None]).double().numpy()
    keys = kept.layers[1].keys[0].transpose(0, 1).double().numpy()
    rows = range(len(prompt) - 1, length)
    chosen = [by_hand(q[row], row, keys, None, 3) for row in rows]
    wanted = np.zeros((kv_heads, WINDOW))
    for after in range(1, WINDOW + 1):
        values = []
        for start in range(len(chosen) - WINDOW):
            n = rows[start + after] // PAGE + 1
            both = [
                len(set(chosen[start][h]) & set(chosen[start + after][h])) / 3
                for h in range(kv_heads)
            ]
            values.append([max(0.0, (o - 3 / n) / (1 - 3 / n)) for o in both])
        wanted[:, after - 1] = np.mean(values, axis=0)
    np.testing.assert_allclose(found.overlap[1], wanted, atol=0.02)


def test_what_cannot_be_measured_is_refused() -> None:
    runner = Runner(tiny("llama"), max_tokens=512, progress=False)
    long = [random_tokens(200, 1)]
    with pytest.raises(InvalidArgument, match="tasks: expected at least one"):
        measure_stability(runner, {})
    with pytest.raises(InvalidArgument, match="of at least one prompt"):
        measure_stability(runner, {"one": []})
    with pytest.raises(InvalidArgument, match="expected more than 64 pages of 16 tokens, got 200"):
        measure_stability(runner, {"one": long})
    with pytest.raises(InvalidArgument, match="steps: expected"):
        measure_stability(runner, {"one": long}, pages=3, steps=WINDOW)
    with pytest.raises(InvalidArgument, match="pages: expected"):
        measure_stability(runner, {"one": long}, pages=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["smollm2", "--unstable-share", "1.5"], "unstable-share: expected 0..1, got 1.5"),
        (["smollm2", "--unstable-share", ".5", "--steps", "0"], "expected --steps of at least 17"),
        (["--scores", "a.json", "--unstable-share", ".5"], "unstable-share: expected no --scores"),
    ],
)
def test_a_share_that_cannot_be_measured_is_refused(options: list[str], words: str) -> None:
    assert words in refused("profile-heads", *options)


def test_flags_of_evidence_are_checked() -> None:
    zeros = np.zeros((2, 3))
    scores = LengthScores(
        8,
        **dict.fromkeys(("edge", "retrieval", "overlap"), zeros),
        **dict.fromkeys(("key_shift", "value_shift"), zeros),
    )
    profile = HeadProfile("model", 1, 2, (scores,))
    flags = [[True, False, False], [False, False, True]]
    unstable = profile.flags("stability", flags)
    heads = json.loads(profile.map(0.0, unstable=unstable).to_json())["heads"]
    assert [h["stability"] == "unstable" for h in heads] == np.ravel(flags).tolist()
    for bad in (None, flags[:1], [[1, 0, 0], [0, 0, 1]], "no", [[True], []]):
        with pytest.raises(CorruptHeadMap, match="expected stability as flags of shape"):
            profile.flags("stability", bad)


def test_it_is_drawn_or_refused(tmp_path: Any) -> None:
    runner = Runner(tiny("llama"), max_tokens=512, progress=False)
    found = measured(runner, one=[random_tokens(150, 1)], two=[random_tokens(150, 2)]).to_dict()
    save_stability(tmp_path / "made" / "s.svg", found, "Pages")
    assert "unstable heads in common" in (tmp_path / "made" / "s.svg").read_text()
    for bad in ({}, {**found, "tasks": ["one"]}, {**found, "unstable": [[True]]}):
        with pytest.raises(InvalidArgument, match="stability: expected what a map keeps"):
            save_stability(tmp_path / "s.svg", bad, "Pages")
    with pytest.raises(InvalidArgument, match="picture: expected"):
        save_stability(tmp_path / "s.gif", found, "Pages")
