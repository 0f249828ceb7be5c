"""Decode: one token a step for a batch of requests, which join it and leave it as they like."""

from kvweave.runner.decode.decoder import Decoder
from kvweave.runner.decode.decoding import Decoding, by_regime
from kvweave.runner.decode.sampling import Sampling

__all__ = ["Decoder", "Decoding", "Sampling", "by_regime"]
