"""Work on the node of the host's memory that a GPU is attached to.

Linux takes a page of memory from the node of the CPU that touches it first. On a host of several
nodes, memory that a GPU is to read is therefore touched by a thread that runs beside that GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


def cpus_near(device: torch.device, system: Path = Path("/sys")) -> frozenset[int]:
    """The CPUs of the node that a GPU is attached to, as Linux says below `system`.

    None where the host has one node, for what is no GPU, and where the system says nothing.
    """
    if device.type != "cuda" or len(list(system.glob("devices/system/node/node[0-9]*"))) < 2:
        return frozenset()
    try:
        node = int((system / "bus/pci/devices" / _address(device) / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
        return parse_cpus(listed)
    except (OSError, ValueError, AttributeError):
        return frozenset()


def _address(device: torch.device) -> str:
    """Where a GPU is on the host's bus, as Linux writes it."""
    of: Any = torch.cuda.get_device_properties(device)
    return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"


def parse_cpus(listed: str) -> frozenset[int]:
    """The CPUs of a list as Linux writes it, such as 0-3,8.

    # Errors
    `ValueError` for what is no such list.
    """
    cpus = set[int]()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def do_on(cpus: frozenset[int], work: Callable[[], _Result]) -> _Result:
    """Does something in a thread that runs on some CPUs alone; here, where there are none.

    So it does where this process may not run on any of them.
    """
    if not cpus:
        return work()

    def bound() -> _Result:
        # Of this thread alone, which ends with the work.
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
        return work()

    with ThreadPoolExecutor(1) as one:
        return one.submit(bound).result()
