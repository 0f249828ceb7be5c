"""Transfers to and from the host's memory that fail in a real engine, and hostile numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError

from families import tiny
from kvweave import Unsupported
from kvweave.adapters.vllm.virtual_pages import far_memory
from kvweave.runner.kv.transfers import TRIES
from ranked_pages import FULL, PlainDecoding, top_k
from test_head_split import checkpoint_of
from test_top_k import CHANGES, PAGE, defined, written
from test_virtual_pages import scheduler_of
from test_virtual_pages_top_k import (
    KINDS_OF_HOST,
    LONG,
    manager_of,
    nothing_is_left,
    tight,
    with_host,
)
from vllm_engines import Answer, answer, answers, engine, metric, prompt, same, sampling

SAYS = 40
TARGET = 2
"""The prompt whose transfers fail."""


class Faults:
    """Has transfers of one way break off half-way, as often as `left`, those of some seats."""

    def __init__(self, way: str, left: int, seat: Callable[[], Any] | None = None) -> None:
        self.way, self.left, self.seat = way, left, seat
        self.hit = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        carry = far_memory.carry_pages

        def carried(moves: Any, count: Any, slots: Any, home: Any, way: str, **named: Any) -> None:
            some = torch.as_tensor(moves)[: int(count[0])].cpu().numpy()
            if way != self.way or not self.left or not self._concerned(some, home):
                carry(moves, count, slots, home, way, **named)
                return
            self.left, self.hit = self.left - 1, self.hit + 1
            carry(moves, torch.as_tensor(count) // 2, slots, home, way, **named)
            raise RuntimeError("the bus is gone")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(far_memory, "carry_pages", carried)
            yield

    def _concerned(self, moves: np.ndarray, home: Any) -> bool:
        if self.seat is None:
            return len(moves) > 0
        seated = self.seat()
        if seated is None:
            return False
        if self.way == "fetch":
            return bool((moves[:, 0] // home.ranks == seated.seat).any())
        blocks = torch.as_tensor(home.blocks).cpu().numpy()[0, moves[:, 1]]
        return bool(np.isin(blocks, np.array(seated.homes) * self.rows).any())

    rows = 0
    """Pages of a block at home."""


def seated_of(llm: Any, name: str) -> Any:
    """What the scheduler knows of a request with a seat; vLLM adds to its name."""
    known = manager_of(llm).far._of.items()
    return next((seated for own, seated in known if own.rpartition("-")[0] == name), None)


def finished(llm: Any, prompts: list[Any], count: int = SAYS) -> dict[str, Any]:
    """What is said to each of some prompts, by their places."""
    inner, found = llm.llm_engine, dict[str, Any]()
    for number, given in enumerate(prompts):
        inner.add_request(str(number), given, sampling(count))
    while inner.has_unfinished_requests():
        found |= {output.request_id: output for output in inner.step() if output.finished}
    assert found.keys() == {str(number) for number in range(len(prompts))}
    return found


def zeroed(llm: Any, model: Any) -> None:
    """Has all keys be nothing, in the engine and in a model of transformers."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    for name, weight in worker.model_runner.model.named_parameters():
        if name.endswith("qkv_proj.weight"):
            config = model.config
            heads, groups = config.num_attention_heads, config.num_key_value_heads
            weight.data[heads * config.head_dim :][: groups * config.head_dim] = 0
    for name, weight in model.named_parameters():
        if name.endswith("k_proj.weight"):
            weight.data.zero_()


def plainly(model: Any, given: Any, count: int) -> Answer:
    """As `defined`, of another model."""
    plain, fed = PlainDecoding(model, KINDS_OF_HOST, PAGE), list(given["prompt_token_ids"])
    tokens, logprobs = list[int](), list[float]()
    for _ in range(count):
        with torch.no_grad():
            said = plain.feed(fed).log_softmax(-1)
        fed = [int(said.argmax())]
        tokens += fed
        logprobs.append(float(said[fed[0]]))
    return Answer(tokens, logprobs, 0)


def test_transfers_that_fail_and_numbers_that_are_hostile(checkpoint: Any, tmp_path: Any) -> None:
    """One engine through all of it: whoever is not concerned says what it says without."""
    path, model = written(tmp_path, KINDS_OF_HOST), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", KINDS_OF_HOST, given, SAYS) for given in LONG]
    with engine(model, with_host(path), **tight(path)) as llm:
        Faults.rows = manager_of(llm).residency.layout.bound_rows
        _once_is_tried_again(llm, wanted)
        for way in ("fetch", "spill"):
            _for_good_fails_alone(llm, way, wanted)
        _in_mid_transfer_it_may_be_aborted(llm, wanted)
        _keys_that_are_nan_spoil_their_request(llm, wanted)
        same_model = tiny("llama", **CHANGES, sliding_window=None)
        zeroed(llm, same_model)
        # All scores are equal: of equal ones the earlier page goes first.
        before = manager_of(llm).far.spilled
        got = answers(llm, LONG, SAYS)
        same(got, [plainly(same_model, given, SAYS) for given in LONG])
        assert manager_of(llm).far.spilled > before
        nothing_is_left(llm)


def _once_is_tried_again(llm: Any, wanted: list[Answer]) -> None:
    for way in ("fetch", "spill"):
        faults = Faults(way, TRIES)
        with faults.at_work():
            same(answers(llm, LONG, SAYS), wanted)
        assert faults.hit == TRIES
        nothing_is_left(llm)


