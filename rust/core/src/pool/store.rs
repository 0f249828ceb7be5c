//! The one lock.
//!
//! It protects the states of all blocks, the free lists of all groups and the order of their
//! victims, the slab owners, and whatever index names the blocks: content can only be found while
//! it is there, so the two change together. There is no second lock, hence no lock order. It is
//! taken once a bulk call, never a block. Look-ups, which change nothing, share it.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::blocks::Pool;

/// A pool and the index over its blocks, behind the one lock.
pub struct Store<I> {
    stored: RwLock<Stored<I>>,
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
        Store { stored: RwLock::new(Stored { pool, index }) }
    }

    /// Takes the lock, alone.
    ///
    /// A panic elsewhere must not turn every later drop into an abort, so a poisoned lock is
    /// taken over; `check` says whether the books still balance.
    pub fn lock(&self) -> RwLockWriteGuard<'_, Stored<I>> {
        self.stored.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock beside others that only read.
    pub fn read(&self) -> RwLockReadGuard<'_, Stored<I>> {
        self.stored.read().unwrap_or_else(PoisonError::into_inner)
    }
}
