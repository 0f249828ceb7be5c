//! `KvCache`: admits requests, learns what they computed, keeps knowledge bases.
//!
//! The one place that changes pool and index together, always under the store's lock.

mod admission;
mod admit;
mod advance;
mod advise;
mod append_step;
mod books;
mod commit;
mod config;
mod copy_on_write;
mod cut;
mod decode_rows;
mod entry_lane;
mod entry_room;
mod forget;
mod found;
mod freeze;
mod frozen_room;
mod holding;
mod ledger;
mod promote;
mod quotas;
mod request;
mod retract;
mod room;
mod spill;
mod stats;
mod truncate;

use std::sync::Arc;

pub use admission::{Admission, MarkedSegment, Mode, Reuse};
pub use append_step::StepRefused;
pub use config::CacheConfig;
pub use decode_rows::{DecodeRows, StepHead, StepRows};
pub use entry_lane::EntryMoves;
pub use request::Request;
pub use room::CacheRoom;
pub use stats::{CacheStats, Counters, GroupStats, Quota};

use crate::content::hash::seed_of;
use crate::content::{BlockHasher, Digest, FrozenSegment, Index, Matches};
use crate::error::{Error, ErrorKind};
use crate::heads::HeadGroups;
use crate::pool::{Pool, Store};

use books::{Common, State};
use config::block_groups;

/// An order that makes use of it is told which prefixes had to go while so many times what there is
/// room for has gone; once is enough to say it in a plan.
const RECALLED: usize = 8;

/// A cache of KV blocks over one arena. Clones are handles of the same cache.
#[derive(Clone)]
pub struct KvCache(Arc<Common>);

impl KvCache {
    /// Builds a cache; the arena itself belongs to the caller.
    ///
    /// # Errors
    /// `InvalidArgument` for an arena too small or percentages above 100, `CorruptHeadMap` for a
    /// head map that does not fit the shape, `OutOfMemory` where the books find no room.
    pub fn new(config: CacheConfig) -> Result<KvCache, Error> {
        let groups = config.validated_groups()?;
        let windows = groups.windows();
        let pool = Pool::of_ordered_groups(
            config.arena_pages,
            config.slab_pages,
            &block_groups(groups.pages(), &windows),
            config.eviction,
        )?;
        let shape = &config.shape;
        let seed = seed_of(&[
            shape.layers(),
            shape.kv_heads(),
            shape.head_dim(),
            shape.page_tokens(),
            shape.dtype() as u32,
        ]);
        let page_tokens = shape.page_tokens() as usize;
        let hasher = BlockHasher::new(config.hash, seed, page_tokens);
        let model = config.heads.as_ref().map_or("", |map| map.model_fingerprint.as_str());
        let generations = if config.eviction.recalls() { RECALLED } else { 1 };
        let blocks = pool.capacity();
        let index = Index::new(hasher, model, blocks, page_tokens, windows.clone(), generations)?;
        let store = Arc::new(Store::new(pool, index));
        let counters = stats::Tally::default();
        Ok(KvCache(Arc::new(Common { config, groups, windows, store, counters })))
    }

    /// What the cache was built from.
    #[must_use]
    pub fn config(&self) -> &CacheConfig {
        &self.0.config
    }

    /// The head groups and the rank of each head.
    #[must_use]
    pub fn groups(&self) -> &HeadGroups {
        &self.0.groups
    }

    /// Plans a prompt, holds what it reuses and allocates the rest: all or nothing.
    ///
    /// # Errors
    /// `InvalidArgument`, `OutOfRange` or `NamespaceConflict` for a malformed admission,
    /// `PoolFull` if there is no room. Nothing has changed then.
    pub fn admit(&self, admission: &Admission<'_>) -> Result<Request, Error> {
        admit::admit(&self.0, admission)
    }

    /// Appends one generated token to each request and makes room for its KV, as
    /// [`Request::append`] would one by one: all or nothing over the whole batch. Copies that this
    /// asks for are to be taken and executed before anything is written.
    ///
    /// # Errors
    /// `PoolFull` because of the first request for which, after those before it, there is no room,
    /// whatever window groups of the whole batch let go of;
    /// `InvalidArgument` for a request of another cache, one with 2^31 − 1 tokens or with copies
    /// that were not taken, or another number of tokens than of requests. No request has changed
    /// then, so that the same step may be tried again.
    pub fn append_step(
        &self,
        requests: &mut [&mut Request],
        tokens: &[u32],
    ) -> Result<(), StepRefused> {
        append_step::append_step(&self.0, requests, tokens)
    }

    /// What decode steps of requests of this cache are to know of them; no rows yet.
    #[must_use]
    pub fn decode_rows(&self) -> DecodeRows {
        DecodeRows::of(&self.0)
    }

    /// Tokens of the longest exact prefix cached in a namespace, for RoPE regime 0.
    #[must_use]
    pub fn lookup_prefix(&self, tokens: &[u32], namespace: &str) -> usize {
        self.lookup_prefix_in(tokens, namespace, 0)
    }

    /// Tokens of the longest exact prefix cached in a namespace and RoPE regime.
    #[must_use]
    pub fn lookup_prefix_in(&self, tokens: &[u32], namespace: &str, regime: u64) -> usize {
        let mut blocks = Vec::with_capacity(tokens.len() / self.0.page_tokens());
        let stored = self.0.store.read();
        let Some(scope) = stored.index.scope(namespace, regime) else { return 0 };
        let found = stored.index.match_prefix(scope, tokens, &mut blocks);
        blocks.len() * self.0.page_tokens() + found.partial.map_or(0, |(_, tokens)| tokens)
    }

