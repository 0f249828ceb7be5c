//! kvweave core.
