//! kvweave reference.