    /// Tokens of a segment that are cached, whatever stood before it. Nothing is held or counted.
    #[must_use]
    pub fn lookup_segment(&self, tokens: &[u32], namespace: &str, regime: u64) -> usize {
        if tokens.is_empty() {
            return 0;
        }
        let stored = self.0.store.read();
        let Some(scope) = stored.index.scope(namespace, regime) else { return 0 };
        let (whole, mut found) = (0..tokens.len(), Matches::default());
        stored.index.match_marked(scope, tokens, whole.clone(), &whole, &mut found);
        found.pieces.iter().map(|piece| piece.end - piece.start).sum()
    }

    /// The chained digests of a prompt's whole blocks, for [`Self::lookup_digests`]. Empty for a
    /// namespace that was never used: nothing can be cached there.
    #[must_use]
    pub fn prefix_digests(&self, tokens: &[u32], namespace: &str, regime: u64) -> Vec<Digest> {
        let stored = self.0.store.read();
        let Some(scope) = stored.index.scope(namespace, regime) else { return Vec::new() };
        stored.index.digests(stored.index.root(scope), tokens)
    }

    /// Whole blocks of the longest cached prefix of a prompt that was hashed before.
    #[must_use]
    pub fn lookup_digests(
        &self,
        digests: &[Digest],
        tokens: &[u32],
        namespace: &str,
        regime: u64,
    ) -> usize {
        let stored = self.0.store.read();
        let Some(scope) = stored.index.scope(namespace, regime) else { return 0 };
        stored.index.match_digests(scope, digests, tokens)
    }

    /// Knowledge-base entries of one namespace, or of all.
    #[must_use]
    pub fn frozen(&self, namespace: Option<&str>) -> Vec<FrozenSegment> {
        let stored = self.0.store.read();
        stored.index.frozen.list(namespace, |block| stored.index.uses(block))
    }

    /// One knowledge-base entry. What that costs does not grow with the others.
    ///
    /// # Errors
    /// `UnknownSegment` if the namespace has no entry of this name.
    pub fn frozen_segment(&self, name: &str, namespace: &str) -> Result<FrozenSegment, Error> {
        let stored = self.0.store.read();
        let found = stored.index.frozen.find(namespace, name, |block| stored.index.uses(block));
        found.ok_or_else(|| unknown_segment(name, namespace))
    }

    /// Deletes a knowledge-base entry. Blocks that it alone owned are no longer found as segments
    /// of other texts; as prefixes, and for the same text, they stay cached until they are evicted.
    ///
    /// # Errors
    /// `UnknownSegment` if the namespace has no entry of this name.
    pub fn delete_frozen(&self, name: &str, namespace: &str) -> Result<(), Error> {
        let mut stored = self.0.store.lock();
        let stored = &mut *stored;
        let Some(removed) = stored.index.frozen.remove(namespace, name) else {
            return Err(unknown_segment(name, namespace));
        };
        freeze::forget(stored, removed);
        Ok(())
    }

    /// Says what time it is, in the unit of [`Advice::until`](crate::pool::Advice); it never goes
    /// back. Without it no cached block is past its time.
    pub fn set_time(&self, now: u64) {
        self.0.store.lock().pool.set_time(now);
    }

    /// Shrinks the frozen pool above the watermark, lets it grow back below.
    pub fn rebalance(&self) {
        let mut stored = self.0.store.lock();
        freeze::shrink(&self.0, &mut stored, 0);
        freeze::regrow(&self.0, &mut stored);
    }

    /// Blocks by state, frozen blocks, hits and misses.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let counters = self.0.counters.get();
        stats::collect(&self.0.store.read(), self.0.groups.len(), counters)
    }

    /// Law 1 and the agreement of all indexes.
    ///
    /// # Errors
    /// `Inconsistent` naming what does not agree: a defect of this crate.
    pub fn check(&self) -> Result<(), Error> {
        let stored = self.0.store.lock();
        stored.pool.check()?;
        stored.index.check()?;
        check_withheld(&stored)?;
        freeze::check(&stored)
    }
}

/// What is kept from others is somebody's.
fn check_withheld(state: &State) -> Result<(), Error> {
    match state.index.withheld().find(|&block| state.pool.references(block) == 0) {
        Some(block) => Err(Error::inconsistent("withheld block", "a held one", block.index())),
        None => Ok(()),
    }
}

fn unknown_segment(name: &str, namespace: &str) -> Error {
    let expected = format!("a frozen segment of namespace {namespace:?}");
    Error::new(ErrorKind::UnknownSegment, "segment", expected, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheConfig, KvDtype, KvShape};

    #[test]
    fn look_ups_do_not_wait_for_each_other() {
        let shape = KvShape::new(1, 1, 8, 4, KvDtype::F32).unwrap();
        let cache = KvCache::new(CacheConfig::new(shape, 0).sized_for(8).unwrap()).unwrap();
        // Whoever reads while this is held has shared the lock.
        let reading = cache.0.store.read();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                assert_eq!(cache.lookup_prefix(&[1; 8], ""), 0);
                assert_eq!(cache.lookup_segment(&[1; 8], "", 0), 0);
                assert_eq!(cache.lookup_digests(&[], &[1; 8], "", 0), 0);
                assert!(cache.prefix_digests(&[1; 8], "", 0).is_empty());
                assert!(cache.frozen(None).is_empty());
                assert_eq!(cache.stats().frozen_blocks, 0);
                assert!(cache.available_pages() > 0);
            });
        });
        drop(reading);
    }
}
