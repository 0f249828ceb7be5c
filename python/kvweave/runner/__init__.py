"""Running models on kvweave's pages: prompts, the executor, decode, and `Runner` around them."""

from kvweave.runner.answers.beam_search import Beam
from kvweave.runner.chat import chat_parts, chat_prompt, chat_turn_parts
from kvweave.runner.conversation.conversation import Conversation
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.engine.engine import Engine
from kvweave.runner.engine.engine_request import EngineRequest
from kvweave.runner.healing import Healing
from kvweave.runner.kv.packing import Packing, Strategy
from kvweave.runner.lossy.canary import Canary, CanaryState
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.prompt import Part, Prompt, Segment, TokenizedPrompt
from kvweave.runner.report import (
    CanaryCheck,
    Generation,
    HealingReport,
    Report,
    StreamedToken,
    Timings,
)
from kvweave.runner.retention import Pin
from kvweave.runner.runner import Runner
from kvweave.runner.serve.async_runner import AsyncRunner
from kvweave.runner.serve.served_request import ServedRequest
from kvweave.runner.serve.server import Server
from kvweave.runner.serve.tenant import Tenant
from kvweave.runner.workflow import Workflow

__all__ = [
    "AsyncRunner",
    "Beam",
    "Canary",
    "CanaryCheck",
    "CanaryState",
    "Conversation",
    "Engine",
    "EngineRequest",
    "Generation",
    "Healing",
    "HealingReport",
    "Packing",
    "Part",
    "Pin",
    "Prefill",
    "Prompt",
    "Report",
    "Runner",
    "Sampling",
    "Segment",
    "ServedRequest",
    "Server",
    "Strategy",
    "StreamedToken",
    "Tenant",
    "Timings",
    "TokenizedPrompt",
    "Workflow",
    "chat_parts",
    "chat_prompt",
    "chat_turn_parts",
]
