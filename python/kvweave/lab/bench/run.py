"""One case from data to figures: every contender's answer is checked, then all are timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvweave.errors import DeviceUnavailable
from kvweave.lab.bench.ceilings import Bound, Ceilings, bound_of
from kvweave.lab.bench.contenders import OURS, PEERS, Contender
from kvweave.lab.bench.contenders.kvweave import NAME
from kvweave.lab.bench.device_timing import Call, DeviceClock, Effort, replayed
from kvweave.lab.bench.problems import Attention, Problem, differs, problem
from kvweave.lab.bench.rows import WrongAnswer
from kvweave.lab.bench.shapes import GRAPH, Case
from kvweave.lab.bench.timing import Timing


@dataclass(frozen=True)
class Result:
    """A row of the table. `timings` by contender, `notes` on those that have none."""

    case: Case
    graph: bool
    bound: Bound
    ceilings: Ceilings
    timings: dict[str, Timing]
    notes: dict[str, str]

    @property
    def name(self) -> str:
        """The case, and whether it was replayed from a graph."""
        return self.case.name + (GRAPH if self.graph else "")

    @property
    def ours(self) -> Timing | None:
        """Our own figure, unless there is none."""
        return self.timings.get(NAME)

    @property
    def share(self) -> float | None:
        """Time at the ceiling over our time."""
        return None if self.ours is None else self.bound.share(self.ours.median_s, self.ceilings)

    @property
    def ratios(self) -> dict[str, float]:
        """Each peer's median over ours: above 1 ours is faster."""
        if self.ours is None:
            return {}
        peers = {name: timing for name, timing in self.timings.items() if name != NAME}
        return {name: timing.median_s / self.ours.median_s for name, timing in peers.items()}

    @property
    def met(self) -> bool | None:
        """Whether ours reaches its target; None without one, or without the peer it names."""
        target = self.case.target
        if target is None or self.ours is None:
            return None
        against = [r for name, r in self.ratios.items() if name.startswith(target.peer)]
        return min(against) >= target.ratio if against else None


@dataclass(frozen=True)
class Field:
    """Who takes part in this run, and why the others do not."""

    peers: tuple[str, ...]
    left_out: dict[str, str]


@dataclass(frozen=True)
class Stopwatch:
    """What all cases are measured with."""

    device: torch.device
    clock: DeviceClock
    ceilings: Ceilings
    effort: Effort


def measure(case: Case, field: Field, watch: Stopwatch) -> Iterator[Result]:
    """The case as a call and, where it asks for that, as a graph replay."""
    bound, ceilings = bound_of(case.work), watch.ceilings
    notes: dict[str, str] = {}
    data = problem(case.work, watch.device)
    calls = checked(data, entrants(data, field), notes)
    timings = watch.clock.time(calls, watch.effort)
    yield Result(case, False, bound, ceilings, timings, dict(notes))
    if not case.graph:
        return
    graphs: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            graphs[name] = replayed(call)
        except Exception as error:
            # A peer that cannot be captured is a finding, not the end of the run.
            notes[name] = f"not captured: {_sentence(error)}"
    yield Result(case, True, bound, ceilings, watch.clock.time(graphs, watch.effort), notes)


def entrants(data: Problem, field: Field) -> list[Contender]:
    """Peers first: where ours differs from them, it is ours that gets no figure.

    None of them reads fp8 pages for bf16 queries here: they get the same numbers in bf16.
    """
    theirs, suffix = data, ""
    if isinstance(data, Attention) and data.over_fp8:
        theirs, suffix = data.widened, " over bf16"
    peers = [
        replace(contender, name=contender.name + suffix)
        for name in field.peers
        for contender in PEERS[name].contenders(theirs)
    ]
    return [*peers, *OURS.contenders(data)]


def checked(
    data: Problem, contenders: Sequence[Contender], notes: dict[str, str]
) -> dict[str, Call]:
    """Calls whose answers are right; why others are not goes to the notes.

    Where a problem can only check a sample, whole answers must also agree with the first one.
    """
    calls: dict[str, Call] = {}
    first: torch.Tensor | None = None
    for contender in contenders:
        try:
            call = contender.prepare()
            data.poison()
            answer = call()
            if contender.same:
                data.check(answer)
                if isinstance(data, Attention):
                    first = answer.clone() if first is None else first
                    differs("all rows", answer, first)
            calls[contender.name] = call
        except WrongAnswer as error:
            notes[contender.name] = f"wrong answer: {error}"
        except Exception as error:
            # Whatever a contender raises (no such kernel, no memory) costs its figure alone.
            notes[contender.name] = _sentence(error)
            _require_device(contender.name, error)
    return calls


def _require_device(name: str, cause: Exception) -> None:
    """After an illegal access nothing runs any more, and some peers end the process on that."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"{name} stopped the device: {_sentence(cause)}", expected="a CUDA device", got=name
        ) from error


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
