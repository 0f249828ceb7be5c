"""What does not go with pages in host memory yet: one table, and the error that names both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvweave.arguments import real, shown, whole
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.beside import refuse

NOT_BESIDE_HOST = {
    "kv_dtype": "a packed block has the pages of all heads, of those too that read everything",
}
"""By the argument or call that asks for it: why pages in host memory do not serve it."""


FREE_SHARE = 0.5
"""Of the device's pages: requests are spilled while fewer are free, where nobody says another."""


@dataclass(frozen=True)
class HostMemory:
    """What a runner is asked for of the host's memory, as `Runner` has it: `size` bytes of it.

    `copies`: "mirror" copies pages there as they fill, "spill" those that are spilled. `dtype`:
    "fp8" keeps them in a byte a number, None as they are. `arrivals`: "late" has rankings take
    effect late and in parts, "whole" late and as a whole, for which their requests sit steps out,
    "exact" has their steps wait for what they bring; None is the first but beside drafts, whose
    verifications wait. `ahead`: bytes that are reserved before they are needed, by a
    thread; None for some on a GPU, none elsewhere. `free_share`: of the device's pages, those that
    should be free: requests are spilled while fewer are.
    """

    size: int | None = None
    copies: str = "spill"
    dtype: str | None = None
    arrivals: str | None = None
    ahead: int | None = None
    free_share: float | None = None

    def check(self, kv_dtype: object) -> None:
        """Raises for what is asked for, and beside it.

        # Errors
        `InvalidArgument` for copies or arrivals of no kind, bytes ahead that are no number of them,
        a share that is none, or any of these without memory; `Unsupported` as `refuse_beside_host`.
        """
        if self.copies not in ("spill", "mirror"):
            got = shown(self.copies)
            raise InvalidArgument(f"host_copies: expected spill or mirror, got {got}")
        if self.dtype not in (None, "fp8"):
            raise InvalidArgument(f"host_dtype: expected fp8 or None, got {shown(self.dtype)}")
        if self.arrivals not in (None, "exact", "whole", "late"):
            got = shown(self.arrivals)
            raise InvalidArgument(f"host_arrivals: expected exact, whole or late, got {got}")
        if self.ahead is not None:
            whole("host_ahead_bytes", self.ahead, 0)
        if self.free_share is not None:
            real("host_free_share", self.free_share, 0.0, 1.0)
        if self.size is None:
            self._check_without_memory()
        refuse_beside_host(self.size, "kv_dtype", kv_dtype)

    def _check_without_memory(self) -> None:
        copies = None if self.copies == "spill" else self.copies
        known: dict[str, object] = {"copies": copies, "dtype": self.dtype}
        known |= {"ahead_bytes": self.ahead, "free_share": self.free_share}
        for name, given in known.items():
            if given is not None:
                got = given if isinstance(given, str) else shown(given)
                raise InvalidArgument(f"host_{name}: expected host_bytes beside {got}, got none")

    def beside_drafts(self, speculate: int | None) -> HostMemory:
        """The same with pages that arrive as asked, else late, but exactly beside drafts."""
        return replace(self, arrivals=self.arrivals or ("late" if speculate is None else "exact"))


def refuse_beside_host(host: object, what: str, got: object = "one") -> None:
    """Raises for something that is asked for of a runner whose pages may lie in host memory.

    Nothing is said where `host` is None or empty, or `got` is None.

    # Errors
    `Unsupported` naming both.
    """
    if host:
        refuse(NOT_BESIDE_HOST, "host_bytes", "them", what, got)
