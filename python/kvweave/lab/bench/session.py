"""One run of `kvweave bench ops`: which cases and peers, on which device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvweave._native import cuda_status
from kvweave.errors import DeviceUnavailable, InvalidArgument
from kvweave.lab.bench import ceilings
from kvweave.lab.bench.ceilings import Ceilings
from kvweave.lab.bench.contenders import PEERS
from kvweave.lab.bench.device_timing import FULL, QUICK, DeviceClock
from kvweave.lab.bench.run import Field, Result, Stopwatch, measure
from kvweave.lab.bench.shapes import CASES, OPS, Case


@dataclass(frozen=True)
class Session:
    """A device with a clock, the cases to measure there, and who takes part."""

    device: torch.device
    clock: DeviceClock
    cases: tuple[Case, ...]
    field: Field

    def ceilings(self, quick: bool) -> Ceilings:
        """What the device does at its best, measured now."""
        return ceilings.measure(self.clock, self.device, QUICK if quick else FULL)

    def results(
        self, found: Ceilings, quick: bool, progress: Callable[[str], None]
    ) -> Iterator[Result]:
        """All cases in turn; `progress` hears the name of each."""
        watch = Stopwatch(self.device, self.clock, found, QUICK if quick else FULL)
        with torch.inference_mode():
            for case in self.cases:
                progress(case.name)
                yield from measure(case, self.field, watch)
                # Each case may want most of the memory.
                torch.cuda.empty_cache()


def start(ops: Sequence[str], peers: Sequence[str]) -> Session:
    """Cases of the named ops (none: of all) and the named peers, on torch's current device.

    Raises `InvalidArgument` for a name that is none, `DeviceUnavailable` without CUDA.
    """
    cases = cases_of(ops)
    known("peers", peers, tuple(PEERS))
    status = cuda_status()
    if not torch.cuda.is_available() or not status.startswith("available"):
        got = status if torch.cuda.is_available() else "none that torch sees"
        raise DeviceUnavailable(
            f"bench ops: expected a CUDA device, got {got}", expected="a CUDA device", got=got
        )
    device = torch.device("cuda", torch.cuda.current_device())
    return Session(device, DeviceClock(device), cases, field_of(peers, device))


def cases_of(ops: Sequence[str]) -> tuple[Case, ...]:
    """Cases of some ops, in the order of the table."""
    known("case", ops, OPS)
    return tuple(case for case in CASES if case.op in ops or not ops)


def field_of(names: Sequence[str], device: torch.device) -> Field:
    """Those of the named peers that are installed and work here."""
    reasons = {name: PEERS[name].missing(device) for name in names}
    there = tuple(name for name, reason in reasons.items() if not reason)
    return Field(there, {name: reason for name, reason in reasons.items() if reason})


def known(what: str, names: Sequence[str], choices: Sequence[str]) -> None:
    """Refuses a name that is not among the choices."""
    for name in names:
        if name not in choices:
            expected = f"one of {', '.join(choices)}"
            raise InvalidArgument(
                f"{what}: expected {expected}, got {name!r}", expected=expected, got=repr(name)
            )
