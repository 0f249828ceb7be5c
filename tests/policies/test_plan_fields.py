"""What the executor does with each field of a plan, against transformers' own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvweave
from families import random_tokens, tiny
from head_maps import classes_of, masked_greedy, masked_reference, near, runner_of
from kvweave.plan import LayerPlan
from kvweave.runner import Runner, Segment
from kvweave.runner.prefill.prefill import Lookup
from plan_policies import Planned, Restoring, every

TOKENS = 150


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


# ---- rows of window heads -------------------------------------------------------------------


def projected(model: Any, tokens: np.ndarray, classes: np.ndarray) -> list[list[torch.Tensor]]:
    """What k_proj and v_proj of each layer give for a text alone, [T, G · D], under the masks."""
    kept: list[list[torch.Tensor]] = [[], []]
    handles = []
    for layer in model.model.layers:
        for which, name in enumerate(("k_proj", "v_proj")):
            projection = getattr(layer.self_attn, name)
            handles.append(
                projection.register_forward_hook(
                    lambda _m, _i, out, to=kept[which]: to.append(out[0].clone())
                )
            )
    masked_reference(model, classes, tokens)
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize("mode", ["materialise", "share"])
def test_local_rows_leave_window_heads_as_they_were_reused(llama, mode) -> None:
    """Global heads get new K, V for all rows, window heads for the fresh ones alone.

    The reference puts what k_proj and v_proj gave for the segment alone into the model's forward.
    """
    classes = classes_of(llama)
    runner = runner_of(llama, classes, mode=mode)
    segment, before, after = (random_tokens(n, n) for n in (70, 21, 13))
    runner.insert(segment.tolist(), "s", "kb")
    parts = [
        Segment(tokens=before.tolist(), namespace="f"),
        Segment(tokens=segment.tolist(), namespace="kb"),
        Segment(tokens=after.tolist(), namespace="f"),
    ]
    policy = Planned(lambda view, layer: {"local_rows": view.fresh})
    with runner.prefill(parts, policy, logits_from=0, remember=False) as done:
        got, report = done.logits.clone(), done.report
    assert report.reused_segment == 70
    assert (report.shared_kv_bytes > 0) == (mode == "share")

    alone, handles = projected(llama, segment, classes), []
    for index, layer in enumerate(llama.model.layers):
        heads = np.flatnonzero(classes[index, :, 0])
        columns = torch.cat([torch.arange(h * 16, h * 16 + 16) for h in [*heads]] or [])
        if not len(heads):
            continue
        for which, name in enumerate(("k_proj", "v_proj")):
            old = alone[which][index]

            def put(_m: Any, _i: Any, out: Any, old: Any = old, at: Any = columns) -> Any:
                out = out.clone()
                out[0, 21:91, at] = old[:, at]
                return out

            handles.append(getattr(layer.self_attn, name).register_forward_hook(put))
    wanted = masked_reference(llama, classes, np.concatenate((before, segment, after)))
    for handle in handles:
        handle.remove()
    near(got, wanted)
    assert (
        float(
            (got - masked_reference(llama, classes, np.concatenate((before, segment, after))))
            .abs()
            .max()
        )
        > 1e-3
    )


# ---- restored heads -------------------------------------------------------------------------


def test_a_restored_head_is_a_full_one(llama) -> None:
    classes, tokens = classes_of(llama), random_tokens(TOKENS, 15)
    local = classes[..., 0] > 0
    runner = runner_of(llama, classes)
    policy = Restoring(lambda layer, _: tuple(np.flatnonzero(local[layer])))
    wanted = [(int(layer), int(head)) for layer, head in np.argwhere(local)]
    full = np.zeros_like(classes)
    with runner.prefill(tokens, policy, logits_from=0, remember=False) as done:
        near(done.logits, masked_reference(llama, full, tokens))
        assert done.report.restored == wanted
        assert done.report.refused == []
    made = runner.generate(tokens, policy, max_new_tokens=20, stop=())
    assert made.tokens == masked_greedy(llama, full, tokens, 20)
    assert runner.cache.stats()["held"] == 0
    runner.cache.check()


def test_requests_with_unlike_restored_heads_decode_side_by_side(llama) -> None:
    classes, tokens = classes_of(llama), random_tokens(60, 16)
    runner = runner_of(llama, classes)
    chosen = [np.argwhere(classes[..., 0] > 0)[i] for i in (0, 2)]
    policies = [
        Restoring(lambda layer, _, at=at: (int(at[1]),) if layer == at[0] else ()) for at in chosen
    ]
    wanted = []
    for layer, head in chosen:
        restored = classes.copy()
        restored[layer, head] = 0
        wanted.append(masked_greedy(llama, restored, tokens, 12))
    answering = runner._answering
    asks = [answering.ask(policy, Lookup(), 12, None, ()) for policy in policies]
    answers = [answering.start(runner.tokenize(tokens), ask) for ask in asks]
    answering.run(answers)
    assert [answer.sequence.tokens for answer in answers] == wanted
    for answer in answers:
        answer.done.release()
    runner.cache.check()


def test_no_room_to_restore_is_said(llama) -> None:
    classes, tokens = classes_of(llama), random_tokens(TOKENS, 17)
    runner = runner_of(llama, classes, max_tokens=170)
    policy = Restoring(lambda layer, _: tuple(np.flatnonzero(classes[layer, :, 0])))
    with runner.prefill(tokens, policy, logits_from=0, remember=False) as done:
        report = done.report
        assert report.refused
        after = classes.copy()
        for layer, head in report.restored:
            after[layer, head] = 0
        near(done.logits, masked_reference(llama, after, tokens))
    assert sorted(report.restored + report.refused) == [
        (int(layer), int(head)) for layer, head in np.argwhere(classes[..., 0] > 0)
    ]
    runner.cache.check()


def test_what_a_prefix_hit_lacks_cannot_be_restored(llama) -> None:
    classes, tokens = classes_of(llama), random_tokens(TOKENS, 18)
    runner = runner_of(llama, classes)
    runner.prefill(tokens, "prefix").release()
    policy = Restoring(lambda layer, _: tuple(np.flatnonzero(classes[layer, :, 0])), reuse="prefix")
    with runner.prefill(tokens, policy) as done:
        assert done.report.reused_prefix > 100
        assert done.report.restored == []
        assert len(done.report.refused) == int((classes[..., 0] > 0).sum())
        near(done.logits[0], masked_reference(llama, classes, tokens)[-1])


def test_salience_is_what_dense_attention_says(llama) -> None:
    """Mass per token and the share outside each head's reach, from the model's own attention."""
    classes, tokens = classes_of(llama), random_tokens(TOKENS, 19)
    runner, policy = runner_of(llama, classes), Restoring()
    runner.prefill(tokens, policy).release()
    full = np.zeros_like(classes)
    full[1:] = classes[1:]
    # Layer 0 attends to embeddings alone, so its weights are those of the model without a map.
    ids = torch.as_tensor(tokens)[None].long()
    weights = llama(ids, output_attentions=True, use_cache=False).attentions[0][0]
    asked = weights[:, -7:]
    near(policy.seen[0].mass, asked.sum((0, 1)))
    rows, keys = torch.arange(TOKENS)[-7:, None], torch.arange(TOKENS)
    for head, (window, sink) in enumerate(classes[0].tolist()):
        far = (keys <= rows - window) & (keys >= sink) if window else keys < 0
        share = (asked[2 * head : 2 * head + 2] * far).sum(-1).mean()
        assert float(policy.seen[0].edge[head]) == pytest.approx(float(share), abs=1e-5)


# ---- a sparse feed-forward ------------------------------------------------------------------


def test_the_feed_forward_of_all_rows_is_the_default(llama) -> None:
    runner, tokens = runner_of(llama), random_tokens(TOKENS, 21)
    said = []
    for fields in ({}, {"ffn_rows": np.arange(TOKENS, dtype=np.int32)}):
        policy = Planned(lambda view, layer, fields=fields: fields, reuse="none")
        with runner.prefill(tokens, policy, logits_from=0, remember=False) as done:
            said.append((done.logits.clone(), done.report.flops))
    assert torch.equal(said[0][0], said[1][0])
    assert said[0][1] == said[1][1]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("first", "chunk"), [(0, None), (0, 40), (120, None), (120, 40)])
def test_rows_without_feed_forward_keep_their_residual(name, mapped, first, chunk) -> None:
    model, tokens = tiny(name), random_tokens(TOKENS, 22)
    classes = classes_of(model) if mapped else classes_of(model, [None])
    runner = runner_of(model, classes, chunk_tokens=chunk)
    rows = [every(np.arange(TOKENS, dtype=np.int32), step) for step in (1, 3, 7, 2)]
    policy = Planned(lambda view, layer: {"ffn_rows": rows[layer]}, reuse="none")
    with runner.prefill(tokens, policy, logits_from=first, remember=False) as done:
        got, flops = done.logits.clone(), done.report.flops
    handles = []
    for layer, some in zip(model.model.layers, rows, strict=True):
        skipped = torch.ones(TOKENS, dtype=torch.bool)
        skipped[torch.from_numpy(some).long()] = False
        # In a sandwich the norm behind the feed-forward is part of it.
        last = getattr(layer, "post_feedforward_layernorm", layer.mlp)
        handles.append(
            last.register_forward_hook(
                lambda _m, _i, out, skipped=skipped: out.masked_fill(skipped[None, :, None], 0.0)
            )
        )
    wanted = masked_reference(model, classes, tokens)[first:]
    for handle in handles:
        handle.remove()
    near(got, wanted)
    count = sum(len(some) for some in rows[:3]) + int((rows[3] >= first).sum())
    assert flops["feed_forward"] == 2 * 3 * 64 * 96 * count


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize(
    ("skipped", "layer", "exact"), [(None, 1, 160), (50, 1, 50), (50, 3, 160), (0, 0, 0)]
)
def test_rows_that_were_spared_are_no_exact_prefix(llama, skipped, layer, exact, chunk) -> None:
    """What stands after a row without feed-forward is not found by prefix."""
    tokens, rows = random_tokens(160, 24), np.arange(160, dtype=np.int32)
    some = rows if skipped is None else np.delete(rows, skipped)
    policy = Planned(lambda view, at: {"ffn_rows": some} if at == layer else {}, reuse="none")
    runner = runner_of(llama, chunk_tokens=chunk)
    with runner.prefill(tokens, policy) as done:
        assert done.exact == (exact == 160)
    again = np.append(tokens, [1, 2, 3])
    with runner.prefill(again, "prefix") as done:
        assert done.report.reused_prefix == exact


# ---- what must not happen -------------------------------------------------------------------


def refused(runner: Runner, policy: Any, says: str) -> None:
    with pytest.raises(kvweave.InvalidArgument, match=says):
        runner.prefill(random_tokens(80, 23), policy)
    runner.cache.check()
    assert runner.cache.stats()["held"] == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"restore": (0,)}, "head of a window group|one that is full"),
        ({"restore": (2,)}, "head"),
        ({"restore": (-1,)}, "head"),
        ({"local_rows": np.asarray([3, 99], np.int32)}, "local_rows: expected some of the plan's"),
        ({"ffn_rows": np.asarray([3, 99], np.int32)}, "ffn_rows|rows that the layer"),
    ],
)
def test_plans_that_cannot_be(llama, fields, says) -> None:
    runner = runner_of(llama, classes_of(llama, [None, (16, 4)]))
    refused(runner, Planned(lambda view, layer: fields, reuse="none"), says)


def test_a_head_is_restored_once(llama) -> None:
    runner = runner_of(llama, classes_of(llama, [None, (16, 4)]))
    policy = Planned(lambda view, layer: {"restore": (1, 1)}, reuse="none")
    refused(runner, policy, "full")


def test_chunks_and_what_they_cannot(llama) -> None:
    runner = runner_of(llama, classes_of(llama), chunk_tokens=32)
    unsaid = Restoring()
    unsaid.measures = False
    refused(runner, unsaid, "no probe of a policy that measures nothing, got salience")
    restoring = Planned(lambda view, layer: {"restore": (1,)}, reuse="none")
    refused(runner, restoring, "restores no head")


def test_salience_is_followed_by_its_own_layer(llama) -> None:
    runner = runner_of(llama, classes_of(llama))

    class Other(Restoring):
        def plan(self, prompt: Any) -> Any:
            plans = super().plan(prompt)
            yield next(plans)
            second = plans.send(None)
            yield LayerPlan(second.layer, second.rows[1:])

    refused(runner, Other(), "same layer and rows after a salience probe")
