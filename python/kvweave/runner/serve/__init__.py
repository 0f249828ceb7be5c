"""A thread of its own that answers for others: callers in any thread, and event loops."""
