"""What does not go with packed pages yet: one table, and the error that names both."""

from __future__ import annotations

from kvweave.arguments import shown
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.beside import refuse

NOT_BESIDE_PACKED = {
    "heads": "a head map gives its classes blocks of their own, and none is packed",
    "profile": "what a profile states was measured over exact pages",
    "canary": "full answers are computed over packed pages as well, so it has no yardstick",
    "documents": "what a store or the host's memory keeps of documents are exact pages",
    "payloads": "what is handed over has exact pages of all tokens",
    "healing": "tokens that are packed are not written again",
    "conversation": "a turn forks its request, and packed pages have no fork",
    "fork": "packed pages have no fork",
    "pin": "it would hold exact pages alone",
}
"""By the argument or call that asks for it: why packed pages do not serve it."""


def check_kv_dtype(kv_dtype: object, **asked: object) -> None:
    """Raises for a `kv_dtype` that is none, and for what a runner is asked for beside it.

    # Errors
    `InvalidArgument` for another than None and "int4"; `Unsupported` as `refuse_beside_packed`.
    """
    if kv_dtype is not None and not (isinstance(kv_dtype, str) and kv_dtype == "int4"):
        raise InvalidArgument(f"kv_dtype: expected None or 'int4', got {shown(kv_dtype)}")
    for what, got in asked.items():
        refuse_beside_packed(kv_dtype, what, got)


def refuse_beside_packed(packed: object, what: str, got: object = "one") -> None:
    """Raises for something that is asked for of a runner whose pages are packed.

    Nothing is said where `packed` or `got` is None, as nothing is packed or asked for.

    # Errors
    `Unsupported` naming both.
    """
    if packed is not None:
        refuse(NOT_BESIDE_PACKED, "kv_dtype", "kv_dtype='int4'", what, got)
