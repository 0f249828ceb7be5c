"""`examples/all_five.py` as a module, and the rows that its requests recompute."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from kvweave.policies import Foresight

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "all_five.py"


def example() -> Any:
    """The example, imported anew."""
    spec = importlib.util.spec_from_file_location("all_five_example", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def recomputed_rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the rows of each prompt's last pass are kept that `foresight` has chosen."""
    rows: list[Any] = []
    choose = Foresight.choose

    def kept(self: Foresight, *given: Any) -> Any:
        rows.append(choose(self, *given))
        return rows[-1]

    monkeypatch.setattr(Foresight, "choose", kept)
    return rows
