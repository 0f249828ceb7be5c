"""One case a file. A case checks its answers first, then measures, and returns rows."""
