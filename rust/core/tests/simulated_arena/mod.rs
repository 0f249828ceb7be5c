//! An arena that stores, for each slot, which token's KV lies there and at which position it was
//! rotated. Executing a request's arrays on it shows what a reader would see.

use std::collections::HashMap;

use kvweave_core::{GroupId, KvCache, Outcome, Request};

/// The token and position whose KV a slot holds.
type Cell = (u32, i64);

#[derive(Default)]
pub struct Arena {
    cells: HashMap<(usize, i32, i32), Cell>,
}

impl Arena {
    fn groups(cache: &KvCache) -> impl Iterator<Item = GroupId> + use<> {
        (0..cache.groups().len() as u8).map(GroupId)
    }

    pub fn copy(&mut self, group: GroupId, copies: &[[i32; 6]]) {
        for &[src, src_slot, dst, dst_slot, count, delta] in copies {
            assert!(src > 0 && dst > 0 && count > 0, "a copy from or to the null block");
            for i in 0..count {
                let cell = self.cells.get(&(group.index(), src, src_slot + i));
                let (token, position) = *cell.expect("a copy of a slot never written");
                let to = (group.index(), dst, dst_slot + i);
                self.cells.insert(to, (token, position + i64::from(delta)));
            }
        }
    }

    /// Executes all pending copies of a request.
    pub fn settle(&mut self, cache: &KvCache, request: &mut Request) {
        for group in Arena::groups(cache) {
            let copies = request.take_copies_of(group).unwrap();
            self.copy(group, &copies);
        }
        request.finish_copies();
    }

    /// Writes the KV of some positions where `slots` says.
    pub fn write(&mut self, cache: &KvCache, request: &Request, positions: &[i32]) {
        for group in Arena::groups(cache) {
            let slots = request.slots_of(group.index(), positions).unwrap();
            for (&position, [block, slot]) in positions.iter().zip(slots) {
                if block == -1 {
                    assert!(cache.groups().window(group).is_some(), "a full group keeps all");
                    continue;
                }
                assert!(block > 0, "a write to the null block");
                let token = request.tokens()[position as usize];
                self.cells.insert((group.index(), block, slot), (token, i64::from(position)));
            }
        }
    }

    /// What a freshly admitted request does before it is read: copies, then computed rows.
    pub fn prefill(&mut self, cache: &KvCache, request: &mut Request) {
        self.settle(cache, request);
        let rows = request.plan().rows();
        self.write(cache, request, &rows);
    }

    /// Reading the entries must give the request's tokens at their positions: all of them, or in a
    /// window group at least those that the next row sees.
    pub fn verify(&self, cache: &KvCache, request: &Request) {
        for group in Arena::groups(cache) {
            let window = cache.groups().window(group);
            let mut at = 0;
            for [block, begin, end, position, delta] in request.entries_of(group.index()).unwrap() {
                let gap = at as usize..position as usize;
                let seen = window.is_none_or(|window| window.sees(request.len(), &gap));
                assert!(position >= at && (gap.is_empty() || !seen), "entries have a gap at {at}");
                at = position;
                assert!(begin < end && end <= cache.config().shape.page_tokens() as i32);
                for slot in begin..end {
                    let cell = self.cells.get(&(group.index(), block, slot));
                    let (token, stored) = *cell.expect("an entry of a slot never written");
                    assert_eq!(token, request.tokens()[at as usize], "foreign token at {at}");
                    assert_eq!(stored, i64::from(at - delta), "wrong rotation at {at}");
                    at += 1;
                }
            }
            assert_eq!(at as usize, request.len(), "entries do not cover the request");
        }
    }
}

/// Law 2: the spans partition [0, T), in order, and the last token is recomputed.
pub fn assert_partition(request: &Request, tokens: usize) {
    let plan = request.plan();
    assert_eq!(plan.tokens, tokens);
    let mut at = 0;
    for span in &plan.spans {
        assert_eq!(span.start, at);
        assert!(span.end > span.start);
        at = span.end;
    }
    assert_eq!(at, tokens);
    let sum = plan.prefix_tokens() + plan.segment_tokens() + plan.recomputed_tokens();
    assert_eq!(sum, tokens);
    let last = plan.spans.last().unwrap();
    assert!(matches!(last.outcome, Outcome::Recompute { .. }));
}
