"""A mixed load on a served `Runner` for a long time, and what any soak is held to."""
