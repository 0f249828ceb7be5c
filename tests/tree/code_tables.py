"""The tables of `docs/models.md`, made of the code: `make tables` writes them.

What is said to work was done here, with tiny models; what is refused is in the refusal's own words.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from families import FAMILIES, OTHERS, random_tokens, tiny
from kvweave import HeadClassMap, PagedCache, Runner, Segment, Unsupported
from kvweave.adapters.vllm import composition as engine
from kvweave.adapters.vllm.segments.rotation import frequencies
from kvweave.adapters.vllm.served_models import STOCK, WITHOUT
from kvweave.runner import Canary, Healing
from kvweave.runner.kv.beside_drafts import NOT_BESIDE_DRAFTS
from kvweave.runner.kv.beside_host import NOT_BESIDE_HOST
from kvweave.runner.kv.beside_packed import NOT_BESIDE_PACKED
from ranked_pages import FULL, WINDOW, kinds_map, top_k

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
PLUGIN = ROOT / "python" / "kvweave" / "adapters" / "vllm"
ENGINE = ROOT / "tests" / "vllm_plugin" / "engine"
PARTS = {
    "backend/decoder_layers.py": "all but the attention backend alone",
    "heads/split.py": "head classes",
    "top_k/model.py": "top-k heads",
    "top_k/map.py": "top-k heads",
    "top_k/bounds_cache.py": "top-k heads",
    "virtual_pages/model.py": "virtual pages",
    "segments/model.py": "segments",
    "segments/rotation.py": "segments",
    "segments/attention.py": "packed segments",
    "segments/packed_store.py": "packed segments",
    "model_identity.py": "documents in a folder, the store behind vLLM's offloading",
    "store_tier/origin.py": "the store behind vLLM's offloading",
    "backend/attention.py": "the attention backend",
}
"""By file of the plugin, the part whose refusals are in it."""
WINDOWED = "refused: expected layers that see the whole context"
"""What every part says of a model with windows (`backend/decoder_layers.py`, which needs vLLM)."""
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
"""What a configuration calls the number of its experts."""
INTERNAL = {"kv_cache", "arguments of attention", "additional_config"}
"""What no option of vLLM decides."""


# ---- families ---------------------------------------------------------------------------


def families() -> str:
    """Each family that tests know: what refuses it, or which tests hold it."""
    heads = ["family", "class", "of its own", "Runner", "PagedCache", "vLLM plugin"]
    rows = []
    for name, (_, kind, extra) in {**FAMILIES, **OTHERS}.items():
        runner = _outcome(lambda name=name: _runner(tiny(name)))
        cache = _outcome(lambda name=name: PagedCache(tiny(name), max_tokens=64).close())
        rows.append([name, f"`{kind}`", _own(extra), runner, cache, _served(name, kind, extra)])
    return _table(heads, rows)


def _served(name: str, kind: str, extra: dict[str, Any]) -> str:
    """What the plugin has for a family, and where it refuses some of it."""
    if kind not in STOCK:
        return f"no class: {WITHOUT[kind]}" if kind in WITHOUT else "no class"
    tested = _plugin_families().get(name)
    if "sliding_window" in extra:
        return f"{WINDOWED}; without windows: {tested}" if tested else WINDOWED
    if tested:
        return tested
    reused = _outcome(lambda: frequencies(tiny(name).config))
    return f"heads not run; segments {reused.removesuffix(' beside segments')}"


def _plugin_families() -> dict[str, str]:
    """Families that the plugin's tests run in an engine, and in which parts of it."""
    found: dict[str, list[str]] = {}
    for path, part in (("test_head_split.py", "heads"), ("vllm_segments.py", "segments")):
        for name in _literal(ENGINE / path, "FAMILIES"):
            found.setdefault(name, []).append(part)
    return {name: ", ".join(parts) for name, parts in found.items()}


def _literal(path: Path, name: str) -> dict[str, str]:
    """A dictionary that a file assigns, and adds to, in plain literals; it is not imported."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        targets = [node.target] if isinstance(node, ast.AugAssign) else targets
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            assert isinstance(node, ast.Assign | ast.AugAssign)
            found |= ast.literal_eval(node.value)
    return found


def _own(extra: dict[str, Any]) -> str:
    """What a family's configuration says that others do not."""
    rope = extra.get("rope_parameters", {}).get("rope_type")
    said = [f"RoPE {rope}"] if rope else []
    said += ["sliding windows"] if "sliding_window" in extra else []
    said += ["experts"] if EXPERTS & set(extra) else []
    said += ["layers without RoPE"] if "no_rope_layers" in extra else []
    said += [f"heads of {extra['head_dim']}"] if extra.get("head_dim", 0) > 16 else []
    said += ["one KV head"] if extra.get("num_key_value_heads") == 1 else []
    said += ["feed-forward beside attention"] if "use_parallel_residual" in extra else []
    said += ["numbers that multiply"] if "residual_multiplier" in extra else []
    return ", ".join(said)


