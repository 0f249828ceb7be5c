//! The order that a pool was made with, and what goes before it: blocks beyond a quota.

use crate::error::Error;
use crate::ids::{AccountId, BlockId, GroupId};

use super::cost_aware::CostAware;
use super::lfu::Lfu;
use super::lru::Lru;
use super::quotas::Quotas;
use super::s3_fifo::S3Fifo;
use super::victims::{Advice, Eviction, Rank, Victims};

/// One of the orders. A match and no table of functions: every block that is let go of passes here.
enum Ranking {
    Lru(Lru),
    CostAware(CostAware),
    S3Fifo(S3Fifo),
    Lfu(Lfu),
}

/// Says something to the order that there is.
macro_rules! tell {
    ($ranking:expr, $order:ident => $say:expr) => {
        match $ranking {
            Ranking::Lru($order) => $say,
            Ranking::CostAware($order) => $say,
            Ranking::S3Fifo($order) => $say,
            Ranking::Lfu($order) => $say,
        }
    };
}

/// Which cached block of each group goes next: what is past its time, then what is beyond a quota,
/// then what the pool's order says.
pub(super) struct Order {
    ranking: Ranking,
    blocks: usize,
    groups: usize,
    /// None while nobody has a quota: most pools never need the room.
    quotas: Option<Box<Quotas>>,
}

impl Order {
    pub(super) fn new(eviction: Eviction, blocks: usize, groups: usize) -> Result<Order, Error> {
        let ranking = match eviction {
            Eviction::Lru => Ranking::Lru(Lru::new(blocks, groups)?),
            Eviction::CostAware => Ranking::CostAware(CostAware::new(blocks, groups)?),
            Eviction::S3Fifo => Ranking::S3Fifo(S3Fifo::new(blocks, groups)?),
            Eviction::Lfu => Ranking::Lfu(Lfu::new(blocks, groups)?),
        };
        Ok(Order { ranking, blocks, groups, quotas: None })
    }

    #[inline]
    pub(super) fn enter(&mut self, group: GroupId, block: BlockId) {
        let rank = tell!(&mut self.ranking, order => order.enter(group, block));
        if let Some(quotas) = &mut self.quotas {
            quotas.enter(group, block, rank);
        }
    }

    /// The same of a row of blocks, of which the last enters first.
    pub(super) fn enter_row(&mut self, group: GroupId, row: &[BlockId]) {
        if self.quotas.is_some() {
            row.iter().rev().for_each(|&block| self.enter(group, block));
        } else {
            tell!(&mut self.ranking, order => order.enter_row(group, row));
        }
    }

    /// The blocks of a row are cached no longer.
    pub(super) fn leave_row(&mut self, group: GroupId, row: &[BlockId]) {
        tell!(&mut self.ranking, order => order.leave_row(group, row));
        if let Some(quotas) = &mut self.quotas {
            for &block in row {
                quotas.leave(group, block);
            }
        }
    }

    pub(super) fn give_up(&mut self, group: GroupId, block: BlockId) {
        // The rank of what is beyond a quota says nothing of others' blocks.
        if self.quotas.as_ref().is_some_and(|quotas| quotas.next(group) == Some(block)) {
            return;
        }
        tell!(&mut self.ranking, order => order.give_up(group, block))
    }

    /// A cached block is cached no longer, and what was known of it is void.
    #[inline]
    pub(super) fn leave_and_forget(&mut self, group: GroupId, block: BlockId) {
        tell!(&mut self.ranking, order => {
            order.leave(group, block);
            order.forget(block);
        });
        if let Some(quotas) = &mut self.quotas {
            quotas.leave(group, block);
            quotas.forget(block);
        }
    }

    #[inline]
    pub(super) fn forget(&mut self, block: BlockId) {
        tell!(&mut self.ranking, order => order.forget(block));
        if let Some(quotas) = &mut self.quotas {
            quotas.forget(block);
        }
    }

    pub(super) fn recall(&mut self, block: BlockId) {
        tell!(&mut self.ranking, order => order.recall(block))
    }

    pub(super) fn next(&self, group: GroupId) -> Option<BlockId> {
        let (past, next) = tell!(&self.ranking, order => (order.past(group), order.next(group)));
        let beyond = || self.quotas.as_ref().and_then(|quotas| quotas.next(group));
        past.or_else(beyond).or(next)
    }

    pub(super) fn advise(&mut self, group: GroupId, block: BlockId, advice: Advice) {
        let rank = tell!(&mut self.ranking, order => order.advise(group, block, advice));
        if let (Some(quotas), Some(rank)) = (&mut self.quotas, rank) {
            quotas.leave(group, block);
            quotas.enter(group, block, rank);
        }
    }

    pub(super) fn set_time(&mut self, now: u64) {
        let moved = tell!(&mut self.ranking, order => order.set_time(now));
        if let Some(quotas) = &mut self.quotas {
            for (group, block, rank) in moved {
                quotas.leave(group, block);
                quotas.enter(group, block, rank);
            }
        }
    }

    /// The cached blocks of a group in the pool's order, whatever the quotas are.
    pub(super) fn in_order(&self, group: GroupId) -> Vec<(Rank, BlockId)> {
        tell!(&self.ranking, order => order.in_order(group))
    }

    /// Makes room for an account of which `allowed` blocks of each group may be cached.
    ///
    /// # Errors
    /// `OutOfMemory` where the books of the first account find no room.
    pub(super) fn open(&mut self, account: AccountId, allowed: usize) -> Result<(), Error> {
        if self.quotas.is_none() {
            let mut quotas = Quotas::new(self.blocks, self.groups)?;
            for group in (0..self.groups).map(|group| GroupId(group as u8)) {
                let cached = self.in_order(group);
                cached.into_iter().for_each(|(rank, block)| quotas.enter(group, block, rank));
            }
            self.quotas = Some(Box::new(quotas));
        }
        if let Some(quotas) = &mut self.quotas {
            quotas.open(account, allowed);
        }
        Ok(())
    }

    /// The quotas, where there are any.
    pub(super) fn quotas(&self) -> Option<&Quotas> {
        self.quotas.as_deref()
    }

    /// The quotas, where there are any.
    pub(super) fn quotas_mut(&mut self) -> Option<&mut Quotas> {
        self.quotas.as_deref_mut()
    }
}
