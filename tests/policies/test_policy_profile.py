"""Policy profiles: what goes into a file comes back, and anything else is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import random_tokens, tiny
from head_maps import CLASSES, class_map, classes_of, head_map, runner_of
from kvweave.errors import CorruptHeadMap, CorruptProfile, InvalidArgument
from kvweave.policies import Foresight, Naive, Weave, policy_of
from kvweave.policies.policy_profile import (
    MOST_BYTES,
    Bound,
    Evidence,
    PolicyProfile,
    Text,
    TriedHeads,
    heads_digest,
)
from kvweave.policies.policy_text import read_policy, text_of
from kvweave.runner import Runner
from policy_profiles import profile

finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=12)
evidence = st.builds(
    Evidence,
    stage=st.sampled_from(["search", "certify"]),
    policy=words,
    heads=st.none() | words,
    job=words,
    task=words,
    layout=st.none() | words,
    length=st.integers(0, 10**6),
    samples=st.integers(0, 10**6),
    lost=st.integers(0, 9),
    value=st.none() | finite,
    low=st.none() | finite,
    high=st.none() | finite,
    flops_share=finite,
    kv_share=finite,
)
HEADS = class_map(np.asarray([[(0, 0), (16, 4)], [(9, 0), (0, 0)]], np.int32), "m" * 64)
TRIED = TriedHeads(heads_digest(HEADS), 2, 4)
profiles = st.builds(
    PolicyProfile,
    model_fingerprint=st.just("m" * 64),
    dtype=words,
    policy=st.sampled_from(["full", "naive", "foresight:share=0.1:draft=4"]),
    bound=st.builds(
        Bound,
        kind=st.sampled_from(["kl", "score-drop"]),
        value=st.floats(1e-9, 10.0),
        level=st.floats(0.01, 0.99),
    ),
    flops_share=finite,
    kv_share=finite,
    evidence=st.lists(evidence, max_size=3).map(tuple),
    tried_heads=st.just((TRIED,)),
    texts=st.lists(st.builds(Text, name=words, digest=words), max_size=2).map(tuple),
    seed=st.integers(0, 2**40),
    kvweave=words,
    date=words,
    heads=st.none() | st.just(HEADS),
)


def spoiled(**changes: object) -> str:
    plain = json.loads(profile().to_json())
    return json.dumps({**plain, **changes})


@given(made=profiles)
def test_what_is_written_is_read(made: PolicyProfile) -> None:
    text = made.to_json()
    assert PolicyProfile.from_json(text) == made
    assert PolicyProfile.from_json(text).to_json() == text


@given(share=st.floats(0.0, 1.0), draft=st.integers(0, 64), depth=st.floats(0.0, 1.0))
def test_a_policys_text_is_the_policy(share: float, draft: int, depth: float) -> None:
    policy = Foresight(share=share, draft=draft, depth=depth)
    assert read_policy(text_of(policy)) == policy


def test_texts_of_policies() -> None:
    assert text_of("naive") == "naive"
    assert text_of(Foresight(share=None, count=3)) == "foresight:count=3"
    assert read_policy(text_of(Weave())) == Weave()

    class Mine(Naive):
        """A policy of the user's own."""

    with pytest.raises(InvalidArgument, match="got a Mine"):
        text_of(Mine())


WHOLE = [profile().to_json(), profile(fingerprint="m" * 64, heads=HEADS).to_json()]