def _outcome(work: Callable[[], object]) -> str:
    """ "yes", or what a refusal expected; whatever else is raised is a defect of this file."""
    try:
        work()
    except Unsupported as error:
        return "refused: expected " + str(error).partition("expected ")[2].partition(", got ")[0]
    return "yes"


# ---- what a runner composes -------------------------------------------------------------


DOCUMENT, QUESTION = random_tokens(40, 1).tolist(), random_tokens(12, 2).tolist()
TOP_K = [top_k(4, every=4), FULL]


def _runner(model: Any, **settings: Any) -> Runner:
    return Runner(model, **{"max_tokens": 4096, "page_tokens": 4, "progress": False, **settings})


def _settings(model: Any) -> dict[str, dict[str, Any]]:
    """Arguments of a runner by how the page calls them; `kinds` are classes of its heads."""
    return {
        "heads with windows": {"kinds": [WINDOW, FULL]},
        "heads top_k": {"kinds": TOP_K},
        "host_bytes": {"kinds": TOP_K, "host_bytes": 1 << 24},
        "speculate": {"kinds": TOP_K, "speculate": 2},
        'kv_dtype="int4"': {"kv_dtype": "int4", "page_tokens": 16},
        'mode="share"': {"mode": "share"},
        "document_bytes": {"document_bytes": 1 << 22},
        "canary": {"canary": Canary(share=1.0, bound=100.0)},
    }


def _asked(settings: dict[str, Any], other: dict[str, Any], model: Any) -> Runner:
    """A runner with both."""
    both = {**settings, **other}
    kinds = list(settings.get("kinds", [])) + [
        kind for kind in other.get("kinds", []) if kind not in settings.get("kinds", [])
    ]
    both.pop("kinds", None)
    heads: HeadClassMap | None = None
    if kinds:
        plain = Runner(model, max_tokens=64, page_tokens=4, progress=False, check=False)
        heads = kinds_map(plain.spec, kinds)
    return _runner(model, check=False, heads=heads, **both)


def _answer(runner: Runner) -> None:
    runner.generate(QUESTION, max_new_tokens=3, stop=())


def _documents(policy: str) -> Callable[[Runner], None]:
    def ask(runner: Runner) -> None:
        runner.insert(DOCUMENT, "one")
        parts = [Segment(tokens=QUESTION), Segment(tokens=DOCUMENT), Segment(tokens=QUESTION)]
        runner.generate(parts, policy, max_new_tokens=3, stop=())

    return ask


def _healed(runner: Runner) -> None:
    runner.insert(DOCUMENT, "one")
    parts = [Segment(tokens=QUESTION), Segment(tokens=DOCUMENT), Segment(tokens=QUESTION)]
    runner.generate(parts, "naive", max_new_tokens=3, stop=(), healing=Healing())


def _talk(runner: Runner) -> None:
    with runner.conversation() as talk:
        talk.ask([Segment(tokens=QUESTION)], max_new_tokens=3, stop=())


def _forked(runner: Runner) -> None:
    with runner.prefill(QUESTION, "full") as done:
        done.fork().release()


def _sent(runner: Runner) -> None:
    with runner.prefill(QUESTION, "full") as done:
        runner.export(done)


USES: dict[str, Callable[[Runner], None]] = {
    "documents, foresight": _documents("foresight"),
    "documents, redknot": _documents("redknot"),
    "healing": _healed,
    "conversations": _talk,
    "forks": _forked,
    "payloads": _sent,
}


def together() -> str:
    """Each setting beside each other and each use: whether a tiny model answered so."""
    model = tiny("llama", head_dim=64, num_hidden_layers=2, max_position_embeddings=1024)
    settings = _settings(model)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, own in settings.items():
            beside = [
                "" if other == name else _went(lambda own=own, more=more: _both(own, more, model))
                for other, more in settings.items()
            ]
            uses = [
                _went(lambda own=own, use=use: use(_asked(own, {}, model))) for use in USES.values()
            ]
            rows.append([f"`{name}`", *beside, *uses])
    return _table(["", *(f"`{name}`" for name in settings), *USES], rows)


def _both(own: dict[str, Any], more: dict[str, Any], model: Any) -> None:
    _answer(_asked(own, more, model))


def _went(work: Callable[[], object]) -> str:
    return "yes" if _outcome(work) == "yes" else "–"


