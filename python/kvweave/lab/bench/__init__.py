"""Speed, measured: `kvweave bench ops`, and what the repository's benchmarks share with it."""
