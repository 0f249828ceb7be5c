//! The counts of a cache as a dict.

use kvweave_core::{CacheStats, GroupStats, MissReason};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Blocks of all groups together at the top, each group under "groups", each namespace that has a
/// quota under "quotas".
pub fn to_dict<'py>(py: Python<'py>, stats: &CacheStats) -> PyResult<Bound<'py, PyDict>> {
    let made = PyDict::new(py);
    for (name, of) in COUNTS {
        made.set_item(name, stats.groups.iter().map(of).sum::<usize>())?;
    }
    made.set_item("frozen", stats.frozen_blocks)?;
    made.set_item("frozen_absent", stats.frozen_absent)?;
    made.set_item("arena_pages", stats.arena_pages)?;
    made.set_item("namespaces", stats.namespaces)?;
    let quotas = PyDict::new(py);
    for quota in &stats.quotas {
        let of = PyDict::new(py);
        of.set_item("blocks", quota.blocks)?;
        of.set_item("frozen", quota.frozen)?;
        of.set_item("cached", quota.cached)?;
        quotas.set_item(&quota.namespace, of)?;
    }
    made.set_item("quotas", quotas)?;
    made.set_item("evictions", stats.evictions)?;
    let groups: PyResult<Vec<_>> = stats.groups.iter().map(|group| group_dict(py, group)).collect();
    made.set_item("groups", PyList::new(py, groups?)?)?;
    let counters = &stats.counters;
    made.set_item("requests", counters.requests)?;
    made.set_item("tokens", counters.tokens)?;
    made.set_item("prefix_hits", counters.prefix_hits)?;
    made.set_item("request_hits", counters.request_hits)?;
    made.set_item("frozen_hits", counters.frozen_hits)?;
    let misses = PyDict::new(py);
    for (reason, count) in MissReason::ALL.iter().zip(counters.misses) {
        misses.set_item(reason.name(), count)?;
    }
    made.set_item("misses", misses)?;
    Ok(made)
}

type Count = (&'static str, fn(&GroupStats) -> usize);

const COUNTS: [Count; 5] = [
    ("total", |group| group.total),
    ("free", |group| group.free),
    ("held", |group| group.held),
    ("cached", |group| group.cached),
    ("claimable", |group| group.claimable),
];

fn group_dict<'py>(py: Python<'py>, group: &GroupStats) -> PyResult<Bound<'py, PyDict>> {
    let made = PyDict::new(py);
    made.set_item("block_pages", group.block_pages)?;
    for (name, of) in COUNTS {
        made.set_item(name, of(group))?;
    }
    Ok(made)
}
