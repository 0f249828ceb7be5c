//! kvweave cuda.
