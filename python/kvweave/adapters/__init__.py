"""kvweave inside other engines. Each adapter imports its engine only when that engine calls it."""
