"""The example of docs/langchain.md, as it stands there.

langchain-core brings a plugin of pytest along that would load into all tests, so it is no
dependency of theirs: where it is not installed, a stand-in has the few names that the page uses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "langchain.md"


class Document:
    def __init__(self, page_content: str) -> None:
        self.page_content = page_content


class RunnableLambda:
    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.invoke = call

    def __or__(self, other: RunnableLambda) -> RunnableLambda:
        return RunnableLambda(lambda given: other.invoke(self.invoke(given)))


@pytest.fixture
def _langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("langchain_core") is not None:
        return
    for name, one in (("documents", Document), ("runnables", RunnableLambda)):
        module = ModuleType(f"langchain_core.{name}")
        setattr(module, one.__name__, one)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "langchain_core", ModuleType("langchain_core"))


@pytest.mark.usefixtures("_langchain")
def test_the_example_of_the_page_reuses_documents(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    known: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), known)
    first, second = known["first"].report, known["second"].report
    assert first.reused_segment == 0
    # Both letters stood elsewhere before: all of them but for what is recomputed.
    assert second.reused_segment > 60
    assert f"{second.reused_segment} tokens reused" in capsys.readouterr().out
