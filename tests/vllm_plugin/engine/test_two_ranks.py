"""Parts of the plugin on two ranks, which vLLM starts by itself, or by Ray on two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import vllm

import vllm_ray
import vllm_two_ranks
from kvweave.adapters.vllm import versions
from vllm_engines import long_with

LIMIT_S = 1200
RAY = long_with("ray", "Ray")
EXECUTORS = pytest.mark.parametrize("executor", ["mp", pytest.param("ray", marks=RAY)])


def two_ranks(part: str, executor: str = "mp") -> list[dict[str, Any]]:
    """What the program says of a part of the plugin, whose ranks an executor of vLLM starts."""
    script = Path(vllm_two_ranks.__file__)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as made:
        paths = [str(script.parent), *sys.path]
        if executor == "ray":
            paths.append(str(vllm_ray.installed(Path(made))))
            # vLLM looks for platforms of packages where it is told of none.
            del env["VLLM_TARGET_DEVICE"]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        done = subprocess.run(
            [sys.executable, str(script), part, executor],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("executor", [pytest.param("ray", marks=RAY)])
def test_ranks_on_two_nodes_attend_as_those_of_one(executor: str) -> None:
    """Wherever ranks are, they compute the same."""
    (near,), (far, where) = two_ranks("attended"), two_ranks("attended", executor)
    assert len(set(where["nodes"])) == 2
    assert far["said"] == near["said"]
    for a, b in zip(far["logprobs"], near["logprobs"], strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.long
def test_two_stages_attend_as_one_rank() -> None:
    """Each stage has the keys and values of its own layers."""
    one, two = two_ranks("stages")
    assert two["said"] == one["said"]
    for a, b in zip(two["logprobs"], one["logprobs"], strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@EXECUTORS
@pytest.mark.long
def test_packed_segments_on_two_ranks_are_those_of_one(executor: str) -> None:
    """Each packs the heads that it has, and brings its part of a document with its basis."""
    one, two, again = two_ranks("packed", executor)
    assert two["said"] == one["said"]
    # Sums of two ranks are others, by which one of two numbers as large is kept.
    assert two["first"] == pytest.approx(one["first"], abs=2e-2)
    assert two["hits"] == one["hits"] > 0
    assert two["brought"] == [0, 0]
    assert again["brought"] == [1, 0]
    assert again["said"][-1] == two["said"][-1]
    assert again["first"][-1] == pytest.approx(two["first"][-1], abs=1e-5)
    # What was packed anew lies in another basis.
    assert again["first"][1] != two["first"][1]


IN_PAGES = pytest.mark.skipif(
    not versions.is_known(vllm.__version__, versions.WITH_VIRTUAL_PAGES),
    reason="virtual pages are not for this version of vLLM",
)


@IN_PAGES
@pytest.mark.long
def test_pages_of_two_ranks_leave_for_the_host() -> None:
    """What a rank's heads choose it has at home, and so has the other one."""
    two, defined = two_ranks("far")
    assert two["left"] > 0
    assert two["preempted"] == 0
    assert two["first"] == pytest.approx(defined["first"], abs=2e-3)
    # Sums of two ranks are others, by which one of equal pages may be chosen.
    assert sum(a == b for a, b in zip(two["said"], defined["said"], strict=True)) >= 5


def test_heads_of_two_ranks_choose_as_defined() -> None:
    """Each rank ranks the blocks of the heads that it has, which changes what is said."""
    two, defined, dense = two_ranks("top_k")
    assert two["said"] == defined["said"] != dense["said"]
    for got, wanted in zip(two["logprobs"], defined["logprobs"], strict=True):
        assert got == pytest.approx(wanted, abs=2e-3)


@IN_PAGES
@pytest.mark.long
def test_virtual_pages_on_two_ranks_are_one_ranks() -> None:
    """Tables are the same on both, whatever heads of a map they have."""
    one, again, two, found = two_ranks("pages")
    for said in (again, two, found):
        assert said["said"] == one["said"]
        assert said["first"] == pytest.approx(one["first"], abs=2e-3)


def test_a_prompt_for_which_one_rank_has_no_room_is_computed_on_both() -> None:
    """Ranks that planned one prompt in two ways would wait for each other for ever."""
    computed, *found = two_ranks("short")
    for missed, reused in (found[:2], found[2:]):
        assert missed["said"] == computed["said"]
        assert missed["first"] == pytest.approx(computed["first"], abs=1e-5)
        # Of the next one, for which there is room, both take what they have.
        assert abs(reused["first"] - computed["first"]) > 1e-3


@EXECUTORS
def test_two_ranks_are_the_runner(executor: str) -> None:
    """What is measured is summed over the ranks' heads, so that both choose the same rows."""
    lines = two_ranks("mapped", executor)
    answers, (store, unknown, malformed, *kept) = lines[:4], lines[4:]
    for said in answers:
        assert said["got"] == said["wanted"]
        assert said["apart"] < 2e-3
    assert store["names"] == ["handbook"]
    assert store["store"]["request_hits"] == 2 * 100
    assert unknown["error"][0] == "UnknownSegment"
    assert malformed["error"][0] == "InvalidArgument"
    assert "kvweave.segments" in malformed["error"][1]
    # What came from the folder is what was computed; then one rank cannot read its part.
    assert [said["brought"] - kept[0]["brought"] for said in kept] == [0, 1, 1]
    assert kept[1]["said"] == kept[0]["said"]
    assert abs(kept[1]["first"] - kept[0]["first"]) < 1e-5
    assert len(kept[2]["said"]) == 6
