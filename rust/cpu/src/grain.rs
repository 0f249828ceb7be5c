//! Which calls are too small to share between threads.

/// Work of a call that one thread does before another could help, some 110 µs. Handing tasks over
/// takes 15 to 40 µs where the other thread waits for them, over 100 µs where it has gone to sleep.
const SMALL: usize = 20_000;

/// Packed rows that take as long as loading the keys and values of a piece.
const LOADING: usize = 3;

/// What attending with so many packed rows to so many pieces takes: 5 to 6 ns a unit on one core.
pub(crate) fn work(pieces: usize, packed_rows: usize, head_dim: usize) -> usize {
    pieces * (LOADING + packed_rows) * head_dim
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

    /// Three query heads over 300 tokens, then over 6,000.
    #[test]
    fn small_work_stays_on_the_calling_thread() {
        let here = current().id();
        let on = |least: usize| {
            let tasks = [(); 100].par_iter().with_min_len(least);
            tasks.map(|()| current().id()).collect::<Vec<_>>()
        };
        assert!(on(least_tasks(100, work(5, 3, 64))).iter().all(|&thread| thread == here));
        assert!(on(least_tasks(100, work(94, 3, 64))).iter().all(|&thread| thread != here));
    }
}
