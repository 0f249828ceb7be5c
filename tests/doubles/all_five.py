"""What the requests of `examples/all_five.py` recompute."""

from __future__ import annotations

from typing import Any

import pytest

from kvweave.policies import Foresight


def recomputed_rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the rows of each prompt's last pass are kept that `foresight` has chosen."""
    rows: list[Any] = []
    choose = Foresight.choose

    def kept(self: Foresight, *given: Any) -> Any:
        rows.append(choose(self, *given))
        return rows[-1]

    monkeypatch.setattr(Foresight, "choose", kept)
    return rows
