"""A plugin of pytest that loads vLLM's plugins before any test: most tests make no engine."""

from __future__ import annotations

from typing import Any


def pytest_configure() -> None:
    """Loads those that `VLLM_PLUGINS` names."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Marks tests on CPUs as vLLM marks those whose devices need no cleaning.

    It collects garbage after every other test, which takes longer than most of them do.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for item in items:
            item.add_marker("skip_global_cleanup")
