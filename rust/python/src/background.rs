//! Threads whose native work is to keep out of the way of others.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::available_parallelism;

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::arguments::raised;
use crate::failure::Failure;

/// How much less of a processor such a thread gets than one that wants it too: nice, 0 to 19.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

thread_local! {
    /// Who does the native work of this thread, unless that are the threads of all.
    static OWN: RefCell<Option<Arc<ThreadPool>>> = const { RefCell::new(None) };
}

/// Has native calls of this thread be worked on by half of the processors, at low priority, from
/// now on and for as long as it lives: other threads find the other half free.
#[pyfunction]
pub fn stand_back(py: Python<'_>) -> PyResult<()> {
    let half = available_parallelism().map_or(1, usize::from).div_ceil(2);
    let made = py.detach(|| {
        ThreadPoolBuilder::new()
            .num_threads(half)
            .thread_name(|at| format!("kvweave background {at}"))
            .start_handler(|_| lower_priority())
            .build()
    });
    let pool = raised(py, made.map_err(|error| Failure::invalid("threads", half, error)))?;
    OWN.set(Some(Arc::new(pool)));
    Ok(())
}

/// Does some work where this thread has its native work done.
pub fn in_place<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match OWN.with_borrow(Clone::clone) {
        Some(pool) => pool.install(work),
        None => work(),
    }
}

/// Of the calling thread alone, which on Linux is what a priority belongs to. A system that does
/// not allow it leaves the priority as it is.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, NICE);
}
