//! kvweave cpu.
