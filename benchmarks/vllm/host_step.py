"""Host time of a step of vLLM: `python -m benchmarks.vllm.host_step [--json FILE]`.

A tiny model, so that the host is what a step waits for. Engines, each in a process of its own and
all there at once: `stock` loads no plugin, `off` has loaded ours and asks nothing of it, `ours` has
its attention backend, `top_k` heads that choose pages, `heads` a head map, `segments` a store of
them and no marked prompt, `mapped` both, `pages` virtual pages under the map. vLLM keeps two tables
of blocks under a map: `windows`, which loads no plugin, is vLLM's own model with windows in every
other layer, for which it keeps two as well. Loads are steps in which `--batches` requests decode,
and requests of many lengths that come and leave. In each of `--rounds` each engine is asked for
each load, one engine at a time, in an order that turns; a figure is the median of rounds, and its
ratio to another engine's the median of the rounds' own ratios, with the middle half of them: to
stock's, and under a map to that of `windows`. Two processes that run the same differ by some
per cent, by where their memory lies: with `--starts` each engine is several, and has their mean.

A step's host time is what `LLMEngine.step` takes of a processor but for the model's `forward`,
which stands beside it; on a CPU that gives zeros. FILE is a run for
`python -m benchmarks.report.record FILE`.

On CPUs `tests/vllm_plugin/engine` on PYTHONPATH has the ops that vLLM's build for GPUs lacks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.device.models import MODELS
from benchmarks.vllm import device
from benchmarks.vllm.found import Found
from benchmarks.vllm.host_step_engine import PHASES
from benchmarks.vllm.model import (
    MAPPED,
    OFF,
    PAGES,
    SEGMENTS,
    STOCK,
    WINDOWS,
    with_windows,
    written,
)
from kvweave.lab.bench.rows import Row

CASE = "vllm_host_step"
ENGINES = (STOCK, OFF, "ours", "top_k", WINDOWS, "heads", SEGMENTS, MAPPED, PAGES)
TWO_TABLES = ("heads", MAPPED)
"""Engines for which vLLM keeps two tables of blocks a request, as for `windows`."""
READ_PAGES = 3
"""Pages that a head of the engine `top_k` reads in a decode step."""
Load = dict[str, int]


class Asked:
    """An engine in a process of its own."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self.process = name, process

    def line(self, what: str) -> Found:
        """Its next line of this kind; all else it prints goes to stderr.

        Raises RuntimeError where it ends before.
        """
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith('{"engine"'):
                found: Found = json.loads(text)
                if found["what"] == what:
                    return found
            else:
                print(text, end="", file=sys.stderr, flush=True)
        raise RuntimeError(f"engine {self.name}: expected a line {what}, got its end")

    def ask(self, load: Load) -> Found:
        """What its steps took of a load."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(load) + "\n")
        self.process.stdin.flush()
        return self.line("load")


@contextmanager
def engine(name: str, words: Sequence[str]) -> Iterator[Asked]:
    """Starts one; it ends when its stdin does."""
    command = [sys.executable, "-m", "benchmarks.vllm.host_step_engine", name, *words]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            yield Asked(name, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def files_of(folder: Path, name: str, model: str, layers: int) -> tuple[Path, Path]:
    """An engine's own folder with the model's configuration, and a head class map of it."""
    own = folder / name
    own.mkdir(exist_ok=True)
    made = written(own, model, layers, READ_PAGES if name == "top_k" else 0)
    if name == WINDOWS:
        with_windows(own)
    return made


def title(load: Load) -> str:
    """What a load is called."""
    if "mixed" in load:
        return f"host time of a step, {load['mixed']} requests of many lengths"
    return f"host time of a step, {load['batch']} decode"


def rounds(engines: Sequence[Asked], loads: Sequence[Load], count: int) -> list[list[list[Found]]]:
    """What each engine found of each load in each round, [round][load][engine].

    An engine's first of each load is not kept: in it memory is taken and code is warmed.
    """
    for load in loads:
        for asked in engines:
            asked.ask(load)
    made = []
    for number in range(count):
        turned = [(number + at) % len(engines) for at in range(len(engines))]
        of_loads = []
        for load in loads:
            found = {at: engines[at].ask(load) for at in turned}
            of_loads.append([found[at] for at in range(len(engines))])
        made.append(of_loads)
    return made


def rows_of(
    names: Sequence[str], loads: Sequence[Load], found: list[list[list[Found]]]
) -> list[Row]:
    """A row for each load and engine, in microseconds, with its ratios to its peers'."""
    rows = []
    for at, load in enumerate(loads):
        host = {name: taken(names, name, found, at, "host") for name in dict.fromkeys(names)}
        for name, times in host.items():
            beside: dict[str, Any] = {}
            for peer in (STOCK, WINDOWS) if name in TWO_TABLES else (STOCK,):
                if peer in host and name != peer:
                    ratios = times / host[peer]
                    quarters = np.percentile(ratios, [25, 75])
                    beside[f"÷ {peer}"] = round(float(np.median(ratios)), 4)
                    edges = [round(float(edge), 4) for edge in quarters]
                    beside[f"÷ {peer}, middle half"] = edges
            for phase in PHASES:
                spent = np.median(taken(names, name, found, at, phase))
                beside[f"{phase} µs"] = round(float(spent), 1)
            beside["steps"] = found[0][at][names.index(name)]["steps"]
            value = round(float(np.median(times)), 1)
            p95 = round(float(np.percentile(times, 95)), 1)
            rows.append(Row(f"{title(load)}: {name}", value, "µs", p95, beside))
    return rows


def taken(
    names: Sequence[str], name: str, found: list[list[list[Found]]], load: int, what: str
) -> npt.NDArray[np.float64]:
    """What an engine took of a load in each round: the mean of the processes of that name."""
    columns = [number for number, other in enumerate(names) if other == name]
    return np.array([np.mean([one[load][at][what] for at in columns]) for one in found])


def parser_of_words() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(prog="benchmarks.vllm.host_step", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--model", choices=list(MODELS), default="tiny Llama")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=32, help="that all of a batch decode")
    parser.add_argument("--mixed", type=int, default=32, help="requests of the mixed load")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--starts", type=int, default=1, help="processes of each engine")
    parser.add_argument("--json", type=Path, help="where the run goes")
    return parser


def main(words: list[str] | None = None) -> int:
    """Starts the engines, asks them, and returns the exit status."""
    chosen = parser_of_words().parse_args(words)
    loads = [{"batch": batch, "steps": chosen.steps} for batch in chosen.batches]
    loads += [{"mixed": chosen.mixed}] if chosen.mixed else []
    most = max([*chosen.batches, 16])
    with TemporaryDirectory() as made, ExitStack() as opened:
        engines = []
        names = chosen.engines * chosen.starts
        for name in names:
            files = files_of(Path(made), name, chosen.model, chosen.layers)
            given = [chosen.model, str(chosen.layers), *map(str, files), str(most)]
            engines.append(opened.enter_context(engine(name, given)))
        # All start at once: none measures what memory is left.
        for asked in engines:
            asked.line("ready")
        rows = rows_of(names, loads, rounds(engines, loads, chosen.rounds))
    for row in rows:
        beside = ", ".join(f"{name} {value}" for name, value in row.of.items())
        print(f"{row.name}: {row.value:.4g} {row.unit} (p95 {row.p95}); {beside}", flush=True)
    if chosen.json:
        case = f"{CASE}_gpu" if device.has_gpu() else CASE
        chosen.json.write_text(json.dumps(device.run_of(case, rows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
