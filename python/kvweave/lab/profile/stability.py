"""Which heads go on reading the same pages while they decode (FlexiCache, §2)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave import __version__
from kvweave.arguments import real, whole
from kvweave.errors import InvalidArgument
from kvweave.lab.profile.attention_reach import pages_of
from kvweave.lab.profile.head_profile import UNSTABLE_SHARE, Flags
from kvweave.lab.profile.page_choice import chosen_pages, overlap
from kvweave.lab.profile.scores import Scores, rounded, top
from kvweave.lab.profile.tap import Tap
from kvweave.lab.profile.texts import TextMaker, parted
from kvweave.plan import Rows
from kvweave.runner import Runner
from kvweave.runner.progress import track

WINDOW = 16
"""Steps that one step's pages are compared with: stable heads are ranked that often (§3.3)."""


@dataclass(frozen=True)
class TaskStability:
    """What the prompts of one task showed, of L × G heads.

    `overlap` f64 [L, G, W]: random-corrected overlap of a step's pages with those 1 to W steps
    later, the mean over steps and prompts. `by_window` f64 [S, L, G]: the mean over offsets of each
    of S windows. `unstable_share`: of all heads, how many are called unstable.
    """

    task: str
    overlap: Scores
    by_window: Scores
    unstable_share: float = UNSTABLE_SHARE

    @property
    def windows(self) -> int:
        """S."""
        return len(self.by_window)

    @property
    def stability(self) -> Scores:
        """The mean over offsets, f64 [L, G]."""
        return np.asarray(self.overlap.mean(-1))

    @property
    def least(self) -> npt.NDArray[np.int64]:
        """In how many windows a head was among those whose pages changed most, i64 [L, G]."""
        few = round(self.unstable_share * self.stability.size)
        least = np.sum([top(-window, few) for window in self.by_window], axis=0)
        return np.asarray(least, np.int64)

    def unstable(self) -> Flags:
        """The share that was among the least stable most often, bool [L, G] (section 2.3).

        Of heads that were so equally often, those of less overlap.
        """
        return _most_often(self.least, self.stability, self.unstable_share)


def _most_often(least: npt.NDArray[np.int64], stability: Scores, share: float) -> Flags:
    # Overlap lies between 0 and 1, so it tells apart none but equals.
    return top(least - stability / 2, round(share * least.size))


