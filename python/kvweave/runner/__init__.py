"""Running models on kvweave's pages: prompts, the executor, decode, and `Runner` around them."""

from kvweave.runner.conversation.conversation import Conversation
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine import Engine
from kvweave.runner.engine_request import EngineRequest
from kvweave.runner.healing import Healing
from kvweave.runner.lossy.canary import Canary, CanaryState
from kvweave.runner.prefill.prefill import Prefill
from kvweave.runner.prompt import (
    Part,
    Prompt,
    Segment,
    TokenizedPrompt,
    chat_parts,
    chat_turn_parts,
)
from kvweave.runner.report import (
    CanaryCheck,
    Generation,
    HealingReport,
    Report,
    StreamedToken,
    Timings,
)
from kvweave.runner.runner import Runner

__all__ = [
    "Canary",
    "CanaryCheck",
    "CanaryState",
    "Conversation",
    "Engine",
    "EngineRequest",
    "Generation",
    "Healing",
    "HealingReport",
    "Part",
    "Prefill",
    "Prompt",
    "Report",
    "Runner",
    "Sampling",
    "Segment",
    "StreamedToken",
    "Timings",
    "TokenizedPrompt",
    "chat_parts",
    "chat_turn_parts",
]
