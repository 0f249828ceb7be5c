"""Transfers between a device and the host's memory that are tried again before they are given up.

What is copied is there as it was until a transfer has been made, so that one which broke off may
simply be made again, from its beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvweave.errors import TransferFailed
from kvweave.ops import Table
from kvweave.runner.kv.tables import Int32, send

_log = logging.getLogger(__name__)

TRIES = 3
"""How often a transfer is tried in all."""

MAY_PASS = (RuntimeError, OSError, MemoryError)
"""What a transfer may raise once and not another time. A call that is wrong stays wrong."""


class Transfers:
    """Counts of transfers: `retried`, times that one was tried again, and `failed`, given up.

    The first of each kind that is given up is said in the log. `copied`: blocks that have gone to
    the host.
    """

    def __init__(self) -> None:
        self.retried = self.failed = self.copied = 0
        self._said: set[str] = set()

    def make(self, what: str, transfer: Callable[[], None]) -> None:
        """Makes a transfer, called `what`, in one of so many tries.

        # Errors
        `TransferFailed` when the last one fails too. What comes of a wrong call comes at once.
        """
        for left in reversed(range(TRIES)):
            try:
                transfer()
            except MAY_PASS as error:
                if left:
                    self.retried += 1
                    continue
                self.failed += 1
                expected = "pages to be carried between the device and the host's memory"
                got = f"{type(error).__name__} at each of {TRIES} tries: {error}"
                text = f"{what}: expected {expected}, got {got}"
                self._say(what, text)
                raise TransferFailed(text, expected=expected, got=got) from error
            return

    def make_each(
        self,
        what: str,
        carry: Callable[[Table, Table], None],
        moves: Int32,
        owners: Int32,
        device: torch.device,
    ) -> dict[int, TransferFailed]:
        """Makes transfers that failed together again, those of each owner by themselves.

        moves i32 [M, 3] lie on the host, and their `owners` i32 [M] too; `carry` is given some of
        them and their count, on a device. Says by its number whose could not be made.
        """
        self.retried += 1
        failed = dict[int, TransferFailed]()
        for owner in np.unique(owners).tolist():
            own = np.ascontiguousarray(moves[owners == owner])
            some, count = send(device, own, np.asarray([len(own)], np.int32))
            try:
                self.make(what, partial(carry, some, count))
            except TransferFailed as error:
                failed[owner] = error
        return failed

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s; this is not said again", text)