def _for_good_fails_alone(llm: Any, way: str, wanted: list[Answer]) -> None:
    faults = Faults(way, 10**9, lambda: seated_of(llm, str(TARGET)))
    with faults.at_work():
        found = finished(llm, LONG)
    assert faults.hit > TRIES
    said = found.pop(str(TARGET)).outputs[0]
    assert said.finish_reason == "error"
    assert len(said.token_ids) < SAYS
    assert list(said.token_ids) == wanted[TARGET].tokens[: len(said.token_ids)]
    others = [of for number, of in enumerate(wanted) if number != TARGET]
    same([answer(found[name]) for name in sorted(found)], others)
    nothing_is_left(llm)


def _in_mid_transfer_it_may_be_aborted(llm: Any, wanted: list[Answer]) -> None:
    """Behind the scheduler's decision that its pages leave, and before any has been copied."""
    copy, aborted = far_memory.FarMemory.copy, list[str]()
    inner, found = llm.llm_engine, dict[str, Any]()

    def copying(memory: Any, changes: Any) -> None:
        seated = seated_of(llm, str(TARGET))
        if seated is not None and seated.homes and not aborted:
            aborted.append(str(TARGET))
            inner.abort_request(aborted)
        copy(memory, changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_memory.FarMemory, "copy", copying)
        for number, given in enumerate(LONG):
            inner.add_request(str(number), given, sampling(SAYS))
        while inner.has_unfinished_requests():
            found |= {output.request_id: output for output in inner.step() if output.finished}
    assert aborted
    found.pop(str(TARGET), None)
    others = [of for number, of in enumerate(wanted) if number != TARGET]
    same([answer(found[name]) for name in sorted(found)], others)
    nothing_is_left(llm)


def _keys_that_are_nan_spoil_their_request(llm: Any, wanted: list[Answer]) -> None:
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.model.model
    # Prompts are drawn without this one, and some answers have it.
    token = 0
    others = [number for number, of in enumerate(wanted) if token not in of.tokens]
    assert len(others) > 2
    spoiled = prompt(350, 50)
    spoiled["prompt_token_ids"][100] = token
    embedded, before = model.embed_tokens.weight.data, manager_of(llm).far.spilled
    own = embedded[token].clone()
    embedded[token] = torch.nan
    found = finished(llm, [spoiled, *(LONG[number] for number in others)])
    embedded[token] = own
    assert np.isnan(answer(found.pop("0")).logprobs).all()
    same([answer(found[name]) for name in sorted(found)], [wanted[number] for number in others])
    assert manager_of(llm).far.spilled > before
    nothing_is_left(llm)


def test_as_many_pages_as_there_are_stay_and_answer_as_all(checkpoint: Any, tmp_path: Any) -> None:
    """Who reads all that it has gives nothing up: it would have to bring all of it back."""
    kinds = [top_k(40), FULL]
    path, model = written(tmp_path, kinds), checkpoint_of(checkpoint, "llama")
    wanted = [defined("llama", [FULL], given, 20) for given in LONG[:3]]
    with engine(model, with_host(path), **tight(path)) as llm:
        same(answers(llm, LONG[:3], 20), wanted)
        assert manager_of(llm).far.spilled == 0
        nothing_is_left(llm)


def test_who_lacks_room_waits_and_the_others_go_on(checkpoint: Any, tmp_path: Any) -> None:
    """A full host: a prompt of the model's length is there at last; a longer one is refused."""
    path, model = written(tmp_path, KINDS_OF_HOST), checkpoint_of(checkpoint, "llama")
    with engine(model, with_host(path), **tight(path)) as llm:
        spec = scheduler_of(llm).kv_cache_config.kv_cache_groups[0].kv_cache_spec
        size = spec.host_bytes // spec.home_blocks
    with engine(model, with_host(path, 20 * size), **tight(path)) as llm:
        inner, waited = llm.llm_engine, 0
        asked = [(LONG[0], 24), (LONG[1], 16), (prompt(500, 7), 12)]
        with pytest.raises(VLLMValidationError, match="maximum context length is 512"):
            answers(llm, [prompt(520, 8)], 4)
        for number, (given, count) in enumerate(asked):
            inner.add_request(str(number), given, sampling(count))
        found: dict[str, Any] = {}
        while inner.has_unfinished_requests():
            said = inner.step()
            scheduler = scheduler_of(llm)
            if scheduler.waiting and said:
                waited += 1
            found |= {output.request_id: output for output in said if output.finished}
        assert waited > 5
        assert manager_of(llm).far.spilled > 0
        assert metric(llm, "num_preemptions") == 0
        got = [answer(found[name]) for name in sorted(found)]
        same(got, [defined("llama", KINDS_OF_HOST, given, count) for given, count in asked])
        nothing_is_left(llm)


def test_what_cannot_be_computed_again_is_not_promised(checkpoint: Any, tmp_path: Any) -> None:
    """A request whose pages are lost is not gone on with from the first that is missing."""
    choice = with_host(written(tmp_path, KINDS_OF_HOST))
    choice["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
    with (
        pytest.raises(Unsupported, match="kv_load_failure_policy: expected fail"),
        engine(checkpoint_of(checkpoint, "llama"), choice),
    ):
        pass
