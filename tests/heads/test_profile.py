"""Head profiles: figures against the model's own attention, prompts, maps, bounds, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from byte_tokenizer import Bytes
from cache_names import cache_of
from families import random_tokens, tiny
from kvweave.cache import HeadClassMap
from kvweave.errors import CorruptHeadMap, InvalidArgument, Unsupported
from kvweave.lab.profile import EffectMeter, HeadProfile, LengthScores, held_out, profile_heads
from kvweave.lab.profile.attention_reach import read_attention
from kvweave.lab.profile.effect import SCORED
from kvweave.lab.profile.page_overlap import STEPS, page_overlap
from kvweave.lab.profile.prefix_shift import measure_shift
from kvweave.lab.profile.scores import top
from kvweave.lab.profile.tap import Tap
from kvweave.lab.profile.texts import HIDDEN, TextMaker, parted
from kvweave.runner import Runner

SINK, RECENT, TOKENS = 4, 16, 150
Profiled = tuple[Runner, Path, HeadProfile]
FAMILIES = ("llama", "llama-yarn", "llama-dynamic", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3")


def words(count: int, seed: int) -> str:
    """Sentences of made-up words."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnop"))
    made = ["".join(rng.choice(letters, rng.integers(2, 8))) for _ in range(count)]
    return " ".join(w.capitalize() + "." if i % 9 == 0 else w for i, w in enumerate(made))


def filled(folder: Path) -> Path:
    for number in range(4):
        (folder / f"{number}.txt").write_text(words(900, number))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A runner, a folder of texts, and the runner's profile on them at two lengths."""
    where, runner = filled(tmp_path_factory.mktemp("texts")), small()
    with torch.no_grad():
        return runner, where, profile_of(runner, where)


def small(name: str = "llama", **changes: Any) -> Runner:
    options = {"max_position_embeddings": 2048, **changes}
    return Runner(tiny(name, **options), Bytes(), max_tokens=2048, progress=False)


# ---- measured figures against definitions ----------------------------------------------------


