"""`Submission`: how a request is to be answered, by name, for those who pass it on to an engine."""

from __future__ import annotations

from typing import TypedDict

from kvweave.runner.answers.stop import Stops
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.healing import Healing


class HowToAnswer(TypedDict, total=False):
    """What `Engine.submit_prefilled` takes by name, and means by it."""

    max_new_tokens: int
    sampling: Sampling | None
    stop: Stops | None
    healing: Healing | None
    priority: int
    streamed: bool
    unread: int | None


class Submission(HowToAnswer, total=False):
    """What `Engine.submit` takes by name, and means by it."""

    namespace: str
    discover: bool
    remember: bool
    publish: bool
    reserve: bool
