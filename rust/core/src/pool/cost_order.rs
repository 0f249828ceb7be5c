//! The cost-aware order of things that lie elsewhere, as files do: their owner knows them by
//! numbers that the order gives out.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::cost_aware::CostAware;
use super::victims::{Advice, Victims};

const GROUP: GroupId = GroupId(0);
const FIRST: usize = 64;

/// Things in the order of [`Eviction::CostAware`](super::Eviction::CostAware), any number of them.
pub struct CostOrder {
    order: CostAware,
    /// How many numbers there are, and those that are nobody's.
    numbers: u32,
    free: Vec<u32>,
}

impl CostOrder {
    /// An order of nothing.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new() -> Result<CostOrder, Error> {
        let order = CostAware::new(FIRST, 1)?;
        Ok(CostOrder { order, numbers: FIRST as u32, free: (0..FIRST as u32).rev().collect() })
    }

    /// Something that is there from now on, and costs so much to have again: its number.
    pub fn enter(&mut self, cost: u32) -> u32 {
        self.enter_as(cost, false)
    }

    /// The same of something that was there before and had to go, which counts as a use.
    pub fn enter_again(&mut self, cost: u32) -> u32 {
        self.enter_as(cost, true)
    }

    fn enter_as(&mut self, cost: u32, again: bool) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            let first = self.numbers;
            self.numbers *= 2;
            self.order.grow(self.numbers as usize);
            self.free.extend((first + 1..self.numbers).rev());
            first
        });
        let block = BlockId::new(number);
        self.order.advise(GROUP, block, Advice { cost: cost.max(1), ..Advice::default() });
        if again {
            self.order.recall(block);
        }
        self.order.enter(GROUP, block);
        number
    }

    /// It was used again.
    pub fn note_used(&mut self, number: u32) {
        self.order.leave(GROUP, BlockId::new(number));
        self.order.enter(GROUP, BlockId::new(number));
    }

    /// It is gone, for others as a rule: its number is nobody's.
    pub fn note_gone(&mut self, number: u32) {
        self.order.give_up(GROUP, BlockId::new(number));
        self.withdraw(number);
    }

    /// It is gone, and not for others: that says nothing of what is there. Its number is nobody's.
    pub fn withdraw(&mut self, number: u32) {
        let block = BlockId::new(number);
        self.order.leave(GROUP, block);
        self.order.forget(block);
        self.free.push(number);
    }

    /// Where it stands, its worth and the turn in which it came there: of two things that with the
    /// smaller rank goes first.
    #[must_use]
    pub fn rank(&self, number: u32) -> (u64, u64) {
        let (_, worth, turn) = self.order.rank(BlockId::new(number));
        (worth, turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_order(order: &CostOrder, mut numbers: Vec<u32>) -> Vec<u32> {
        numbers.sort_by_key(|&number| order.rank(number));
        numbers
    }

    #[test]
    fn what_is_cheap_and_was_used_once_goes_first() {
        let mut order = CostOrder::new().unwrap();
        let [dear, cheap, read, late] = [9, 2, 2, 2].map(|cost| order.enter(cost));
        order.note_used(read);
        assert_eq!(in_order(&order, vec![dear, cheap, read, late]), [cheap, late, read, dear]);
        order.note_gone(cheap);
        // What comes later stands above what has gone.
        let next = order.enter(1);
        assert_eq!(next, cheap, "its number is given out again");
        assert_eq!(in_order(&order, vec![dear, next, read, late]), [late, next, read, dear]);
    }

    #[test]
    fn what_had_to_go_and_comes_again_was_used_twice() {
        let mut order = CostOrder::new().unwrap();
        let [once, again] = [order.enter(5), order.enter_again(5)];
        assert_eq!([order.rank(once).0, order.rank(again).0], [5, 10]);
    }

    #[test]
    fn what_is_withdrawn_lifts_nothing_that_comes_later() {
        let mut order = CostOrder::new().unwrap();
        let [withdrawn, given_up] = [order.enter(7), order.enter(3)];
        order.withdraw(withdrawn);
        let first = order.enter(1);
        order.note_gone(given_up);
        let second = order.enter(1);
        assert_eq!([order.rank(first).0, order.rank(second).0], [1, 4]);
        assert_eq!(first, withdrawn, "its number is given out again");
    }

    #[test]
    fn there_is_room_for_any_number() {
        let mut order = CostOrder::new().unwrap();
        let numbers: Vec<u32> = (0..1000).map(|i| order.enter(1 + i % 7)).collect();
        let mut distinct = numbers.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 1000);
        let found = in_order(&order, numbers.clone());
        let cost = |number: &u32| numbers.iter().position(|other| other == number).unwrap() % 7;
        assert!(found.is_sorted_by_key(cost));
        numbers.into_iter().for_each(|number| order.note_gone(number));
        assert_eq!(order.free.len(), order.numbers as usize);
    }
}
