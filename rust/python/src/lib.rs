//! kvweave python.
