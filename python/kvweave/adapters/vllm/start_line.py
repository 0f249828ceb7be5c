"""What an engine says once at its start: what of the plugin is active, and what has no effect.

Variables that nobody knows are told of by each process of vLLM that loads the plugin.

`config` is vLLM's `VllmConfig`; vLLM is imported only to log.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from kvweave import __version__, cuda_status
from kvweave.adapters.vllm.heads.class_map import HeadClass, read_classes, read_map
from kvweave.adapters.vllm.heads.same_model import NAMELESS, UNNAMED
from kvweave.adapters.vllm.model_names import MODELS
from kvweave.adapters.vllm.options import SECTION, TEXTS, VARIABLES, Options, options_of
from kvweave.adapters.vllm.versions import WITH_VIRTUAL_PAGES
from kvweave.weight_sample import WeightComparison, samples_of

PREFIX = "KVWEAVE_"
BUILD = ("KVWEAVE_BENCH_DISK", "KVWEAVE_CUDA", "KVWEAVE_NOTEBOOKS", "KVWEAVE_RELEASE")
"""Variables of ours that no engine reads."""
GIB = 2**30
LIKE = 0.85
"""From here on `difflib` takes a key for a misspelt name: one or two letters are others."""
CHECK = "MarkerCheck"
EXTENSION = "KnowledgeBaseWorker"
WINDOWS_ALONE = (
    f"{SECTION}.virtual_pages: a map with windows and without top-k heads over virtual pages is "
    f"served in vLLM {WITH_VIRTUAL_PAGES[-1]} for the last time, and refused from the first "
    "version after it that the plugin knows; head classes, without virtual_pages, go on"
)


def log_start(config: Any) -> None:
    """Logs `active_line` and, as warnings, `idle_lines`: on the first rank, once a process."""
    from vllm import __version__ as vllm_version
    from vllm.logger import init_logger

    if config.parallel_config.rank != 0:
        return
    # A logger of vLLM's: nobody listens to others in its processes.
    log: Any = init_logger("vllm.kvweave")
    log.info_once("%s", active_line(config, vllm_version))
    _warn([*idle_lines(config), *map_lines(config), *ending_lines(config)])


def log_unread(config: Any) -> None:
    """Logs `misplaced_lines` and `unread_lines` as warnings: on the first rank, once a process."""
    if config.parallel_config.rank == 0:
        _warn([*misplaced_lines(config), *unread_lines(config)])


def log_unknown() -> None:
    """Logs `unknown_lines` as warnings, once a process."""
    _warn(unknown_lines())


def _warn(lines: Iterable[str]) -> None:
    from vllm.logger import init_logger

    log: Any = init_logger("vllm.kvweave")
    for line in lines:
        log.warning_once("%s", line)


def log_compared(compared: WeightComparison) -> None:
    """Logs which of a map's values are those of the weights that were loaded: once a machine."""
    from vllm.logger import init_logger

    log: Any = init_logger("vllm.kvweave")
    tell = log.info_once if compared.seen else log.warning_once
    tell("heads: %s", compared.told())


def active_line(config: Any, vllm_version: str, environment: Mapping[str, str] = os.environ) -> str:
    """What is active, in one line.

    Errors: as `options_of` and `read_classes`.
    """
    options, name = options_of(config.additional_config, environment), _architecture(config)
    parts = [f"kvweave {__version__} (CUDA {cuda_status()}) in vLLM {vllm_version}"]
    if _backend(config) == "CUSTOM" or not _splits_nothing(config, options):
        parts.append("its backend")
    if name in MODELS:
        parts += [f"model {name}", *_features(config, options)]
    transfer = config.kv_transfer_config
    if transfer is not None:
        parts.append(f"connector {transfer.kv_connector}")
    return "; ".join(parts)