def attention_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The model's own attention weights f64 [L, H, T, T]."""
    ids = torch.from_numpy(tokens).long()[None]
    with torch.inference_mode():
        weights = model(ids, use_cache=False, output_attentions=True).attentions
    return torch.cat(weights).double().numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_mass_is_that_of_the_models_own_attention(name: str) -> None:
    model = tiny(name)
    runner = Runner(model, max_tokens=512, progress=False)
    tokens = random_tokens(TOKENS, 3)
    rows = np.array([60, 97, 149], np.int32)
    targets = ((99, 10, 25), (149, 40, 41), (120, 0, 120))
    found = read_attention(runner, tokens, rows, targets, sink=SINK, recent=RECENT)

    weights = attention_of(model, tokens)
    position = np.arange(TOKENS)
    far = (position >= SINK) & (position <= rows[:, None] - RECENT)
    edge = (weights[:, :, rows] * far).sum(-1).mean(-1)
    target = np.mean([weights[:, :, row, a:b].sum(-1) for row, a, b in targets], axis=0)
    assert found.target is not None
    np.testing.assert_allclose(found.edge, edge, atol=2e-5)
    np.testing.assert_allclose(found.target, target, atol=2e-5)
    assert edge.max() > 0.05


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_overlap_is_flexicaches_definition(name: str) -> None:
    model = tiny(name)
    runner = Runner(model, max_tokens=512, progress=False)
    tokens = random_tokens(TOKENS, 4)
    found = read_attention(
        runner, tokens, np.array([149], np.int32), (), sink=SINK, recent=RECENT
    ).overlap

    weights = attention_of(model, tokens)[:, :, -STEPS:]
    pages = -(-TOKENS // 16)
    count = pages // 8
    wanted = np.zeros_like(found)
    for layer, head in np.ndindex(*found.shape):
        queries = weights[layer].reshape(2, -1, STEPS, TOKENS)[head].sum(0)
        by_page = [[row[16 * n : 16 * (n + 1)].sum() for n in range(pages)] for row in queries]
        best = [set(np.argsort(row)[::-1][:count].tolist()) for row in by_page]
        pairs = [
            max(0.0, (len(best[s] & best[t]) / count - count / pages) / (1 - count / pages))
            for s in range(STEPS)
            for t in range(s + 1, STEPS)
        ]
        wanted[layer, head] = np.mean(pairs)
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert 0.0 < wanted.mean() < 1.0


def test_pages_that_stay_overlap_wholly_and_pages_that_jump_not_at_all() -> None:
    tokens, rows = 128, np.arange(126, 128, dtype=np.int32)
    keys = torch.zeros(tokens, 2, 8)
    keys[3, 0, 0] = keys[3, 1, 0] = keys[90, 1, 1] = 50.0
    q = torch.zeros(2, 2, 8)
    q[:, 0, 0] = 1.0  # head 0 looks at token 3 in both rows, head 1 at 3 and then at 90
    q[0, 1, 0] = q[1, 1, 1] = 1.0
    found = page_overlap(q, rows, keys, scale=1.0, window=None, softcap=None, page_tokens=16)
    np.testing.assert_array_equal(found, [1.0, 0.0])


def test_heads_without_preference_see_each_key_alike() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    rows = np.arange(60, TOKENS, dtype=np.int32)
    found = read_attention(
        Runner(model, max_tokens=512, progress=False),
        random_tokens(TOKENS, 5),
        rows,
        ((100, 20, 30),),
        sink=SINK,
        recent=RECENT,
    )
    share = np.mean((rows + 1 - RECENT - SINK) / (rows + 1))
    np.testing.assert_allclose(found.edge, share, atol=1e-5)
    np.testing.assert_allclose(found.target, 10 / 101, atol=1e-5)


def rotated(keys: np.ndarray, by: int, theta: float = 1e4) -> np.ndarray:
    """Keys [G, T, D] turned by so many positions, halves paired."""
    half = keys.shape[-1] // 2
    angle = by * theta ** (-np.arange(half) / half)
    one, other = keys[..., :half], keys[..., half:]
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate((one * c - other * s, other * c + one * s), -1)


def test_shift_is_the_distance_after_keys_were_moved() -> None:
    model = tiny("llama")
    prefix, segment = random_tokens(40, 1), random_tokens(50, 2)
    runner = Runner(model, max_tokens=512, progress=False)
    found = measure_shift(runner, prefix, segment)

    def cached(tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        with torch.inference_mode():
            kept = cache_of(model(torch.from_numpy(tokens).long()[None], use_cache=True))
        return [
            (layer.keys[0].double().numpy(), layer.values[0].double().numpy())
            for layer in kept.layers
        ]

    alone, behind = cached(segment), cached(np.concatenate((prefix, segment)))
    for layer, ((k, v), (moved_k, moved_v)) in enumerate(zip(alone, behind, strict=True)):
        aligned = rotated(k, len(prefix))
        for got, before, after in (
            (found.keys[layer], aligned, moved_k[:, 40:]),
            (found.values[layer], v, moved_v[:, 40:]),
        ):
            apart = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
            np.testing.assert_allclose(got, apart.mean(-1), atol=2e-5)
    # The first layer's K and V know nothing but the token.
    assert found.keys[0].max() < 1e-6
    assert found.values[1].min() > 1e-3


def test_a_tap_hears_rows_and_changes_nothing() -> None:
    runner = small()
    tokens = random_tokens(100, 6).tolist()
    with runner.prefill(tokens, "full", remember=False) as done:
        before = done.logits.clone()
    tap = Tap(runner.spec, {"v_proj": np.array([5, 64, 99], np.int32)})
    with tap, runner.prefill(tokens, "full", remember=False) as done:
        torch.testing.assert_close(done.logits, before, rtol=0, atol=0)
    assert tap.values(2).shape == (3, 2, 16)
    hooks = [layer.attention.v_proj._forward_hooks for layer in runner.spec.layers]
    assert not any(hooks)
    with tap, runner.prefill(tokens[:60], "full", remember=False):
        pass
    with pytest.raises(Unsupported, match="got 1 of 3 rows of v_proj in layer 0"):
        tap.values(0)


# ---- prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [None, 299])
def test_hidden_numbers_are_where_the_targets_say(lead: int | None, folder: Path) -> None:
    runner = Runner(tiny("llama"), Bytes(lead), max_tokens=512, progress=False)
    maker = TextMaker(runner, sink=SINK, recent=RECENT, seed=1)
    corpus, _ = parted(str(folder))
    made = maker.needle(corpus, 700)
    assert len(made.tokens) == 700
    assert made.tokens.tolist()[:1] == ([lead] if lead else made.tokens.tolist()[:1])
    tokenizer = Bytes()
    spans = {target[1:] for target in made.targets}
    assert len(spans) == HIDDEN
    assert len(made.targets) == HIDDEN * len(" 12345")
    for row, first, end in made.targets:
        sentence = tokenizer.decode(made.tokens[first:end])
        found = re.fullmatch(r" The special number for (\w+) is (\d{5})\.", sentence)
        assert found is not None
        before = tokenizer.decode(made.tokens[: row + 1])
        said = re.search(r" The special number for (\w+) is( ?\d*)$", before)
        assert said is not None
        assert said[1] == found[1]
        assert f" {found[2]}"[len(said[2])] == tokenizer.decode(made.tokens[row + 1 : row + 2])
        assert first >= SINK
        assert end <= row - RECENT + 1
    assert set(made.rows.tolist()) == {row for row, _, _ in made.targets}


def test_prompts_follow_seed_length_and_text(folder: Path) -> None:
    runner = small()
    corpus, other = parted(str(folder))

    def all_of(seed: int, corpus: Any = corpus) -> list[bytes]:
        maker = TextMaker(runner, sink=SINK, recent=RECENT, seed=seed)
        prefix, segment = maker.pair(corpus, 600)
        assert (len(prefix), len(segment)) == (300, 300)
        made = (maker.plain(corpus, 600).tokens, maker.needle(corpus, 600).tokens, prefix, segment)
        return [tokens.tobytes() for tokens in made]

    assert all_of(0) == all_of(0)
    assert len({*all_of(0), *all_of(1), *all_of(0, other)}) == 12


def test_held_out_text_is_never_profiled(folder: Path) -> None:
    ours, other = parted(str(folder))
    assert {name for name, _ in ours.documents} == {"0", "2"}
    assert {name for name, _ in other.documents} == {"1", "3"}
    (folder / "one.txt").write_text("abcdef")
    first, second = parted(str(folder / "one.txt"))
    assert (first.documents[0][1], second.documents[0][1]) == ("abc", "def")
    made = held_out(small(), [str(folder)], 600, sink=SINK, recent=RECENT, seed=0)
    assert [text.kind for text in made] == ["text", "needle"]
    read = Bytes().decode(made[0].tokens)
    assert any(read in text for _, text in other.documents)
    assert not any(read in text for _, text in ours.documents)


# ---- profiles and maps -----------------------------------------------------------------------


def profile_of(runner: Runner, folder: Path, **changes: Any) -> HeadProfile:
    options = {"lengths": (600, 500), "texts": [str(folder)], "sink": SINK, "recent": RECENT}
    return profile_heads(runner, **{**options, **changes})


def test_a_profile_is_measured_at_each_length_and_the_same_again(profiled: Profiled) -> None:
    runner, folder, profile = profiled
    assert [scores.length for scores in profile.lengths] == [500, 600]
    for scores in profile.lengths:
        for name, values in scores.named().items():
            assert values.shape == (4, 2), name
            assert np.isfinite(values).all(), name
            assert (values >= 0.0).all(), name
        assert scores.edge.min() > 0.0
        assert scores.key_shift[0].max() < 1e-6
    (again,) = profile_of(runner, folder, lengths=(500,)).lengths
    assert again.to_dict() == profile.lengths[0].to_dict()
    (other,) = profile_of(runner, folder, lengths=(500,), seed=1).lengths
    assert other.to_dict() != profile.lengths[0].to_dict()


def test_the_map_says_what_was_measured(profiled: Profiled) -> None:
    runner, folder, profile = profiled
    made = profile.map(share=0.25)
    assert HeadClassMap.from_json(made.to_json()) == made
    plain = json.loads(made.to_json())
    assert plain["model_fingerprint"] == runner.spec.fingerprint
    assert sorted(plain["weights"]) == sorted(each.name for each in runner.spec.weights)
    is_global = np.array([entry["reach"] == "global" for entry in plain["heads"]])
    np.testing.assert_array_equal(is_global.reshape(4, 2), top(profile.score(), 2))
    for entry in plain["heads"]:
        window = {"kind": "window", "sink": SINK, "recent": RECENT}
        assert entry["class"] == ({"kind": "full"} if entry["reach"] == "global" else window)
        stable = profile.stable()[entry["layer"], entry["head"]]
        assert entry["stability"] == ("stable" if stable else "unstable")
    evidence = plain["evidence"]
    assert evidence["texts"] == [{"name": str(folder), "digest": parted(str(folder))[0].digest}]
    assert evidence["lengths"] == [500, 600]
    assert np.array(evidence["by_length"]["600"]["edge"]).shape == (4, 2)
    assert evidence["seed"] == 0
    other = json.loads(profile.map(count=3, sink=0, recent=64).to_json())
    assert sum(entry["class"] == {"kind": "full"} for entry in other["heads"]) == 3
    assert {"kind": "window", "sink": 0, "recent": 64} in [e["class"] for e in other["heads"]]


def test_a_map_gives_its_profile_back(profiled: Profiled) -> None:
    _, _, profile = profiled
    made = profile.map(share=0.25)
    assert HeadProfile.from_map(made).map(share=0.25) == made
    plain = json.loads(made.to_json())
    for spoil in (
        lambda e: e.pop("by_length"),
        lambda e: e["by_length"].clear(),
        lambda e: e["by_length"]["600"].pop("edge"),
        lambda e: e["by_length"]["600"].update(edge=[[1.0, 2.0]]),
        lambda e: e["by_length"]["600"].update(more=[[1.0, 2.0]]),
        lambda e: e.update(measured_recent="wide"),
        lambda e: e.pop("seed"),
    ):
        broken = json.loads(json.dumps(plain))
        spoil(broken["evidence"])
        with pytest.raises(CorruptHeadMap, match="head map evidence: expected"):
            HeadProfile.from_map(HeadClassMap.from_json(json.dumps(broken)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": ()}, "lengths: expected at least one"),
        ({"lengths": (20,)}, "more than sink \\+ recent = 20 tokens, got 20"),
        ({"lengths": (600, 1025)}, "the model's context of 1024 tokens, got 1025"),
        ({"lengths": (529,)}, "the 528 tokens of the arena, got 529"),
        ({"lengths": (150,)}, "so that numbers can be hidden"),
        ({"texts": []}, "texts: expected at least one"),
        ({"texts": ["nowhere"]}, "corpus: expected one of"),
        ({"prompts": 0}, "prompts: expected >= 1"),
        ({"recent": 0}, "recent >= 1"),
        ({"sink": -1}, "sink >= 0"),
    ],
)
def test_profiling_refuses(changes: dict[str, Any], says: str, folder: Path) -> None:
    room = 2048 if 1025 in changes.get("lengths", ()) else 512
    model = tiny("llama", max_position_embeddings=1024)
    runner = Runner(model, Bytes(), max_tokens=room, progress=False)
    with pytest.raises(InvalidArgument, match=says):
        profile_of(runner, folder, **{"lengths": (500,), **changes})


def test_profiling_refuses_texts_and_runners_that_do_not_do(folder: Path) -> None:
    (folder / "empty.txt").write_text("  ")
    with pytest.raises(InvalidArgument, match="expected text, got none"):
        profile_of(small(), folder, texts=[str(folder / "empty.txt")])
    (folder / "short.txt").write_text("too short to be cut")
    with pytest.raises(InvalidArgument, match="expected a document of at least 500 tokens"):
        profile_of(small(), folder, texts=[str(folder / "short.txt")])
    with pytest.raises(InvalidArgument, match="tokenizer"):
        profile_of(Runner(tiny("llama"), max_tokens=2048), folder, lengths=(500,))


# ---- effect and its bound --------------------------------------------------------------------


def test_effect_is_the_kl_of_the_model_under_the_maps_mask(folder: Path) -> None:
    model = tiny("llama", max_position_embeddings=2048)

    def make(heads: HeadClassMap | None) -> Runner:
        options = {"max_tokens": 1024, "progress": False, "check": heads is None}
        return Runner(model, Bytes(), heads=heads, **options)

    whole = make(None)
    texts = held_out(whole, [str(folder)], 500, sink=SINK, recent=RECENT, seed=0)
    meter = EffectMeter(make, texts)
    scores = LengthScores(10, *(np.zeros((4, 2)) for _ in range(5)))
    profile = HeadProfile(whole.spec.fingerprint, SINK, RECENT, (scores,))
    every = meter.measure(profile.map(share=1.0))
    assert every.text < 1e-9
    assert every.answers is not None
    assert every.answers < 1e-9

    none = meter.measure(profile.map(share=0.0))
    row, seen = np.arange(500)[:, None], np.arange(500)
    local = (seen <= row) & ((seen > row - RECENT) | (seen < SINK))
    mask = torch.where(torch.from_numpy(local), 0.0, torch.finfo(torch.float32).min)[None, None]
    wanted = []
    for text in texts:
        ids = torch.from_numpy(text.tokens).long()[None]
        rows = text.rows if text.kind == "needle" else np.arange(500 - SCORED, 500)
        p = model(ids).logits[0, rows].log_softmax(-1).double()
        q = model(ids, attention_mask=mask).logits[0, rows].log_softmax(-1).double()
        wanted.append(float((p.exp() * (p - q)).sum(-1).mean()))
    assert [none.text, none.answers] == pytest.approx(wanted, rel=2e-3)
    assert min(wanted) > 1e-4
    assert none.worst == max(none.text, none.answers or 0.0)


def test_an_effect_needs_plain_text() -> None:
    with pytest.raises(InvalidArgument, match="at least one plain text"):
        EffectMeter(lambda _: small(), ())