@given(data=st.data(), text=st.sampled_from(WHOLE))
def test_cut_short(data: st.DataObject, text: str) -> None:
    cut = data.draw(st.integers(0, len(text) - 3))
    with pytest.raises(CorruptProfile, match="expected JSON, got"):
        PolicyProfile.from_json(text[:cut])


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        (spoiled(schema_version=1), "2", "1"),
        (spoiled(schema_version=3), "2", "3"),
        (spoiled(schema_version=True), "2", "True"),
        (spoiled(schema_version=None), "2", "None"),
        (spoiled(more=1), "the fields model_fingerprint", "'more' too"),
        (spoiled(seed="0"), "a whole number", "'0'"),
        (spoiled(seed=1.5), "a whole number", "1.5"),
        (spoiled(seed=-1), "a number >= 0", "-1"),
        (spoiled(seed=True), "a whole number", "True"),
        (spoiled(flops_share="x"), "a number", "'x'"),
        (spoiled(flops_share=math.nan), "finite numbers", "NaN"),
        (spoiled(flops_share=-math.inf), "finite numbers", "-Infinity"),
        (spoiled(seed="@").replace('"@"', "1e999"), "a whole number", "inf"),
        (spoiled(flops_share="@").replace('"@"', "1e999"), "a finite number", "inf"),
        (spoiled(flops_share="@").replace('"@"', "9" * 400), "a finite number", "very long"),
        (spoiled(seed="@").replace('"@"', "9" * 9000), "numbers of usual length", "longer"),
        (spoiled(evidence={}), "a list", "dict"),
        (spoiled(evidence=[3]), "an object", "int"),
        (spoiled(evidence=[{}]), "the fields stage", "no stage"),
        (spoiled(bound=None), "an object", "NoneType"),
        (spoiled(heads=3), "an object", "int"),
        (spoiled(heads="0123456789abcdef"), "an object", "str"),
        (spoiled(heads={}), "", ""),
        (spoiled(heads={"schema_version": "@"}).replace('"@"', "1e999"), "", ""),
        (spoiled(heads={"h" * 9000: "\ud800"}), "", ""),
        (spoiled(heads=json.loads(HEADS.to_json())), "", ""),
        (spoiled(tried_heads=[{"digest": "d", "whole": -1, "heads": 4}]), "a number >= 0", "-1"),
        ("[]", "an object", "list"),
        ("null", "an object", "NoneType"),
        ("", "JSON", "Expecting value"),
        ('{"a": 1, "a": 2}', "each field once", "'a' twice"),
        ("[" * 100_000, "JSON", "nested"),
        ("x" * 10_000_000, f"at most {MOST_BYTES}", "10000000"),
        (spoiled(dtype="d" * 900_000, policy="p" * 90_000), "", ""),
        (spoiled(bound={"kind": "kl", "value": 0.0, "level": 0.9}), "", ""),
        (spoiled(bound={"kind": "x" * 9000, "value": 1.0, "level": 0.9}), "kl or score", "xx"),
        (spoiled(policy="foresight:share=7"), "", ""),
        (spoiled(policy="of my own"), "", ""),
    ],
)
def test_what_is_no_profile(text: str, expected: str, got: str) -> None:
    with pytest.raises(CorruptProfile) as raised:
        PolicyProfile.from_json(text)
    assert expected in (raised.value.expected or "")
    assert got in (raised.value.got or "")
    assert len(str(raised.value)) < 400


def test_a_missing_field_is_named() -> None:
    for name in json.loads(profile().to_json()):
        plain = json.loads(profile().to_json())
        del plain[name]
        with pytest.raises(CorruptProfile, match=name):
            PolicyProfile.from_json(json.dumps(plain))


@pytest.mark.parametrize("depth", [100, 127, 128, 500, 900, 950, 990, 20_000])
def test_a_head_map_nested_deeply(depth: int) -> None:
    text = json.dumps({**json.loads(HEADS.to_json()), "evidence": {"deep": "@"}})
    nested = "[" * depth + "]" * depth
    with pytest.raises(CorruptProfile) as raised:
        PolicyProfile.from_json(spoiled(heads="@@").replace('"@@"', text).replace('"@"', nested))
    assert len(str(raised.value)) < 400


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    assert PolicyProfile.read(path) == profile()
    for whole in (b"\xff" * 20, b"\x00" * (10 << 20)):
        path.write_bytes(whole)
        with pytest.raises(CorruptProfile, match=r"profile\.json: expected") as raised:
            PolicyProfile.read(path)
        assert len(str(raised.value)) < 200
    with pytest.raises(FileNotFoundError):
        PolicyProfile.read(tmp_path / "absent.json")


