//! The order that a pool was made with.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::cost_aware::CostAware;
use super::lru::Lru;
use super::victims::{Advice, Eviction, Victims};

/// One of the orders. A match and no table of functions: every block that is let go of passes here.
pub(super) enum Order {
    Lru(Lru),
    CostAware(CostAware),
}

impl Order {
    pub(super) fn new(eviction: Eviction, blocks: usize, groups: usize) -> Result<Order, Error> {
        Ok(match eviction {
            Eviction::Lru => Order::Lru(Lru::new(blocks, groups)?),
            Eviction::CostAware => Order::CostAware(CostAware::new(blocks, groups)?),
        })
    }
}

impl Victims for Order {
    #[inline]
    fn enter(&mut self, group: GroupId, block: BlockId) {
        match self {
            Order::Lru(order) => order.enter(group, block),
            Order::CostAware(order) => order.enter(group, block),
        }
    }

    #[inline]
    fn leave(&mut self, group: GroupId, block: BlockId) {
        match self {
            Order::Lru(order) => order.leave(group, block),
            Order::CostAware(order) => order.leave(group, block),
        }
    }

    fn give_up(&mut self, group: GroupId, block: BlockId) {
        match self {
            Order::Lru(order) => order.give_up(group, block),
            Order::CostAware(order) => order.give_up(group, block),
        }
    }

    #[inline]
    fn forget(&mut self, block: BlockId) {
        match self {
            Order::Lru(order) => order.forget(block),
            Order::CostAware(order) => order.forget(block),
        }
    }

    fn next(&self, group: GroupId) -> Option<BlockId> {
        match self {
            Order::Lru(order) => order.next(group),
            Order::CostAware(order) => order.next(group),
        }
    }

    fn advise(&mut self, group: GroupId, block: BlockId, advice: Advice) {
        match self {
            Order::Lru(order) => order.advise(group, block, advice),
            Order::CostAware(order) => order.advise(group, block, advice),
        }
    }

    fn set_time(&mut self, now: u64) {
        match self {
            Order::Lru(order) => order.set_time(now),
            Order::CostAware(order) => order.set_time(now),
        }
    }

    fn in_order(&self, group: GroupId) -> Vec<BlockId> {
        match self {
            Order::Lru(order) => order.in_order(group),
            Order::CostAware(order) => order.in_order(group),
        }
    }
}
