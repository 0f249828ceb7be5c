//! An arena that stores, for each slot of each page, which token's KV of which head lies there and
//! at which position it was rotated. Executing a request's arrays on it shows what a reader would
//! see.

use std::collections::HashMap;
use std::ops::Range;

use kvweave_core::{GroupId, KvCache, Outcome, Request};

/// The token, position and (layer, KV head) whose KV a slot holds.
type Cell = (u32, i64, (u32, u32));

#[derive(Default)]
pub struct Arena {
    /// By page and slot.
    pub cells: HashMap<(i32, i32), Cell>,
}

/// All (layer, KV head) of a model, with the table and page that a request reads for each.
fn heads(cache: &KvCache, request: &Request) -> Vec<((u32, u32), usize, i32)> {
    let rows = |layer: u32| request.head_rows(layer).unwrap();
    let layers = 0..cache.config().shape.layers();
    let of_layer = |layer: u32| {
        let heads = (0..).zip(rows(layer));
        heads.map(move |(head, [table, rank, ..])| ((layer, head), table as usize, rank))
    };
    layers.flat_map(of_layer).collect()
}

impl Arena {
    fn copy_page(&mut self, [src, src_slot, dst, dst_slot, count, delta]: [i32; 6], strict: bool) {
        assert!(src > 0 && dst > 0 && count > 0, "a copy from or to the null block");
        for i in 0..count {
            let to = (dst, dst_slot + i);
            match self.cells.get(&(src, src_slot + i)) {
                Some(&(token, position, head)) => {
                    self.cells.insert(to, (token, position + i64::from(delta), head));
                }
                None => {
                    assert!(!strict, "a copy of a slot never written");
                    self.cells.remove(&to);
                }
            }
        }
    }

    /// Executes copies of whole blocks of a head group.
    fn copy(&mut self, cache: &KvCache, group: GroupId, copies: &[[i32; 6]]) {
        let pages = cache.groups().pages()[group.index()] as i32;
        for &[src, src_slot, dst, dst_slot, count, delta] in copies {
            for rank in 0..pages {
                let page = [src + rank, src_slot, dst + rank, dst_slot, count, delta];
                self.copy_page(page, true);
            }
        }
    }

    /// Executes all pending copies of a request, and those of single pages that bring a promoted
    /// head in, of which some hold nothing yet. Returns those of the first group.
    pub fn settle(
        &mut self,
        cache: &KvCache,
        request: &mut Request,
        promoted: &[[i32; 6]],
    ) -> Vec<[i32; 6]> {
        promoted.iter().for_each(|&copy| self.copy_page(copy, false));
        let mut first = Vec::new();
        for group in (0..cache.groups().len() as u8).map(GroupId).rev() {
            first = request.take_copies_of(group).unwrap();
            self.copy(cache, group, &first);
        }
        request.finish_copies();
        first
    }

    /// Writes the KV of some positions where `slots` says: of one table's heads, or of all.
    pub fn write(
        &mut self,
        cache: &KvCache,
        request: &Request,
        positions: &[i32],
        only: Option<usize>,
    ) {
        for (head, table, rank) in heads(cache, request) {
            if only.is_some_and(|only| only != table) {
                continue;
            }
            let slots = request.slots_of(table, positions).unwrap();
            for (&position, [block, slot]) in positions.iter().zip(slots) {
                if block == -1 {
                    let group = GroupId(table as u8);
                    assert!(cache.groups().window(group).is_some(), "a full group keeps all");
                    continue;
                }
                assert!(block > 0, "a write to the null block");
                let token = request.tokens()[position as usize];
                self.cells.insert((block + rank, slot), (token, i64::from(position), head));
            }
        }
    }

    /// What a freshly admitted request does before it is read: copies, then computed rows.
    pub fn prefill(&mut self, cache: &KvCache, request: &mut Request) {
        self.settle(cache, request, &[]);
        let rows = request.plan().rows();
        self.write(cache, request, &rows, None);
    }

    /// Of [0, rows.end) every head must read the request's own tokens at their positions: all of
    /// them, or in a window group at least those that rows from `rows.start` on see.
    pub fn verify(&self, cache: &KvCache, request: &Request, rows: Range<usize>) {
        let (row, stored) = (rows.start, rows.end);
        for (head, table, rank) in heads(cache, request) {
            let promoted = table >= cache.groups().len();
            let window = match promoted {
                true => None,
                false => cache.groups().window(GroupId(table as u8)),
            };
            let mut at = 0;
            for [block, begin, end, position, delta] in request.entries_of(table).unwrap() {
                if position as usize >= stored {
                    break;
                }
                let gap = at..position as usize;
                let seen = window.is_none_or(|window| window.sees(row, &gap));
                assert!(position as usize >= at, "entries overlap at {at}");
                assert!(gap.is_empty() || !seen, "{head:?}: a gap {gap:?} before {position}");
                at = position as usize;
                assert!(begin < end && end <= cache.config().shape.page_tokens() as i32);
                for slot in (begin..end).take(stored - at) {
                    let cell = self.cells.get(&(block + rank, slot));
                    let (token, position, of) = *cell.expect("an entry of a slot never written");
                    assert_eq!(of, head, "another head's page at {at}");
                    assert_eq!(token, request.tokens()[at], "foreign token at {at}");
                    let expected = at as i64 - i64::from(delta);
                    assert_eq!(position, expected, "wrong rotation at {at}");
                    at += 1;
                }
            }
            assert_eq!(at, stored, "{head:?}: entries do not cover the request");
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
