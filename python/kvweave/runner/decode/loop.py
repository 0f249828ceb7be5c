"""The decode loop: steps of a batch until each of its sequences is done."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from kvweave.runner.decode.decoder import Decoder
from kvweave.runner.decode.decoding import Decoding, by_regime


def _nobody(_: Decoding) -> bool:
    return False


@torch.inference_mode()
def decode_steps(
    decoder: Decoder,
    batch: Sequence[Decoding],
    watched: Callable[[Decoding], bool] = _nobody,
) -> Generator[tuple[list[Decoding], torch.Tensor | None], None, None]:
    """One more token for each sequence that is not done, again and again.

    Yields after each step the sequences that it was of, since not all can share one, and a copy of
    their queries [L, B, H, D] where `watched` asks for those of any. Whoever goes through the steps
    may end a sequence between two of them. What the decoder knows of these requests is forgotten
    behind the last step, and where the steps are broken off; it may know others.

    # Errors
    As for `Decoder.step`.
    """
    try:
        while active := [sequence for sequence in batch if not sequence.done]:
            for group in by_regime(active):
                asked = any(map(watched, group))
                decoder.step(group, watched=asked)
                queries = decoder.queries if asked else None
                yield group, None if queries is None else queries.clone()
    finally:
        for sequence in batch:
            decoder.forget(sequence.request)
