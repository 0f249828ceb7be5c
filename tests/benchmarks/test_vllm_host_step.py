"""What the benchmark of a step's host time counts, and the rows that it makes of rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.vllm import host_step, host_step_engine
from benchmarks.vllm.engine import skip_layers
from benchmarks.vllm.host_step import Asked, rounds, rows_of


class Clock:
    """Time that passes where somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def works(self, seconds: float) -> Any:
        def work(*_: Any, **__: Any) -> None:
            self.now += seconds

        return work


class Doubled:
    """An engine of two requests that each say three tokens, one a step, and its parts."""

    def __init__(self, clock: Clock) -> None:
        self.model = SimpleNamespace(forward=clock.works(5.0))
        self.scheduler = SimpleNamespace(
            schedule=clock.works(1.0), update_from_output=clock.works(0.25)
        )
        worker = SimpleNamespace(worker=SimpleNamespace(get_model=lambda: self.model))

        def execute() -> None:
            clock.works(2.0)()
            self.model.forward()

        self.executor = SimpleNamespace(
            execute_model=execute, sample_tokens=clock.works(0.5), driver_worker=worker
        )
        core = SimpleNamespace(scheduler=self.scheduler, model_executor=self.executor)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        self.left, self.clock = 3, clock

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[tuple[str, int]]:
        self.scheduler.schedule()
        self.executor.execute_model()
        self.executor.sample_tokens()
        self.scheduler.update_from_output()
        self.clock.works(0.125)()
        self.left -= 1
        return [("a", 1), ("b", 1)]


def test_a_step_is_all_but_the_models_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(host_step_engine.time, "thread_time", lambda: clock.now)
    double: Any = Doubled(clock)
    timed = host_step_engine.Timed(double)
    requests: Any = SimpleNamespace(engine=double, step=double.step)
    steps = list(timed.steps(requests))
    phases = {"schedule": 1.0, "execute": 2.0, "sample": 0.5, "update": 0.25, "forward": 5.0}
    assert [(step.host, step.said) for step in steps] == [(3.875, 2)] * 3
    assert all(step.phases == phases for step in steps)


class Layers(torch.nn.Linear):
    """A model of hidden size 5 whose layers say ones."""

    config = SimpleNamespace(hidden_size=5)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(positions), 5)


def test_layers_are_skipped_in_steps_of_more_rows() -> None:
    few, many = torch.arange(4), torch.arange(6)
    model = Layers(3, 3)
    skip_layers(model, 4)
    assert torch.equal(model(input_ids=few, positions=few), torch.ones(4, 5))
    assert torch.equal(model(input_ids=many, positions=many), torch.zeros(6, 5))
    skip_layers(model)
    assert torch.equal(model(input_ids=few, positions=few), torch.zeros(4, 5))


def found(host: float) -> dict[str, Any]:
    return {"host": host, "steps": 4, **dict.fromkeys(host_step_engine.PHASES, host / 4)}


class Told:
    """An engine that answers each load with the next of its times."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked, self.times = name, asked, 0

    def ask(self, load: dict[str, int]) -> dict[str, Any]:
        self.asked.append(self.name)
        self.times += 1
        return found(float(self.times))


def test_the_order_of_engines_turns_and_their_first_loads_are_not_kept() -> None:
    asked: list[str] = []
    engines: Any = [Told(name, asked) for name in "abc"]
    made = rounds(engines, [{"batch": 1}], 3)
    assert "".join(asked) == "abc" + "abc" + "bca" + "cab"
    assert [[[one["host"] for one in load] for load in of_round] for of_round in made] == [
        [[float(number)] * 3] for number in (2, 3, 4)
    ]


def test_a_ratio_is_of_rounds_and_has_its_spread() -> None:
    """A round in which the machine was busy with something else changes no ratio."""
    hosts = ((10.0, 11.0), (100.0, 110.0), (10.0, 12.0), (10.0, 11.0))
    made = [[[found(stock), found(ours)]] for stock, ours in hosts]
    stock, ours = rows_of(("stock", "heads"), [{"batch": 2, "steps": 4}], made)
    assert stock.name == "host time of a step, 2 decode: stock"
    assert (stock.value, stock.unit, "÷ stock" in stock.of) == (10.0, "µs", False)
    assert ours.of["÷ stock"] == 1.1
    assert ours.of["÷ stock, middle half"] == [1.1, 1.125]
    assert ours.of["forward µs"] == 2.9
    (mixed,) = rows_of(("heads",), [{"mixed": 8}], [[[found(3.0)]]])
    assert mixed.name == "host time of a step, 8 requests of many lengths: heads"


def test_under_a_map_the_peer_has_as_many_tables() -> None:
    """What vLLM itself spends for two tables of blocks is not ours."""
    made = [[[found(10.0), found(14.0), found(15.4), found(11.0)]]]
    rows = rows_of(("stock", "windows", "heads", "pages"), [{"batch": 2, "steps": 4}], made)
    assert [row.of.get("÷ windows") for row in rows] == [None, None, 1.1, None]
    assert [row.of.get("÷ stock") for row in rows] == [None, 1.4, 1.54, 1.1]


def test_several_processes_of_an_engine_count_by_their_mean() -> None:
    made = [[[found(time) for time in (10.0, 11.0, 14.0, 13.0)]]]
    stock, ours = rows_of(("stock", "off", "stock", "off"), [{"mixed": 8}], made)
    assert (stock.value, ours.value, ours.of["÷ stock"]) == (12.0, 12.0, 1.0)
    assert host_step_engine.lower_quartile([5.0, 1.0, 2.0, 4.0, 3.0]) == 2.0


def test_every_engine_has_files_of_its_own(tmp_path: Path) -> None:
    for name in host_step.ENGINES:
        folder, heads = host_step.files_of(tmp_path, name, "tiny Llama", 0)
        config = json.loads((folder / "config.json").read_text())
        assert ("layer_types" in config) is (name == "windows")
        kinds = {head["class"]["kind"] for head in json.loads(heads.read_text())["heads"]}
        assert kinds == ({"top_k"} if name == "top_k" else {"full", "window"})


def test_an_engine_that_ends_is_said_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    said = f"print('noise'); print({json.dumps(json.dumps({'engine': 'off', 'what': 'start'}))})"
    command = [sys.executable, "-c", said]
    ended = pytest.raises(RuntimeError, match="engine off: expected a line ready, got its end")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ended:
        Asked("off", process).line("ready")
    assert "noise" in capfd.readouterr().err


def test_words_have_defaults_that_are_engines_and_models() -> None:
    chosen = host_step.parser_of_words().parse_args([])
    assert chosen.engines == list(host_step.ENGINES)
    assert chosen.model == "tiny Llama"
