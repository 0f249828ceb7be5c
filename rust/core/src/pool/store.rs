//! The one lock.
//!
//! It protects the states of all blocks, the free lists of all groups and
//! the order of their victims, the slab
//! owners, and whatever index names the blocks: content can only be found while it is there, so
//! the two change together. There is no second lock, hence no lock order. It is taken once a bulk
//! call, never a block.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::blocks::Pool;

/// A pool and the index over its blocks, behind the one lock.
pub struct Store<I> {
    stored: Mutex<Stored<I>>,
}

/// What the lock protects.
pub struct Stored<I> {
    /// Block states.
    pub pool: Pool,
    /// What the blocks contain; `()` for a pool without an index.
    pub index: I,
}

impl<I> Store<I> {
    /// Puts a pool and its index behind the lock.
    #[must_use]
    pub fn new(pool: Pool, index: I) -> Store<I> {
        Store { stored: Mutex::new(Stored { pool, index }) }
    }

    /// Takes the lock.
    ///
    /// A panic elsewhere must not turn every later drop into an abort, so a poisoned lock is
    /// taken over; `check` says whether the books still balance.
    pub fn lock(&self) -> MutexGuard<'_, Stored<I>> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
