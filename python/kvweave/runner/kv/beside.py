"""How a runner refuses what does not go with one of its settings yet."""

from __future__ import annotations

from collections.abc import Mapping

from kvweave.errors import Unsupported


def refuse(reasons: Mapping[str, str], setting: str, named: str, what: str, got: object) -> None:
    """Raises for something that is asked for beside a setting; None asks for nothing.

    `named`: the setting within what is said. `reasons`: by the argument or call that asks, why the
    setting does not serve it.

    # Errors
    `Unsupported` naming both.
    """
    if got is None:
        return
    asked = got if isinstance(got, str) else "one"
    raise Unsupported(
        f"{what}: expected a runner without {setting}, got {asked} beside {named}: {reasons[what]}"
    )
