"""An op is found by its name: one basename from Python to the kernel."""

from pathlib import Path

BORDER = "rust/python/src/ops/cpu"
"""Where every op enters Rust on the CPU; files with other names there are shared by several."""
HOST_HOMES = (
    "python/kvweave/ops/{}.py",
    "rust/core/src/ops/{}.rs",
    "rust/reference/src/{}.rs",
)
HOMES = (
    *HOST_HOMES,
    "rust/python/src/ops/cuda/{}.rs",
    "rust/cuda/src/{}.rs",
    "csrc/{}.cu",
)
ON_HOSTS = {"pack_losses"}
"""What looks at pages that have been copied there: a GPU has no kernel of it."""


def scattered_ops(root: Path) -> list[str]:
    """Ops that lack a file of their name on the way from Python to csrc."""
    return [
        f"{BORDER}/{entry.name}: no {home.format(entry.stem)}"
        for entry in sorted((root / BORDER).glob("*.rs"))
        if "#[pyfunction]" in entry.read_text()
        for home in (HOST_HOMES if entry.stem in ON_HOSTS else HOMES)
        if not (root / home.format(entry.stem)).exists()
    ]
