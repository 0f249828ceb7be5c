"""A load tells of every token of every request, whoever answers it."""

from collections.abc import Iterator

import numpy as np

from benchmarks import load
from benchmarks.vllm.engine import Task
from benchmarks.vllm.serve import rows_of


class Sayers:
    """An engine that computes `chunk` tokens of one prompt a step, while all others say one."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.made, self.most = chunk, 0, 0
        self.left: dict[str, list[int]] = {}

    def add(self, tokens: int, answer: int) -> str:
        self.left[str(self.made)] = [tokens, answer]
        self.made += 1
        return str(self.made - 1)

    def busy(self) -> bool:
        return bool(self.left)

    def step(self) -> Iterator[tuple[str, int]]:
        self.most = max(self.most, len(self.left))
        reading = next((one for one in self.left.values() if one[0] > 0), None)
        if reading is not None:
            reading[0] -= self.chunk
        for name, one in list(self.left.items()):
            if one[0] > 0:
                continue
            one[1] -= 1
            yield name, 1
            if one[1] == 0:
                del self.left[name]


def test_a_load_hears_everything_of_everybody() -> None:
    sayers = Sayers(chunk=16)
    task = Task("stock", "load", requests=5, span=(20, 60), answer=7, rate=500.0)
    callers = load.Callers(sayers.add, sayers.step, sayers.busy)
    rows = list(load.load(callers, task))
    assert len(rows) == 6
    assert sayers.most == 5
    at_once = rows[0].of
    read = int(np.random.default_rng(0).integers(20, 60, 5).sum())
    assert np.isclose(rows[0].value * at_once["seconds"], read + 5 * 7)
    assert np.isclose(at_once["out/s"] * at_once["seconds"], 5 * 7)
    assert "Poisson at 500/s" in rows[3].name


def test_beside_a_long_prompt_every_step_says_a_token_of_each() -> None:
    sayers = Sayers(chunk=16)
    task = Task("stock", "beside", span=(20, 60), chunk=16, talkers=3, long=160)
    callers = load.Callers(sayers.add, sayers.step, sayers.busy)
    quiet, loud, first = load.beside(callers, task)
    assert quiet.value > 0
    assert loud.value > 0
    assert first.value > 0
    assert sayers.made == 4
    assert "160 in chunks of 16" in first.name


def test_rows_of_another_engine_are_told_beside_those_of_stock() -> None:
    line = {"job": "load", "mode": "graphs", "what": "row", "title": "t", "unit": "s", "of": {}}
    found = [
        {**line, "engine": "stock", "value": 2.0, "p95": 3.0},
        {**line, "engine": "ours", "value": 1.0, "p95": None, "of": {"p99": 4.0}},
    ]
    stock, ours = rows_of(found)
    assert (stock.name, stock.unit, stock.p95) == ("t: stock", "s", 3.0)
    assert ours.of == {"÷ stock": 0.5, "p99": 4.0}
    assert ours.p95 is None
