"""The runner against transformers' own forward, on real weights and on every family."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers

import kvweave
from families import FAMILIES, greedy, random_tokens, reference, tiny
from kvweave.errors import OutOfMemory
from kvweave.policies import POLICIES
from kvweave.runner import Runner, Sampling, Segment
from kvweave.runner.model.model_spec import describe

PROMPTS = [
    "The capital of France is",
    "Write one sentence about the history of the printing press and why it mattered:",
    'def fibonacci(n):\n    """Returns the n-th Fibonacci number."""\n',
]


@pytest.fixture(scope="module")
def runner(smollm2):
    model, tokenizer = smollm2
    return Runner(model, tokenizer, max_tokens=16384, progress=False)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_full_equals_the_models_own_forward(runner, smollm2, prompt):
    ids = runner.tokenize(prompt).tokens
    with runner.prefill(prompt, "full", logits_from=0) as done:
        assert torch.allclose(done.logits, reference(smollm2[0], ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_models_own(runner, smollm2, prompt):
    theirs = greedy(smollm2[0], runner.tokenize(prompt).tokens, 64)
    assert runner.generate(prompt, "full", max_new_tokens=64, stop=()).tokens == theirs


@pytest.mark.parametrize("shared", [16, 64, 80, 300])
def test_prefix_hit_changes_no_bit(runner, shared):
    generator = np.random.default_rng(shared)
    tokens = generator.integers(0, 49152, 341).astype(np.int32)
    first = tokens.copy()
    first[shared:] = generator.integers(0, 49152, 341 - shared)
    with runner.prefill(tokens, "full", logits_from=shared) as done:
        exact = done.logits.clone()
    namespace = f"prefix-{shared}"
    runner.prefill(first, "prefix", namespace=namespace).release()
    with runner.prefill(tokens, "prefix", logits_from=shared, namespace=namespace) as done:
        assert done.report.reused_prefix == shared
        assert torch.equal(done.logits, exact)


@pytest.mark.parametrize("length", [64, 128, 129])
def test_a_prompt_that_fills_its_tiles_keeps_its_bits(runner, length):
    """The same last logits, however many rows were asked for and computed beside them."""
    tokens = np.random.default_rng(length).integers(0, 49152, length).astype(np.int32)
    seen = []
    for start in (0, length // 2, length - 1):
        with runner.prefill(tokens, "full", logits_from=start, remember=False) as done:
            seen.append(done.logits[-1].clone())
    namespace = f"tiles-{length}"
    runner.prefill(tokens[: length // 2 + 3], "prefix", namespace=namespace).release()
    with runner.prefill(tokens, "prefix", namespace=namespace) as done:
        assert done.report.reused_prefix > length // 3
        seen.append(done.logits[-1].clone())
    assert all(torch.equal(seen[0], logits) for logits in seen)


def test_batch_equals_alone(runner):
    alone = [runner.generate(p, "full", max_new_tokens=12, stop=()).tokens for p in PROMPTS]
    batch = runner.generate_batch(PROMPTS, "full", max_new_tokens=12, stop=())
    assert [g.tokens for g in batch] == alone


def test_stream_says_what_generate_says(runner):
    whole = runner.generate(PROMPTS[1], "full", max_new_tokens=24)
    said = list(runner.stream(PROMPTS[1], "full", max_new_tokens=24))
    assert [t.token for t in said] == whole.tokens
    assert "".join(t.text for t in said) == whole.text


def test_closing_a_stream_gives_its_blocks_back(runner):
    held = runner.cache.stats()["held"]
    stream = runner.stream(PROMPTS[0], "full", max_new_tokens=24)
    next(stream)
    assert runner.cache.stats()["held"] > held
    stream.close()
    assert runner.cache.stats()["held"] == held
    runner.cache.check()


def test_sampling_is_seeded_and_batch_independent(runner):
    hot = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7)
    once = runner.generate(PROMPTS[0], "full", max_new_tokens=8, sampling=hot, stop=())
    again = runner.generate_batch([PROMPTS[0]] * 2, "full", max_new_tokens=8, sampling=hot, stop=())
    assert once.tokens == again[0].tokens == again[1].tokens
    other = Sampling(temperature=1.0, seed=8)
    assert (
        runner.generate(PROMPTS[0], "full", max_new_tokens=8, sampling=other, stop=()).tokens
        != once.tokens
    )


def test_second_turn_reuses_the_first_turns_blocks(runner):
    first = PROMPTS[1] * 4
    answer = runner.generate(first, "prefix", max_new_tokens=40, namespace="chat", stop=())
    tokens = [*runner.tokenize(first).tokens.tolist(), *answer.tokens, 100, 200, 300]
    with runner.prefill(tokens, "prefix", namespace="chat") as done:
        assert done.report.reused_prefix == len(tokens) - 4
    with runner.prefill(tokens, "prefix", namespace="another") as done:
        assert done.report.reused_prefix == 0


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return tiny(request.param)


@pytest.mark.parametrize("length", [1, 17, 150])
def test_families_full(family, length):
    runner = Runner(family, max_tokens=1024, progress=False)
    tokens = random_tokens(length, length)
    with runner.prefill(tokens, "full", logits_from=0) as done:
        assert torch.allclose(done.logits, reference(family, tokens), atol=1e-4, rtol=0)


def test_families_decode(family):
    runner = Runner(family, max_tokens=1024, progress=False)
    tokens = random_tokens(50, 3)
    theirs = greedy(family, tokens, 16)
    assert runner.generate(tokens, "full", max_new_tokens=16, stop=()).tokens == theirs


@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_families_segment_alone_reused_at_its_own_place_is_exact(family, mode):
    """A segment that stands first, where it was encoded, is an exact context."""
    runner = Runner(family, max_tokens=1024, progress=False, mode=mode)
    segment, question = random_tokens(48, 5), random_tokens(20, 6)
    runner.insert(segment.tolist(), "kb")
    parts = [Segment(tokens=segment.tolist()), Segment(tokens=question.tolist(), namespace="q")]
    with runner.prefill(parts, "naive", logits_from=48) as done:
        grown = family.config.max_position_embeddings < 68  # dynamic NTK: other frequencies
        assert done.report.reused_segment + done.report.reused_prefix == (0 if grown else 48)
        whole = np.concatenate((segment, question))
        assert torch.allclose(done.logits, reference(family, whole)[48:], atol=1e-4, rtol=0)


def test_model_without_rope_is_refused():
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64)
    with pytest.raises(kvweave.Unsupported, match="RoPE|causal LM|rotary"):
        Runner(transformers.GPT2LMHeadModel(config))


def test_unknown_arithmetic_is_refused():
    """A family with layers of another kind is caught by its numbers, not trusted by its names."""
    with pytest.raises(kvweave.Unsupported, match="expected our forward"):
        Runner(tiny("hunyuan"), max_tokens=256)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deepseek-v3", "expected keys and values of heads .* got latent attention"),
        ("qwen3-next", "expected full_attention or sliding_attention, got linear_attention"),
    ],
)
def test_attention_of_another_kind_is_refused_by_name(name, says):
    with pytest.raises(kvweave.Unsupported, match=says):
        Runner(tiny(name), max_tokens=256)


def test_norms_of_no_known_form_are_refused_by_name():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.third_layernorm = torch.nn.LayerNorm(64)
    with pytest.raises(kvweave.Unsupported, match="a form that is known, got Llama.* third_layern"):
        Runner(model, max_tokens=256)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "at least one token"),
        ([], "at least one token"),
        ([49152], "0 <= id < 49152"),
        ([-1], "0 <= id < 49152"),
        (["a", 3], "str or a Segment"),
    ],
)
def test_bad_prompts(runner, prompt, words):
    with pytest.raises(kvweave.InvalidArgument, match=words):
        runner.prefill(prompt)
    runner.cache.check()


def test_unknown_policy(runner):
    with pytest.raises(kvweave.InvalidArgument, match="expected one of full, prefix"):
        runner.prefill("hello", "best")


def test_full_pool_takes_nothing(smollm2):
    runner = Runner(*smollm2, max_tokens=256, progress=False, check=False)
    before = runner.cache.stats()
    with pytest.raises(kvweave.PoolFull):
        runner.prefill(list(range(1000)), "full")
    runner.cache.check()
    assert runner.cache.stats()["held"] == before["held"] == 0
    with runner.prefill(list(range(200)), "full"), pytest.raises(kvweave.PoolFull):
        runner.generate(list(range(100)), "full", max_new_tokens=4)
    runner.cache.check()


@pytest.mark.parametrize(("what", "steps"), [("prefill", 0), ("decode step", 3)])
def test_memory_that_runs_out_takes_nothing(what, steps) -> None:
    """A layer that finds no memory, in the prompt's pass or some steps later."""
    model, tokens, calls = tiny("llama"), random_tokens(150, 1), []
    runner = Runner(model, max_tokens=512, progress=False)
    wanted = greedy(model, tokens, 8)

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) > steps:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    hook = model.model.layers[-1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemory, match=f"{what}: expected memory for it, got Tried") as refused:
        runner.generate(tokens, "full", max_new_tokens=8, stop=())
    assert refused.value.got == "Tried to allocate 2.00 GiB"
    hook.remove()
    assert len(calls) == steps + 1
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0
    assert runner.generate(tokens, "full", max_new_tokens=8, stop=()).tokens == wanted


