"""What does not go with pages in host memory yet: one table, and the error that names both."""

from __future__ import annotations

from kvweave.arguments import shown, whole
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.beside import refuse

NOT_BESIDE_HOST = {
    "kv_dtype": "a packed block has the pages of all heads, of those too that read everything",
}
"""By the argument or call that asks for it: why pages in host memory do not serve it."""


def check_host(
    host_bytes: object,
    host_copies: object,
    host_dtype: object,
    host_arrivals: object,
    host_ahead_bytes: object,
    kv_dtype: object,
) -> None:
    """Raises for what a runner is asked for of host memory, and beside it.

    # Errors
    `InvalidArgument` for copies or arrivals of no kind, bytes ahead that are no number of them, or
    any of these without memory;
    `Unsupported` as `refuse_beside_host`.
    """
    if host_copies not in ("spill", "mirror"):
        got = shown(host_copies)
        raise InvalidArgument(f"host_copies: expected spill or mirror, got {got}")
    if host_copies == "mirror" and host_bytes is None:
        raise InvalidArgument("host_copies: expected host_bytes beside mirror, got none")
    if host_dtype not in (None, "fp8"):
        got = shown(host_dtype)
        raise InvalidArgument(f"host_dtype: expected fp8 or None, got {got}")
    if host_dtype is not None and host_bytes is None:
        raise InvalidArgument("host_dtype: expected host_bytes beside fp8, got none")
    if host_arrivals not in (None, "exact", "late"):
        got = shown(host_arrivals)
        raise InvalidArgument(f"host_arrivals: expected exact or late, got {got}")
    if host_ahead_bytes is not None:
        whole("host_ahead_bytes", host_ahead_bytes, 0)
        if host_bytes is None:
            got = shown(host_ahead_bytes)
            raise InvalidArgument(f"host_ahead_bytes: expected host_bytes beside {got}, got none")
    refuse_beside_host(host_bytes, "kv_dtype", kv_dtype)


def arrivals_of(host_arrivals: str | None, speculate: int | None) -> str:
    """How pages arrive: as asked, else late, but exactly beside drafts: verifications wait."""
    return host_arrivals or ("late" if speculate is None else "exact")


def refuse_beside_host(host: object, what: str, got: object = "one") -> None:
    """Raises for something that is asked for of a runner whose pages may lie in host memory.

    Nothing is said where `host` is None or empty, or `got` is None.

    # Errors
    `Unsupported` naming both.
    """
    if host:
        refuse(NOT_BESIDE_HOST, "host_bytes", "them", what, got)
