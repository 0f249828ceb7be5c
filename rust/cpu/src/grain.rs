//! Which calls are too small to share between threads.

use crate::row_block::ROWS;

/// Work of a call that one thread does before another could help: handing tasks to a thread and
/// waiting for it takes 15 to 40 µs, so below about 60 µs two threads are slower than one.
const SMALL: usize = 2048;

/// What attending with so many packed rows to so many pieces takes, loading the keys and values of
/// a piece counted as one block of rows: 20 to 30 ns a unit on one core.
pub(crate) fn work(pieces: usize, packed_rows: usize, head_dim: usize) -> usize {
    pieces * (1 + packed_rows.div_ceil(ROWS)) * head_dim
}

/// Fewest tasks that one thread takes: where the work is small all of them, so that rayon has
/// nothing to split and they run on the calling thread.
pub(crate) fn least_tasks(tasks: usize, work: usize) -> usize {
    if work < SMALL { tasks.max(1) } else { 1 }
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use rayon::prelude::*;

    use super::{least_tasks, work};

    /// One row over 300 tokens of one head, then over 3,000.
    #[test]
    fn small_work_stays_on_the_calling_thread() {
        let here = current().id();
        let on = |least: usize| {
            let tasks = [(); 100].par_iter().with_min_len(least);
            tasks.map(|()| current().id()).collect::<Vec<_>>()
        };
        assert!(on(least_tasks(100, work(5, 3, 64))).iter().all(|&thread| thread == here));
        assert!(on(least_tasks(100, work(47, 3, 64))).iter().all(|&thread| thread != here));
    }
}