def refused_by_a_runner() -> str:
    """Why: the tables that refuse, row by row."""
    tables = {
        'kv_dtype="int4"': NOT_BESIDE_PACKED,
        "host_bytes": NOT_BESIDE_HOST,
        "speculate": NOT_BESIDE_DRAFTS,
    }
    rows = [
        [f"`{setting}`", f"`{what}`", why]
        for setting, reasons in tables.items()
        for what, why in reasons.items()
    ]
    return _table(["beside", "refused", "because"], rows)


# ---- what goes together in an engine ------------------------------------------------------


HYBRID = "disable_hybrid_kv_cache_manager"
FOLDER_UNDER_A_MAP = "test_together.py::test_a_folder_under_a_map_behind_a_prefix"
QUANTISED = "test_segments_quantised.py::test_answers_are_near_the_runners_over_the_same_weights"
QUANTISED_FOLDER = "test_segments_quantised.py::test_documents_come_back_from_a_folder_packed_too"
ONLY_IN = {QUANTISED: "0.26", QUANTISED_FOLDER: "0.26"}
"""Tests that are skipped in the other version of vLLM."""
ONE_MANAGER = "test_together.py::test_one_manager_of_blocks_beside_heads_and_pages"
ONE_MANAGER_OF_SEGMENTS = "test_together.py::test_one_manager_of_blocks_beside_segments"
IN_ENGINES: dict[tuple[str, str], str] = {
    (engine.HEADS, engine.PAGES): "test_virtual_pages.py::test_local_heads_are_masked_ones",
    (engine.TOP_K, engine.PAGES): "test_virtual_pages_top_k.py::"
    "test_pages_leave_for_the_host_and_answers_stay",
    (engine.HEADS, engine.SEGMENTS): "test_segments_heads.py::test_answers_are_the_runners",
    (engine.TOP_K, "tensor_parallel_size"): "test_two_ranks.py::"
    "test_heads_of_two_ranks_choose_as_defined",
    (engine.TOP_K, engine.SEGMENTS): "test_segments_heads.py::test_beside_heads_that_choose_pages",
    (
        engine.HEADS,
        "enable_prefix_caching",
    ): "test_head_split.py::test_cached_prefixes_keep_their_sink",
    (engine.SEGMENTS, engine.PACKED): "test_segments_packed.py::"
    "test_answers_are_near_those_of_exact_segments",
    (engine.HEADS, engine.PACKED): "test_segments_heads.py::"
    "test_packed_segments_are_near_to_exact_ones",
    (engine.PACKED, "enable_prefix_caching"): "test_segments_heads.py::"
    "test_packed_segments_are_near_to_exact_ones",
    (engine.SEGMENTS, engine.FOLDER): "test_segments_restart.py::"
    "test_a_restarted_engine_says_the_same",
    (engine.PACKED, "tensor_parallel_size"): "test_two_ranks.py::"
    "test_packed_segments_on_two_ranks_are_those_of_one",
    (engine.PAGES, "tensor_parallel_size"): "test_two_ranks.py::"
    "test_virtual_pages_on_two_ranks_are_one_ranks",
    (engine.PACKED, engine.FOLDER): "test_segments_restart.py::"
    "test_a_restarted_engine_says_the_same",
    (engine.FOLDER, "tensor_parallel_size"): "test_two_ranks.py::test_two_ranks_are_the_runner",
    (engine.HEADS, engine.FOLDER): FOLDER_UNDER_A_MAP,
    (engine.TOP_K, engine.FOLDER): FOLDER_UNDER_A_MAP,
    (engine.FOLDER, "enable_prefix_caching"): FOLDER_UNDER_A_MAP,
    (engine.TOP_K, engine.PACKED): "test_together.py::"
    "test_packed_segments_beside_heads_that_choose_pages",
    (engine.TOP_K, HYBRID): ONE_MANAGER,
    (engine.PAGES, HYBRID): ONE_MANAGER,
    (engine.SEGMENTS, "quantization"): QUANTISED,
    (engine.PACKED, "quantization"): QUANTISED_FOLDER,
    (engine.FOLDER, "quantization"): QUANTISED_FOLDER,
    (engine.SEGMENTS, HYBRID): ONE_MANAGER_OF_SEGMENTS,
    (engine.PACKED, HYBRID): ONE_MANAGER_OF_SEGMENTS,
    (engine.FOLDER, HYBRID): ONE_MANAGER_OF_SEGMENTS,
    (engine.TOP_K, "enable_prefix_caching"): "test_top_k.py::"
    "test_what_is_found_in_the_prefix_cache_has_its_bounds",
    (engine.PAGES, "enable_prefix_caching"): "test_virtual_pages.py::test_cached_prefixes_are_read",
    (engine.SEGMENTS, "enable_prefix_caching"): "test_segments_scheduling.py::"
    "test_a_prefix_of_vllm_and_segments_are_the_runners",
    (
        engine.SEGMENTS,
        "tensor_parallel_size",
    ): "test_two_ranks.py::test_two_ranks_are_the_runner",
    (
        engine.HEADS,
        "tensor_parallel_size",
    ): "test_two_ranks.py::test_two_ranks_are_the_runner",
}
"""By pair that goes together, the test that has an engine answer so."""