def test_a_first_token_that_cannot_be_chosen_takes_nothing() -> None:
    class Failing(Sampling):
        def pick(self, *_: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    runner = Runner(tiny("llama"), max_tokens=512, progress=False)
    for answer in (runner.generate, lambda *ask, **how: list(runner.stream(*ask, **how))):
        with pytest.raises(OutOfMemory, match="sampling: expected memory for it"):
            answer(random_tokens(50, 1), "full", sampling=Failing())
        runner.cache.check()
        assert runner.cache.stats()["held"] == 0


def test_the_fingerprint_is_of_the_model_and_not_of_its_folder(tmp_path):
    model = tiny("llama")
    name = describe(model).fingerprint
    model.save_pretrained(tmp_path / "copy")
    again = type(model).from_pretrained(tmp_path / "copy").eval()
    assert again.config.name_or_path != model.config.name_or_path
    assert describe(again).fingerprint == name
    again.model.layers[0].self_attn.v_proj.weight.data.mul_(1.01)
    assert describe(again).fingerprint != name
    model.config.rms_norm_eps *= 2
    assert describe(model).fingerprint != name


def test_tokens_may_come_as_any_kind_of_array(runner):
    tokens = [504, 2365, 282, 4649]
    kinds = [tokens, np.asarray(tokens), torch.tensor(tokens), tuple(tokens)]
    wanted = runner.tokenize(tokens).tokens
    assert all(np.array_equal(runner.tokenize(kind).tokens, wanted) for kind in kinds)
    for bad, got in (
        (torch.tensor([tokens]), "got 2-D"),
        (torch.tensor([0.5]), "got 1-D float"),
        (np.zeros(0, np.int32), "got an empty prompt"),
    ):
        with pytest.raises(kvweave.InvalidArgument, match=got):
            runner.tokenize(bad)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"max_tokens": 0}, "max_tokens: expected >= 1, got 0"),
        ({"max_tokens": -5}, "max_tokens: expected >= 1, got -5"),
        ({"max_tokens": 64, "arena_bytes": 1 << 20}, "got both"),
        ({"page_tokens": 0}, "page_tokens: expected"),
        ({"arena_bytes": 1}, "expected .* got 0"),
    ],
)
def test_an_arena_of_no_size_is_refused(sizes, says):
    with pytest.raises(kvweave.InvalidArgument, match=says):
        Runner(tiny("llama"), check=False, progress=False, **sizes)


