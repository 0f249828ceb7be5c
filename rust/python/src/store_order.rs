//! The core's cost-aware order, of a store's shards.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kvweave_core::pool::CostOrder;
use kvweave_store::{Resident, ShardName, Victims};

use crate::failure::Failure;

/// What goes first costs little for its bytes, and was used once. A shard that says nothing of its
/// cost is as cheap as any.
///
/// A store tells an order of its files and when each was used last, and only where room is wanted.
/// So what became of them since is found out then: whose time is another was used again, by
/// whatever process, and who is missing had to go. What a process has not seen was used once.
pub struct CostAware(Mutex<Known>);

struct Known {
    order: CostOrder,
    shards: HashMap<ShardName, Line>,
}

struct Line {
    number: u32,
    used: u64,
    /// Whether it is among those of this call.
    here: bool,
}

impl CostAware {
    pub fn new() -> Result<CostAware, Failure> {
        let known = Known { order: CostOrder::new()?, shards: HashMap::new() };
        Ok(CostAware(Mutex::new(known)))
    }
}

impl Victims for CostAware {
    fn order(&self, residents: &mut [Resident<'_>], _now: u64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        residents.sort_by(|a, b| (a.used, a.name).cmp(&(b.used, b.name)));
        known.follow(residents);
        let Known { order, shards } = &*known;
        residents.sort_by_cached_key(|resident| order.rank(shards[resident.name].number));
    }
}

impl Known {
    /// Brings the order up to date with residents, in the order of their use.
    fn follow(&mut self, residents: &[Resident<'_>]) {
        let Known { order, shards } = self;
        for resident in residents {
            if let Some(line) = shards.get_mut(resident.name) {
                line.here = true;
            }
        }
        shards.retain(|_, line| {
            if !line.here {
                order.note_gone(line.number);
            }
            std::mem::take(&mut line.here)
        });
        for resident in residents {
            let Resident { name, used, .. } = *resident;
            match shards.get_mut(name) {
                Some(line) if line.used == used => {}
                Some(line) => {
                    order.note_used(line.number);
                    line.used = used;
                }
                None => {
                    let number = order.enter(density(resident));
                    shards.insert(name.clone(), Line { number, used, here: false });
                }
            }
        }
    }
}

/// What a shard costs for each of its bytes, in FLOPs.
fn density(resident: &Resident<'_>) -> u32 {
    let cost = resident.header.cost.unwrap_or(0) / resident.bytes.max(1);
    u32::try_from(cost).unwrap_or(u32::MAX)
}