def in_an_engine() -> str:
    """Each part beside each other and each setting: refused, tested in an engine, or neither."""
    others = (*engine.PARTS, *engine.SETTINGS)
    rows = []
    for part in engine.PARTS:
        rows.append([part, *("" if part == other else _beside(part, other) for other in others)])
    return _table(["", *engine.PARTS, *(f"`{name}`" for name in engine.SETTINGS)], rows)


def _beside(part: str, other: str) -> str:
    if other in engine.NOT_BESIDE[part]:
        return "–"
    test = IN_ENGINES.get((part, other)) or IN_ENGINES.get((other, part))
    if test is None:
        return "not run"
    return f"in {ONLY_IN[test]}" if test in ONLY_IN else "yes"


def refused_in_an_engine() -> str:
    """Why, pair by pair; of two parts once."""
    rows, seen = [], set[frozenset[str]]()
    for part, refused in engine.NOT_BESIDE.items():
        for other, why in refused.items():
            if frozenset((part, other)) not in seen:
                seen.add(frozenset((part, other)))
                rows.append([part, f"`{other}`" if other in engine.SETTINGS else other, why])
    return _table(["part", "refused beside it", "because"], rows)


# ---- what the plugin refuses ------------------------------------------------------------


def refused_by_the_plugin() -> str:
    """What each part of the plugin wants of vLLM's options, where it refuses anything else."""
    rows = []
    for file, part in PARTS.items():
        tree = ast.parse((PLUGIN / file).read_text(encoding="utf-8"))
        lists = _lists(tree)
        found = dict.fromkeys(
            (what, wanted)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for what, wanted in _requirements(function, lists)
            if what not in INTERNAL
        )
        rows += [[part, f"`{what}`", wanted] for what, wanted in found]
    return _table(["part", "of vLLM, or the model", "expected"], rows)


def _lists(tree: ast.Module) -> dict[str, str]:
    """Words that a file assigns and writes side by side, by the expression that does."""
    written = {
        ast.unparse(call): ast.unparse(call.args[0])
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "', '.join"
    }
    words: dict[str, list[str]] = {name: [] for name in written.values()}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if (name := ast.unparse(target)) in words:
                words[name] += ast.literal_eval(node.value)
    return {call: ", ".join(words[name]) for call, name in written.items() if words[name]}


def _requirements(function: ast.FunctionDef, lists: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What the calls of `require` in a function name, and what they expect, as they come."""
    assigned: dict[str, ast.expr] = {}
    loops: dict[int, ast.For] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            assigned |= {ast.unparse(target): node.value for target in node.targets}
        elif isinstance(node, ast.For):
            loops |= {id(call): node for call in _calls(node)}
    for call in _calls(function):
        what, _, wanted, *_ = call.args
        loop = loops.get(id(call))
        over = assigned.get(ast.unparse(loop.iter).removesuffix(".items()")) if loop else None
        if isinstance(over, ast.Dict):
            for key in filter(_is_text, over.keys):
                beside = f"none beside {_text(what)}" if _is_text(what) else _text(wanted)
                yield _text(key), beside
        elif _is_text(what):
            yield _text(what), _text(assigned.get(ast.unparse(wanted), wanted), lists)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "require":
            yield call


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(node: ast.expr | None, lists: dict[str, str] | None = None) -> str:
    """A literal, what varies in it as an ellipsis, but for `lists` that are known."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, lists) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return (lists or {}).get(ast.unparse(node.value), "…")
    return str(node.value) if isinstance(node, ast.Constant) else "…"


# ---- the page ---------------------------------------------------------------------------


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "families": families,
    "together": together,
    "runner": refused_by_a_runner,
    "engines": in_an_engine,
    "engine": refused_in_an_engine,
    "plugin": refused_by_the_plugin,
}


def filled(text: str, name: str, table: str) -> str:
    """A page with a table between the marks of its name."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(start)
    return before + start + "\n" + table + "\n" + end + rest.split(end)[1]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for title, made in TABLES.items():
        page = filled(page, title, made())
    PAGE.write_text(page, encoding="utf-8")
