"""What ends where a `with` of it ends: `Ending`, and `Closing`, which is closed there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Ending(ABC):
    """A context manager that is itself, and ends with its block, whether something was raised."""

    @abstractmethod
    def _end_of_block(self) -> None:
        """What is done there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_of_block()


class Closing(Ending):
    """One that is closed at the end."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds; safe to call twice."""

    def _end_of_block(self) -> None:
        self.close()
