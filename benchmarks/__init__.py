"""Speed, measured: `python -m benchmarks.run CASE`. Records live beside, by machine and date."""
