"""The dashboard and the compose file for vLLM: what they name exists."""

from __future__ import annotations

import ast
import copy
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import validators

from kvweave.adapters.vllm import versions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PANELS: list[dict[str, Any]] = json.loads((DOCS / "vllm-dashboard.json").read_text())["panels"]
COMPOSE: dict[str, Any] = yaml.safe_load((DOCS / "vllm-compose.yaml").read_text())


NAMED = re.compile(r"\b(?:vllm:kv_offload_)?kvweave_\w+")


def ours() -> set[str]:
    """Metrics that the plugin's source names and its page explains, as /metrics has them."""
    page = (DOCS / "vllm.md").read_text(encoding="utf-8")
    plugin = ROOT / "python/kvweave/adapters/vllm"
    texts = {
        node.value
        for path in (*(plugin / "metrics").glob("*.py"), plugin / "store_tier/metrics.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {
        f"{prefix}{text}{suffix}"
        for text in texts
        for prefix in ("kvweave_", "")
        for suffix in ("", "_total")
    }
    return names & set(NAMED.findall(page))


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_metrics_of_ours_that_exist_are_shown() -> None:
    shown = {name for expr in expressions() for name in NAMED.findall(expr)}
    assert shown == ours()
    assert len(shown) >= 18


@pytest.mark.parametrize("expr", expressions())
def test_an_expression_closes_what_it_opens(expr: str) -> None:
    for opening, closing in ("()", "{}", "[]"):
        assert expr.count(opening) == expr.count(closing)
    assert '{model_name=~"$model"' in expr


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def compose_schema() -> Any:
    """A validator by the Compose specification, as the package that carries it has it."""
    path = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    return validators.validator_for(schema)(schema)


def test_the_compose_file_is_one_by_the_specification() -> None:
    assert [error.message for error in compose_schema().iter_errors(COMPOSE)] == []


@pytest.mark.parametrize(
    ("service", "field", "value"),
    [
        ("vllm", "port", ["8000:8000"]),
        ("vllm", "ipc", 1),
        ("vllm", "healthcheck", {"test": 5}),
        ("vllm", "deploy", {"resources": {"reservations": {"devices": [{"driver": "nvidia"}]}}}),
        ("grafana", "configs", [{"file": "dashboards"}]),
        ("prometheus", "volumes", "prometheus:/prometheus"),
    ],
)
def test_what_the_specification_has_not_is_found(service: str, field: str, value: Any) -> None:
    changed = copy.deepcopy(COMPOSE)
    changed["services"][service][field] = value
    assert not compose_schema().is_valid(changed)


def test_the_compose_file_serves_a_vllm_that_the_plugin_knows() -> None:
    services = COMPOSE["services"]
    image = services["vllm"]["image"]
    assert versions.is_known(image.rpartition(":v")[2])
    (command,) = services["vllm"]["command"]
    assert "kvweave vllm-config" in command
    assert "vllm serve" in command
    named = {given["source"] for one in services.values() for given in one.get("configs", [])}
    assert named == set(COMPOSE["configs"])
    for config in COMPOSE["configs"].values():
        assert isinstance(yaml.safe_load(config["content"]), dict)
    mounted = [path.split(":")[0] for path in services["grafana"]["volumes"]]
    assert [(DOCS / path).is_file() for path in mounted] == [True]
