"""What does not go with packed pages yet: one table, and the error that names both."""

from __future__ import annotations

from kvweave.runner.kv.beside import refuse
from kvweave.runner.kv.packing import Packing

NOT_BESIDE_PACKED = {
    "profile": "what a profile states was measured over exact pages",
    "canary": "full answers are computed over packed pages as well, so it has no yardstick",
    "healing": "tokens that are packed are not written again",
    "later documents": "a turn goes on in a fork, and what is found for it lies packed elsewhere",
    "pin": "it would hold exact pages alone",
    "zero_on_free": "documents wait in copies to be packed, which nobody overwrites",
    "bounds_dtype": "packed pages have bounds of their own, in the basis that they are packed in",
}
"""By the argument or call that asks for it: why packed pages do not serve it."""


def check_kv_dtype(kv_dtype: object, **asked: object) -> Packing | None:
    """How full pages are packed; raises for what a runner is asked for beside that.

    # Errors
    `InvalidArgument` as `Packing.of`; `Unsupported` as `refuse_beside_packed`.
    """
    packing = Packing.of(kv_dtype)
    for what, got in asked.items():
        refuse_beside_packed(packing, what, got)
    return packing


def refuse_beside_packed(packed: object, what: str, got: object = "one") -> None:
    """Raises for something that is asked for of a runner whose pages are packed.

    Nothing is said where `packed` or `got` is None, as nothing is packed or asked for.

    # Errors
    `Unsupported` naming both.
    """
    if packed is not None:
        refuse(NOT_BESIDE_PACKED, "kv_dtype", "packed pages", what, got)