def idle_lines(config: Any, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What is set and has no effect, a line each that names it.

    Errors: as `options_of`.
    """
    return [
        *misplaced_lines(config),
        *_overridden(config, environment),
        *unread_lines(config, environment),
        *_options(config, environment),
    ]


def misplaced_lines(config: Any) -> list[str]:
    """Keys of `additional_config` that nobody reads and that were meant for us, a line each.

    An option of ours beside the section, or a name of the section that is misspelt; others are
    those of other plugins.
    """
    given = config.additional_config
    keys = [key for key in given if isinstance(key, str)] if isinstance(given, Mapping) else []
    lines = []
    for key in keys:
        plain = key.lower().replace("-", "_")
        alike = SequenceMatcher(None, plain, SECTION, autojunk=False).ratio() >= LIKE
        if plain in TEXTS:
            lines.append(f"{plain} inside {SECTION}, got {key!r} beside it")
        elif alike and key != SECTION:
            lines.append(f"{SECTION}, got {key!r}")
    return [f"additional_config: expected {line}; it has no effect" for line in lines]


def unread_lines(config: Any, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What is set beside a model which is not ours, and reads nothing of it, a line each."""
    name, section = _architecture(config), _section(config)
    if name in MODELS:
        return []
    expected = f"an architecture of {', '.join(MODELS)} in --hf-overrides"
    variables = [
        variable
        for option, variable in VARIABLES.items()
        if environment.get(variable) and option not in section
    ]
    given = [*(f"{SECTION}.{option}" for option in section), *variables]
    lines = [f"{one}: expected {expected}, got {name}; it has no effect" for one in given]
    return [*lines, *_of_segments(config, reuses=False)]


def unknown_lines(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that begin as ours do and that nobody reads, a line each."""
    known = sorted(VARIABLES.values())
    return [
        f"{one}: expected one of {', '.join(known)}, which are read; it has no effect"
        for one in sorted(environment)
        if one.startswith(PREFIX) and one not in (*known, *BUILD) and environment[one]
    ]


def map_lines(config: Any, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Why it is not known whether the head map, if there is one, is of the model's weights.

    Errors: as `options_of` and `read_map`.
    """
    if _architecture(config) not in MODELS:
        return []
    heads = options_of(config.additional_config, environment).heads
    if heads is None:
        return []
    if not samples_of(read_map(heads)):
        return [UNNAMED]
    kind = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    if kind in NAMELESS:
        expected = "weights by their names, which the map's are compared with"
        return [f"load_format: expected {expected}, got {kind}; they are not compared"]
    return []


def ending_lines(config: Any, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What is served and will not be by a version of the plugin for a later vLLM, a line each.

    Errors: as `options_of` and `read_classes`.
    """
    options = options_of(config.additional_config, environment)
    if _architecture(config) not in MODELS or not options.virtual_pages or options.heads is None:
        return []
    kinds = set(_kinds_of(config, options))
    return [WINDOWS_ALONE] if "window" in kinds and "top_k" not in kinds else []


def _features(config: Any, options: Options) -> Iterator[str]:
    if options.heads is not None:
        yield f"heads of {options.heads}: {_kinds(config, options)}"
    if options.virtual_pages:
        host = options.host_bytes
        yield "virtual pages" + ("" if host is None else f", {host / GIB:.2f} GiB of the host")
    if options.segment_bytes is not None:
        size, share = options.segment_bytes / GIB, round(options.frozen_share * 100)
        packed = "" if options.segment_dtype is None else f" packed in {options.segment_dtype}"
        yield (
            f"segments{packed} in {size:.2f} GiB of each worker, up to {share} % for "
            "knowledge bases; policy foresight where a request names none"
        )
    if options.store is not None:
        bound = "" if options.store_bytes is None else f", {options.store_bytes / GIB:.2f} GiB each"
        yield f"documents of workers kept in {options.store}{bound}"


def _classes(config: Any, options: Options) -> list[list[HeadClass]]:
    model = config.model_config
    layers, heads = model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()
    assert options.heads is not None
    return read_classes(options.heads, layers, heads)


def _kinds_of(config: Any, options: Options) -> Iterator[str]:
    """Of each head of the map, `full`, `window` or `top_k`.

    Errors: as `read_classes`.
    """
    return (str(head["kind"]) for layer in _classes(config, options) for head in layer)


def _kinds(config: Any, options: Options) -> str:
    counts: Counter[str] = Counter()
    for layer in _classes(config, options):
        counts.update(map(_kind, layer))
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _kind(head: Mapping[str, Any]) -> str:
    if head["kind"] == "window":
        return f"window {head['recent']} with sink {head['sink']}"
    if head["kind"] == "top_k":
        return f"top-k of {head['pages']} pages"
    return str(head["kind"])


def _overridden(config: Any, environment: Mapping[str, str]) -> Iterator[str]:
    section = _section(config)
    for name, variable in VARIABLES.items():
        if name in section and environment.get(variable):
            here = f"additional_config {SECTION}.{name}"
            yield f"{variable}: expected one place, got {here} too, which counts; it has no effect"


def _options(config: Any, environment: Mapping[str, str]) -> Iterator[str]:
    """Of a model of ours, options that change nothing beside the others."""
    options = options_of(config.additional_config, environment)
    if _architecture(config) not in MODELS:
        return
    reuses = options.segment_bytes is not None
    if _is_set(config, environment, "frozen_share"):
        if not reuses:
            yield f"{SECTION}.frozen_share: expected segment_bytes beside it; it has no effect"
        elif not _extended(config) and options.store is None:
            expected = f"{EXTENSION} or store beside it, by which documents come"
            yield f"{SECTION}.frozen_share: expected {expected}; it has no effect"
    bound, quota = options.store_bytes, options.store_quota_bytes
    if bound is not None and quota is not None and quota >= bound:
        expected = f"less than the {bound} of store_bytes"
        yield f"{SECTION}.store_quota_bytes: expected {expected}, got {quota}; it has no effect"
    if options.heads is not None and set(_kinds_of(config, options)) == {"full"}:
        expected = "a head that does not keep and read all"
        yield f"{SECTION}.heads: expected {expected}, got {options.heads}; it has no effect"
    backend = _backend(config)
    if backend not in (None, "CUSTOM") and not _splits_nothing(config, options):
        expected = "CUSTOM or none beside a model of ours, which has its own"
        yield f"attention_config.backend: expected {expected}, got {backend}; it has no effect"
    yield from _of_segments(config, reuses=reuses)


def _of_segments(config: Any, *, reuses: bool) -> Iterator[str]:
    """What vLLM was told to load for segments and is of no use, and what it was not told."""
    checks = any(CHECK in str(one) for one in config.model_config.logits_processors or ())
    if reuses and not checks:
        expected = f"{CHECK}, which refuses malformed marks"
        yield f"logits_processors: expected {expected}, got none; such marks have no effect"
    if checks and not reuses:
        yield f"logits_processors: expected {CHECK} beside segment_bytes; marks have no effect"
    if _extended(config) and not reuses:
        expected = f"{EXTENSION} beside segment_bytes"
        yield f"worker_extension_cls: expected {expected}; a knowledge base is refused"


def _extended(config: Any) -> bool:
    return EXTENSION in str(config.parallel_config.worker_extension_cls)


def _is_set(config: Any, environment: Mapping[str, str], option: str) -> bool:
    return option in _section(config) or bool(environment.get(VARIABLES[option]))


def _splits_nothing(config: Any, options: Options) -> bool:
    """Whether a model of ours leaves its attention as vLLM made it, on the backend asked for."""
    if _architecture(config) not in MODELS or options.heads is None:
        return False
    others = options.virtual_pages or options.segment_bytes is not None
    return not others and set(_kinds_of(config, options)) == {"full"}


def _backend(config: Any) -> str | None:
    """The attention backend that the user asked for, by its name."""
    backend = config.attention_config.backend
    return None if backend is None else str(backend.name)


def _section(config: Any) -> Mapping[str, Any]:
    found = config.additional_config
    section = found.get(SECTION) if isinstance(found, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _architecture(config: Any) -> str:
    return str((config.model_config.architectures or ["none"])[0])
