"""Spoiled documents of any kind are taken or refused by an error of ours, and nothing else happens.

Each target runs for FUZZ_SECONDS (8), from a seed that FUZZ_SEED says; `make fuzz` is an hour in
all. What was found stands in `found/<target>/<what it is>.bin`, and is read first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest

from kvweave import KvweaveError
from mutations import spoiled
from targets import TARGETS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "8"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
FOUND = Path(__file__).parent / "found"
LOOKS_AT_THE_CLOCK = 64


@pytest.mark.parametrize("name", TARGETS)
def test_a_spoiled_document_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    for document in target.documents:
        target.read(document)
    known = sorted((FOUND / name).glob("*.bin")) if (FOUND / name).is_dir() else []
    random, cases, refused = Random(SEED), 0, 0
    end = time.monotonic() + SECONDS
    while known or cases % LOOKS_AT_THE_CLOCK or time.monotonic() < end:
        data = known.pop().read_bytes() if known else spoiled(random, target.documents)
        cases += 1
        try:
            target.read(data)
        except KvweaveError:
            refused += 1
        except BaseException:
            print(f"{name}: case {cases} of seed {SEED}: {data!r}")
            raise
    print(f"{name}: {cases} documents, {refused} refused")
    assert refused
