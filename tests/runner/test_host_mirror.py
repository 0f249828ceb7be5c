"""Pages that are copied to the host as they fill: what that copies, when, and what it frees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_batches import decoding
from families import random_tokens, tiny
from host_faults import LateCopies
from host_memory import PAGE, both, host_runner, nothing_is_held, spills
from kvweave.runner import Runner
from kvweave.runner.kv.host_pool import HostPool
from ranked_pages import FULL, logits_of_steps, top_k

STEPS = 40


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


class Copies:
    """Blocks that were copied to the host: beside decoding, and where a spill waits for them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.aside = self.before = 0
        carry, begin = HostPool.carry_blocks, HostPool.copy_aside

        def carried(pool: HostPool, here: Any, home: Any, way: Any, *given: Any) -> None:
            self.before += len(home) * (way == "spill")
            carry(pool, here, home, way, *given)

        def begun(pool: HostPool, here: Any, home: Any) -> Any:
            self.aside += len(home)
            self.before -= len(home)
            return begin(pool, here, home)

        patch.setattr(HostPool, "carry_blocks", carried)
        patch.setattr(HostPool, "copy_aside", begun)


def copied(runner: Runner, length: int, patch: pytest.MonkeyPatch) -> tuple[Copies, int, int]:
    """An answer's copies, the blocks at home at its end, and those that are spilled of these."""
    copies = Copies(patch)
    (pool,) = runner.host.values()
    with runner.prefill(random_tokens(length, 3), "full", remember=False) as done:
        sequence = decoding(runner, done, STEPS + 1)
        with torch.inference_mode():
            for _ in range(STEPS):
                runner._decoder.step([sequence])
        held, count = int(pool.stats()["held"]), done.kv.host[pool.budget.group].count
        runner._decoder.forget()
    assert nothing_is_held(runner)
    assert pool.stats()["copied_bytes"] == (copies.aside + copies.before) * pool.block_bytes
    return copies, held, count


def test_a_page_is_copied_once_and_before_a_spill_asks_for_it(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a page that fills in the very step behind which it is spilled."""
    every, found = 5, {}
    for name in ("spill", "mirror"):
        runner = host_runner(llama, [top_k(4, every)], host_copies=name)
        with monkeypatch.context() as patch:
            found[name] = copied(runner, 90, patch)
    length = 90 + STEPS
    for name, (copies, held, count) in found.items():
        assert copies.aside + copies.before == held
        assert length - PAGE - every <= PAGE * count <= length - 1
        # Every fourth ranking follows a step in which a page has filled.
        assert copies.before == (2 if name == "mirror" else count - 90 // PAGE)
    assert found["mirror"][1] == (length - 1) // PAGE
    assert found["mirror"][2] == found["spill"][2] == found["spill"][1]


def test_requests_that_are_never_spilled_are_mirrored_too(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, wanted in (("spill", 0), ("mirror", (20 + STEPS - 1) // PAGE)):
        runner = host_runner(llama, [top_k(50, 5), FULL], host_copies=name)
        with monkeypatch.context() as patch:
            copies, held, count = copied(runner, 20, patch)
        assert (copies.aside, copies.before, count) == (wanted, 0, 0)
        assert held == wanted


def test_who_grows_beyond_its_slots_leaves_at_the_same_step(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page is copied while a spill waits for it, whether they were mirrored or not."""
    found = {}
    for name in ("spill", "mirror"):
        runner, most = host_runner(llama, [top_k(4, 7)], host_copies=name), 0
        with (
            monkeypatch.context() as patch,
            runner.prefill(random_tokens(20, 3), "full", remember=False) as done,
        ):
            copies, sequence = Copies(patch), decoding(runner, done, STEPS + 1)
            with torch.inference_mode():
                while not done.kv.is_spilled:
                    runner._decoder.step([sequence])
                    most += 1
            found[name] = most, copies.before
            runner._decoder.forget()
        assert nothing_is_held(runner)
    (steps, before), (mirrored_steps, mirrored_before) = found["spill"], found["mirror"]
    assert steps == mirrored_steps
    assert (before, mirrored_before) == (0, 0)


def test_host_memory_that_is_full_mirrors_nothing_and_stops_nobody(llama: Any) -> None:
    size = next(iter(host_runner(llama, [top_k(4, 4)]).host.values())).block_bytes
    tokens = random_tokens(40, 4)
    wanted = logits_of_steps(host_runner(llama, [top_k(4, 4)], None), tokens, STEPS)
    for blocks in (2, 9, 13, 18):
        runner = host_runner(llama, [top_k(4, 4)], blocks * size, host_copies="mirror")
        got = logits_of_steps(runner, tokens, STEPS)
        assert got[0] == wanted[0]
        assert all(torch.equal(a, b) for a, b in zip(got[1], wanted[1], strict=True))
        assert nothing_is_held(runner)
        assert (spills(runner) > 0) == (blocks > 11)


@pytest.mark.parametrize("length", [3, 30, 90])
def test_copies_that_come_over_late_change_nothing(llama: Any, length: int) -> None:
    """A spill waits for the newest of them; the many of the beginning it leaves for later."""
    resident, host = both(llama, [top_k(4, 5), FULL], host_copies="mirror")
    tokens, late = random_tokens(length, 3), LateCopies()
    wanted = logits_of_steps(resident, tokens, STEPS)
    with late.at_work():
        got = logits_of_steps(host, tokens, STEPS)
        # Nobody looked whether they were there, so that all pages are still on the device.
        assert late.made == 0
        late.comes = 3
        again = logits_of_steps(host, tokens, STEPS)
        assert late.made > 3
    for said in (got, again):
        assert said[0] == wanted[0]
        assert all(torch.equal(a, b) for a, b in zip(said[1], wanted[1], strict=True))
    assert nothing_is_held(host)