@dataclass(frozen=True)
class Stability:
    """How stable the heads of a model are, task by task.

    `pages`: how many a head chooses. `steps`: decode steps of a prompt. `subject`: what else
    decides the figures, as plain data. `unstable_share`: of all heads, how many are called
    unstable.
    """

    model_fingerprint: str
    pages: int
    steps: int
    tasks: tuple[TaskStability, ...]
    subject: Mapping[str, Any]
    unstable_share: float = UNSTABLE_SHARE

    def with_share(self, unstable_share: float) -> Stability:
        """The same figures, and so many of the heads called unstable.

        # Errors
        `InvalidArgument` for a share outside 0..1.
        """
        share = real("unstable_share", unstable_share, 0.0, 1.0)
        tasks = tuple(replace(task, unstable_share=share) for task in self.tasks)
        return replace(self, tasks=tasks, unstable_share=share)

    @property
    def overlap(self) -> Scores:
        """By offset, the mean over tasks: f64 [L, G, W]."""
        return np.asarray(np.mean([task.overlap for task in self.tasks], axis=0))

    def unstable(self) -> Flags:
        """The unstable share of heads over the windows of all tasks, bool [L, G]."""
        least = np.sum([task.least for task in self.tasks], axis=0)
        return _most_often(least, self.overlap.mean(-1), self.unstable_share)

    def shared(self) -> Scores:
        """The share of unstable heads that two tasks have in common, f64 [tasks, tasks]."""
        sets = np.stack([task.unstable().ravel() for task in self.tasks]).astype(np.float64)
        return np.asarray(sets @ sets.T / max(1.0, float(sets[0].sum())))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, four decimals: what a map keeps as evidence."""
        return {
            **self.subject,
            "pages": self.pages,
            "steps": self.steps,
            "tasks": [task.task for task in self.tasks],
            "shared_by_tasks": rounded(self.shared()),
            "shared_by_chance": self.unstable_share,
            "overlap_by_offset": rounded(self.overlap),
            "unstable": self.unstable().tolist(),
        }


def text_tasks(
    runner: Runner,
    texts: Sequence[str],
    length: int,
    *,
    sink: int,
    recent: int,
    prompts: int = 1,
    seed: int = 0,
) -> dict[str, list[Sequence[int]]]:
    """Two tasks of each text: to go on with it, and with numbers hidden in it and asked for.

    The prompts are those that `profile_heads` measures; errors as there.
    """
    maker = TextMaker(runner, sink=sink, recent=recent, seed=seed)
    found: dict[str, list[Sequence[int]]] = {}
    for name in texts:
        corpus = parted(name)[0]
        made = [maker.plain(corpus, length, index).tokens for index in range(prompts)]
        found[corpus.name] = [tokens.tolist() for tokens in made]
        asked = [maker.needle(corpus, length, index).tokens for index in range(prompts)]
        found[f"{corpus.name}, hidden numbers"] = [tokens.tolist() for tokens in asked]
    return found


def measure_stability(
    runner: Runner,
    tasks: Mapping[str, Sequence[Sequence[int]]],
    *,
    pages: int = 64,
    steps: int = 128,
    unstable_share: float = UNSTABLE_SHARE,
) -> Stability:
    """Decodes greedily behind the prompts of each task and compares the pages of its steps.

    `tasks`: prompts of token ids by name. Every head reads everything while it decodes; `pages` is
    how many of them each would choose at each step. Sets are compared over windows of 16 steps.
    `unstable_share` of the heads are called unstable.

    # Errors
    `InvalidArgument` for no tasks, a task without prompts, `steps` that no window fits, and a
    prompt with no more than `pages` pages, of which every choice would be all, or a share outside
    0..1; `PoolFull` where the arena is too small.
    """
    share = real("unstable_share", unstable_share, 0.0, 1.0)
    whole("pages", pages, 1)
    whole("steps", steps, WINDOW + 1)
    page_tokens = runner.cache.shape.page_tokens
    if not tasks or not all(tasks.values()):
        raise InvalidArgument("tasks: expected at least one, of at least one prompt, got none")
    for name, prompts in tasks.items():
        shortest = min(len(prompt) for prompt in prompts)
        if shortest <= pages * page_tokens:
            raise InvalidArgument(
                f"prompt of task {name!r}: expected more than {pages} pages of {page_tokens} "
                f"tokens, got {shortest} tokens"
            )
    jobs = [(name, prompt) for name, prompts in tasks.items() for prompt in prompts]
    found: dict[str, list[Scores]] = {name: [] for name in tasks}
    for name, prompt in track(jobs, "decoding", runner.progress):
        found[name].append(_windows(runner, list(prompt), pages, steps))
    made = tuple(_task(name, windows) for name, windows in found.items())
    subject = {
        "kvweave": __version__,
        "date": datetime.date.today().isoformat(),
        "prompts": {name: len(prompts) for name, prompts in tasks.items()},
        "page_tokens": page_tokens,
        "window": WINDOW,
    }
    found_of = Stability(runner.spec.fingerprint, pages, steps, made, subject)
    return found_of.with_share(share)


def _task(name: str, prompts: Sequence[Scores]) -> TaskStability:
    """Of overlaps [S, L, G, W] a prompt."""
    windows = np.concatenate(prompts)
    return TaskStability(name, windows.mean(0), windows.mean(-1))


def _windows(runner: Runner, prompt: list[int], pages: int, steps: int) -> Scores:
    """Overlaps of every window of one answer, f64 [S, L, G, W].

    The answer is decoded, then read once more with its prompt: its rows are the decode steps'.
    """
    said = runner.generate(prompt, "full", max_new_tokens=steps, stop=[], remember=False).tokens
    tokens = prompt + said[:-1]
    rows: Rows = np.arange(len(prompt) - 1, len(tokens), dtype=np.int32)
    spec, page_tokens = runner.spec, runner.cache.shape.page_tokens
    tap = Tap(spec, {"q_proj": rows})
    found = []
    with torch.inference_mode(), tap, runner.prefill(tokens, "full", remember=False) as done:
        slots = done.request.slots(np.arange(len(tokens), dtype=np.int32))
        arena = pages_of(runner)
        block, slot = torch.from_numpy(slots).long().to(arena.device).unbind(1)
        for layer, of_layer in enumerate(spec.layers):
            first = layer * spec.kv_heads
            heads = torch.arange(first, first + spec.kv_heads, device=arena.device)
            chosen = chosen_pages(
                tap.queries(layer, done.positions),
                rows,
                arena[block[:, None] + heads, 0, slot[:, None]],
                window=of_layer.window,
                page_tokens=page_tokens,
                budget=pages,
            )
            seen = rows // page_tokens + 1
            if of_layer.window is not None:
                seen = seen - np.maximum(0, rows + 1 - of_layer.window) // page_tokens
            found.append(overlap(chosen, seen.astype(np.int64), pages, WINDOW))
    return np.stack(found, 1)
