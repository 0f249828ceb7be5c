//! Unmarked segments: a search for cached text at any token offset.
//!
//! Simple version: for every window of P tokens, ask whether a block has this content. Made fast
//! by a rolling hash (one multiply-add a token, one probe), made certain by comparing tokens (of
//! several blocks the one whose text agrees longest with the prompt before it is taken), and made
//! complete by extension: left into the tail of the block before, right through the blocks
//! after, the incomplete last one included.

use std::ops::Range;

use crate::ids::ScopeId;

use super::ids::ContentId;
use super::index::Index;
use super::matching::Piece;
use super::nodes::{common_head, common_tail};

impl Index {
    /// Appends the pieces of `range` that are cached in a namespace: left to right, each match as
    /// long as it goes, none overlapping.
    pub(crate) fn discover(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        range: Range<usize>,
        out: &mut Vec<Piece>,
    ) {
        let page = self.nodes.page_tokens();
        let (mut cursor, end) = (range.start, range.end);
        let domain = self.scopes.get(scope).content;
        while cursor + page <= end {
            let mut at = cursor;
            let mut sum = self.hasher.roll(&tokens[at..at + page]);
            let hit = loop {
                let window = &tokens[at..at + page];
                let roll = self.hasher.roll_key(sum, domain);
                let first = self.rolling.find(roll, |block| self.is_content(block, scope, window));
                let hit = first.and_then(|first| self.nearest(scope, first, &tokens[..at], None));
                if hit.is_some() || at + page == end {
                    break hit;
                }
                sum = self.hasher.slide(sum, tokens[at], tokens[at + page]);
                at += 1;
            };
            let Some(block) = hit else { return };
            self.extend_left(scope, tokens, cursor..at, block, out);
            out.push(self.piece(block, 0, at, page));
            cursor = self.extend_right(scope, tokens, at + page..end, block, page, out);
        }
    }

    /// Pieces that end at `range.end`, where `block` begins, down to `range.start`.
    pub(super) fn extend_left(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        range: Range<usize>,
        block: ContentId,
        out: &mut Vec<Piece>,
    ) -> usize {
        let first = out.len();
        let (mut end, mut block) = (range.end, block);
        while end > range.start {
            let before = self.neighbour(self.nodes.links(block).before, Some(scope));
            let Some(before) = before.filter(|&before| self.is_whole(before)) else { break };
            let stored = self.nodes.tokens(before);
            if stored.len() < self.nodes.page_tokens() {
                break;
            }
            let common = common_tail(stored, &tokens[range.start..end]);
            if common > 0 {
                out.push(self.piece(before, stored.len() - common, end - common, common));
                end -= common;
            }
            if common < stored.len() {
                break;
            }
            block = before;
        }
        out[first..].reverse();
        end
    }

    /// Pieces from `range.start`, where the donor stands at `slot` of `block`, up to `range.end`.
    /// Returns where they end.
    pub(super) fn extend_right(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        range: Range<usize>,
        block: ContentId,
        slot: usize,
        out: &mut Vec<Piece>,
    ) -> usize {
        let (mut at, mut block, mut slot) = (range.start, block, slot);
        while at < range.end {
            let stored = self.nodes.tokens(block);
            let common = common_head(&stored[slot..], &tokens[at..range.end]);
            if common > 0 {
                out.push(self.piece(block, slot, at, common));
                at += common;
            }
            if slot + common < self.nodes.page_tokens() {
                break;
            }
            let after = self.neighbour(self.nodes.links(block).after, Some(scope));
            let Some(after) = after.filter(|&after| self.is_whole(after)) else { break };
            (block, slot) = (after, 0);
        }
        at
    }

    pub(super) fn piece(&self, donor: ContentId, slot: usize, start: usize, len: usize) -> Piece {
        let node = self.nodes.get(donor);
        let cached = i64::from(node.position) + slot as i64;
        Piece {
            start,
            end: start + len,
            donor,
            begin: slot as u32,
            delta: (start as i64 - cached) as i32,
            exact: node.exact,
            own: false,
        }
    }
}
