//! Marked segments: which parts of a marked range are cached, and why the others are not.
//!
//! The range is first looked up block by block from its own start, as a segment that was cached
//! alone lies. Its incomplete tail is a virtual block of its own. What this leaves over is looked
//! for by content, since a donor may have lain on another grid; the head of a misaligned donor is
//! recovered from the block before.

use std::ops::Range;

use super::miss::MissReason;
use crate::ids::{BlockId, KeyId};

use super::index::Index;

/// A run of prompt tokens whose KV lies in one donor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First prompt position.
    pub(crate) start: usize,
    /// One past the last.
    pub(crate) end: usize,
    /// The donor's node.
    pub(crate) donor: BlockId,
    /// The donor slot of `start`.
    pub(crate) begin: u32,
    /// Prompt position − position at which the donor's K was rotated.
    pub(crate) delta: i32,
    /// Whether the donor computed it exactly in its own context.
    pub(crate) exact: bool,
}

impl Piece {
    /// The part inside a range; none if they do not meet.
    pub(crate) fn clip(self, range: &Range<usize>) -> Option<Piece> {
        let (start, end) = (self.start.max(range.start), self.end.min(range.end));
        let begin = self.begin + (start.saturating_sub(self.start)) as u32;
        (start < end).then_some(Piece { start, end, begin, ..self })
    }
}

/// What was found and what was not: sorted, together a partition of the ranges looked at.
#[derive(Default)]
pub(crate) struct Matches {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) misses: Vec<(Range<usize>, MissReason)>,
}

impl Index {
    /// Looks a marked range up and appends what lies inside `clip`.
    pub(crate) fn match_marked(
        &self,
        key: KeyId,
        tokens: &[u32],
        mark: Range<usize>,
        clip: &Range<usize>,
        matches: &mut Matches,
    ) {
        let mut collided = false;
        let aligned = self.match_aligned(key, tokens, &mark, &mut collided);
        let mut found = Vec::with_capacity(aligned.len());
        let mut at = mark.start;
        for piece in &aligned {
            self.fill_gap(key, tokens, at..piece.start, Some(piece.donor), &mut found);
            found.push(*piece);
            at = piece.end;
        }
        self.fill_gap(key, tokens, at..mark.end, None, &mut found);

        let mut at = mark.start.max(clip.start);
        let end = mark.end.min(clip.end);
        for piece in found.iter().filter_map(|piece| piece.clip(clip)) {
            if at < piece.start {
                let reason = reason_of(at..piece.start, &mark, collided, self.nodes.page_tokens());
                matches.misses.push((at..piece.start, reason));
            }
            at = piece.end;
            matches.pieces.push(piece);
        }
        if at < end {
            let reason = reason_of(at..end, &mark, collided, self.nodes.page_tokens());
            matches.misses.push((at..end, reason));
        }
    }

    /// Blocks at start + iP, and the incomplete tail.
    fn match_aligned(
        &self,
        key: KeyId,
        tokens: &[u32],
        mark: &Range<usize>,
        collided: &mut bool,
    ) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = mark.start;
        for content in tokens[mark.clone()].chunks(self.nodes.page_tokens()) {
            match self.find_whole(key, content) {
                Some(block) => pieces.push(self.piece(block, 0, at, content.len())),
                None => *collided |= self.content_collides(key, content),
            }
            at += content.len();
        }
        pieces
    }

    /// What lies between two aligned pieces: the continuation of the left one, the text before
    /// the right one, and anything by content in between.
    fn fill_gap(
        &self,
        key: KeyId,
        tokens: &[u32],
        gap: Range<usize>,
        right: Option<BlockId>,
        found: &mut Vec<Piece>,
    ) {
        if gap.is_empty() {
            return;
        }
        let mut start = gap.start;
        let left = found.last().copied().filter(|piece| piece.end == start);
        if let Some(left) = left {
            let slot = left.begin as usize + left.end - left.start;
            start = self.extend_right(key, tokens, start..gap.end, left.donor, slot, found);
        }
        let mut tail = Vec::new();
        let end = match right {
            Some(right) => self.extend_left(key, tokens, start..gap.end, right, &mut tail),
            None => gap.end,
        };
        self.discover(key, tokens, start..end, found);
        found.append(&mut tail);
    }
}

fn reason_of(gap: Range<usize>, mark: &Range<usize>, collided: bool, page: usize) -> MissReason {
    if collided {
        MissReason::HashCollision
    } else if gap == *mark {
        if mark.len() < page { MissReason::ShorterThanBlock } else { MissReason::NotCached }
    } else if gap.start == mark.start && gap.len() < page {
        MissReason::MisalignedStart
    } else if gap.end == mark.end && gap.len() < page {
        MissReason::TailNotCached
    } else {
        MissReason::NotCached
    }
}
