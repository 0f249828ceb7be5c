"""A plugin of pytest that loads vLLM's plugins before any test: most tests make no engine."""

from __future__ import annotations


def pytest_configure() -> None:
    """Loads those that `VLLM_PLUGINS` names."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
