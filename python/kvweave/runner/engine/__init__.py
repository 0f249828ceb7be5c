"""Many requests on one runner: what each step computes for all, and what becomes of each."""
