//! By whom native work of a thread is done that keeps out of the way of others.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::available_parallelism;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// What such threads are to others that want a processor too: nice, of 0 to 19. At 5 they have a
/// quarter of it beside one other, so that their work ends on a busy machine too.
#[cfg(target_os = "linux")]
const NICE: i32 = 5;

thread_local! {
    /// Who does the native work of this thread, unless that are the threads of all.
    static OWN: RefCell<Option<Arc<ThreadPool>>> = const { RefCell::new(None) };
}

/// Has native work of the calling thread be done by as many threads as half of the processors, at
/// low priority, from now on and for as long as it lives.
///
/// # Errors
/// Where the system has no more threads; nothing has changed then.
pub fn keep_half_free() -> Result<(), ThreadPoolBuildError> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(available_parallelism().map_or(1, usize::from).div_ceil(2))
        .thread_name(|at| format!("kvweave background {at}"))
        .start_handler(|_| lower_priority())
        .build()?;
    OWN.set(Some(Arc::new(pool)));
    Ok(())
}

/// Does some work where the calling thread has its native work done.
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
