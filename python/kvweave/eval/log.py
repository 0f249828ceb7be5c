"""Measurements kept in a file as they are made, so that an interrupted evaluation goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.eval.measure import Measurement


class MeasurementLog:
    """JSON lines: first what is measured, then one line a sample with all its measurements.

    `subject` is plain data that the figures depend on; a file of another subject is refused with
    the key that differs. A last line that an interruption cut short is dropped.

    # Errors
    `InvalidArgument` for a file of another subject, or one that is no log.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self._path = path
        self._kept: dict[int, tuple[Measurement, ...]] = {}
        wanted = json.loads(json.dumps(dict(subject)))
        if path.exists() and (lines := _whole_lines(path)):
            self._read(lines, wanted)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(wanted)

    def measured(self, sample: int) -> tuple[Measurement, ...]:
        """What the file holds of a sample; nothing when it was not measured yet."""
        return self._kept.get(sample, ())

    def append(self, sample: int, measurements: Sequence[Measurement]) -> None:
        """Keeps all measurements of one sample; they are on the disk when this returns."""
        self._kept[sample] = tuple(measurements)
        plain = [asdict(m) for m in measurements]
        self._write({"sample": sample, "measurements": plain})

    def _read(self, lines: list[str], wanted: dict[str, Any]) -> None:
        try:
            subject, *samples = [json.loads(line) for line in lines]
            for entry in samples:
                made = (Measurement(**{**m, "kl": tuple(m["kl"])}) for m in entry["measurements"])
                self._kept[int(entry["sample"])] = tuple(made)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(
                f"{self._path}: expected a log of measurements, got {error!r}"
            ) from error
        found = subject if isinstance(subject, dict) else {}
        for key in (*wanted, *found):
            if wanted.get(key) != found.get(key):
                raise InvalidArgument(
                    f"{self._path}: expected measurements with {key} = {wanted.get(key)!r}, "
                    f"got {found.get(key)!r}"
                )

    def _write(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[str]:
    """The lines that end; what follows the last end of line is cut off the file."""
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(path, len(whole))
    return whole.decode("utf-8").splitlines()