def test_one_token_is_a_prompt(runner):
    answers = {
        policy: runner.generate([504], policy, max_new_tokens=3).tokens for policy in POLICIES
    }
    assert len(set(map(tuple, answers.values()))) == 1


def test_a_model_in_train_mode_is_refused() -> None:
    with pytest.raises(kvweave.InvalidArgument, match="expected one in eval mode"):
        Runner(tiny("llama").train(), max_tokens=256)


@pytest.mark.parametrize(
    ("name", "most"), [("llama", 512), ("llama-yarn", 512), ("llama-dynamic", None)]
)
def test_more_than_the_model_is_made_for_is_said(name, most) -> None:
    runner = Runner(tiny(name), max_tokens=1024, progress=False, check=False)
    assert runner.spec.positions == most
    tokens = random_tokens(505, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.generate(tokens, "full", max_new_tokens=8, stop=())
    said = nullcontext() if most is None else pytest.warns(UserWarning, match="expected up to 512")
    with said:
        runner.generate(tokens, "full", max_new_tokens=9, stop=())


def test_warnings_are_about_the_callers_line() -> None:
    """Whatever stands between: decorators, generators, a progress bar, the conversation's turns."""
    runner = Runner(tiny("llama"), max_tokens=2048, progress=True, check=False)
    long, short = random_tokens(520, 1).tolist(), random_tokens(20, 2).tolist()
    how = {"max_new_tokens": 2, "stop": ()}
    talk = runner.conversation("full")
    talk.ask(short, **how)
    calls = [
        lambda: runner.generate(long, "full", **how),
        lambda: runner.generate_batch([long, short], "full", **how),
        lambda: list(runner.stream(long, "full", **how)),
        lambda: runner.prefill(long, "full").release(),
        lambda: runner.encode(long, "kb"),
        lambda: runner.insert(long, "kb"),
        lambda: runner.insert_many([("kb", long), ("kc", short)]),
        lambda: talk.prefill(long).release(),
        lambda: runner.conversation("full").ask(long, **how),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
        line = call.__code__.co_firstlineno
        assert [(w.filename, w.lineno) for w in said] == [(__file__, line)]


def test_a_report_is_one_line(runner) -> None:
    with runner.prefill(list(range(40)), "full", remember=False) as done:
        assert repr(done.report).startswith("Report(full: 40 tokens, 0 by prefix, 0 by segment")
        assert len(repr(done.report)) < 160


def test_flops_are_those_of_what_ran() -> None:
    """Counted by hand: hidden 64, heads 4 of 16 over 2 KV heads, feed-forward 96, 4 layers."""
    model = tiny("llama")
    runner = Runner(model, max_tokens=512, progress=False)
    with runner.prefill(random_tokens(50, 1), "full", remember=False) as done:
        flops = done.report.flops
    last = 49  # rows of the last layer that end with their K, V
    assert flops == {
        "projections": 2 * (4 * 50 * 64 * (64 + 2 * 32) + (4 * 50 - last) * 64 * 64),
        "attention": 4 * 16 * 4 * (3 * 50 * 51 // 2 + 50),
        "feed_forward": 2 * (4 * 50 - last) * 3 * 64 * 96,
        "logits": 2 * 64 * 300,
        "scores": 0,
    }
    with runner.prefill(random_tokens(50, 1), "full", logits_from=0, remember=False) as done:
        assert done.report.flops["attention"] == 4 * 16 * 4 * 4 * 50 * 51 // 2


def test_flops_of_experts_are_those_that_a_row_is_sent_to() -> None:
    runner = Runner(tiny("qwen3-moe"), max_tokens=512, progress=False)
    with runner.prefill(random_tokens(50, 1), "full", logits_from=0) as done:
        mlp = runner.spec.layers[0].feed_forward
        assert type(mlp).__name__ == "Qwen3MoeSparseMoeBlock"
        assert done.report.flops["feed_forward"] % (2 * 50) == 0
        sparse = 4 * 64 + 2 * 3 * 64 * 32  # the router, and two of four experts
        assert done.report.flops["feed_forward"] == 2 * 50 * 4 * sparse