@pytest.mark.parametrize("make", [lambda: Bound("kl", 0.0), lambda: Bound("kl", math.nan)])
def test_bounds_that_are_none(make) -> None:
    with pytest.raises(InvalidArgument, match="expected a number above 0"):
        make()


# ---- in a runner ---------------------------------------------------------------------------


def test_a_profile_of_something_else_is_refused_at_construction() -> None:
    model = tiny("llama")
    runner = Runner(model, max_tokens=256, progress=False, check=False)
    mine = profile(fingerprint=runner.spec.fingerprint)
    for wrong, what in (
        (replace(mine, model_fingerprint="another"), "model: expected .*, got another"),
        (replace(mine, dtype="bfloat16"), "dtype: expected float32, got bfloat16"),
    ):
        with pytest.raises(CorruptProfile, match=what):
            Runner(model, max_tokens=256, progress=False, check=False, profile=wrong)


def test_a_head_map_is_known_by_what_heads_keep() -> None:
    model = tiny("llama")
    spec = runner_of(model).spec
    heads = head_map(spec, classes_of(model))
    other = head_map(spec, classes_of(model, CLASSES[1:]))
    mine = profile(fingerprint=spec.fingerprint, heads=heads)
    assert runner_of(model, heads=heads, profile=mine).heads == heads
    without = profile(fingerprint=spec.fingerprint)
    for asked, certified in ((other, mine), (heads, without)):
        with pytest.raises(CorruptProfile, match=f"head map: expected {heads_digest(asked)}, got"):
            runner_of(model, heads=asked, profile=certified)


def test_a_profiles_head_map_is_the_runners() -> None:
    model = tiny("llama")
    whole = runner_of(model)
    heads = head_map(whole.spec, classes_of(model))
    mine = profile("naive", whole.spec.fingerprint, heads)
    certified = runner_of(model, profile=PolicyProfile.from_json(mine.to_json()))
    by_hand = runner_of(model, heads=heads)
    assert certified.heads == heads
    tokens = random_tokens(200, 0).tolist()
    with (
        certified.prefill(tokens) as mine_done,
        by_hand.prefill(tokens, "naive") as wanted,
        whole.prefill(tokens, "naive") as other,
    ):
        assert mine_done.report.policy == "naive"
        assert mine_done.report.kv_bytes == wanted.report.kv_bytes < other.report.kv_bytes
        assert torch.equal(mine_done.logits, wanted.logits)
        assert not torch.equal(mine_done.logits, other.logits)


def test_a_head_map_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="heads: expected a map of model ffff"):
        profile(heads=HEADS)
    with pytest.raises(InvalidArgument, match="heads: expected one of the maps tried, , got"):
        replace(profile(fingerprint="m" * 64), heads=HEADS)
    model = tiny("llama")
    fingerprint = runner_of(model).spec.fingerprint
    # A map that says it is of this model, and has other layers.
    short = class_map(classes_of(model)[:1], fingerprint)
    with pytest.raises(CorruptHeadMap, match="expected 4 layers"):
        runner_of(model, profile=profile(fingerprint=fingerprint, heads=short))


def test_a_profiles_policy_is_used_by_default() -> None:
    model = tiny("llama")
    plain = Runner(model, max_tokens=512, progress=False, check=False)
    chosen = "naive"
    mine = profile(chosen, plain.spec.fingerprint)
    runner = Runner(model, max_tokens=512, progress=False, check=False, profile=mine)
    tokens = random_tokens(40, 0).tolist()
    with runner.prefill(tokens) as done:
        assert done.report.policy == policy_of(chosen).name
    with runner.prefill(tokens, "full") as done:
        assert done.report.policy == "full"
    assert runner.generate(tokens, max_new_tokens=1).report.policy == chosen
    assert next(iter(runner.stream(tokens, max_new_tokens=1)))
