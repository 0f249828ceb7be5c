//! Marked segments: which parts of a marked range are cached, and why the others are not.
//!
//! First comes the segment's own encoding: its text from the first token on as it was computed with
//! nothing before it, which is how a document enters a knowledge base. In the prefix tree that is a
//! prompt, found by its chain of blocks. What follows is looked up block by block by content, where
//! the donor whose text agrees longest with the prompt is preferred: equal blocks of strangers saw
//! another text before them. The incomplete tail is a virtual block of its own. What this leaves
//! over is looked for at any offset, since a donor may have lain on another grid; the head of a
//! misaligned donor is recovered from the block before.

use std::ops::Range;

use super::miss::MissReason;
use crate::ids::ScopeId;

use super::ids::{ContentId, Parent};
use super::index::Index;

/// A run of prompt tokens whose KV lies in one donor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First prompt position.
    pub(crate) start: usize,
    /// One past the last.
    pub(crate) end: usize,
    /// The donor's node.
    pub(crate) donor: ContentId,
    /// The donor slot of `start`.
    pub(crate) begin: u32,
    /// Prompt position − position at which the donor's K was rotated.
    pub(crate) delta: i32,
    /// Whether the donor computed it exactly in its own context.
    pub(crate) exact: bool,
    /// Whether the donor's text is the segment's from its first token on.
    pub(crate) own: bool,
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

impl Matches {
    /// Says of what was not found in a range that it had to go, in the misses from number `first`
    /// on. More particular reasons stay.
    pub(crate) fn say_evicted(&mut self, first: usize, gone: Range<usize>) {
        if gone.is_empty() {
            return;
        }
        let split = |(range, reason): (Range<usize>, MissReason)| {
            let start = gone.start.clamp(range.start, range.end);
            let end = gone.end.clamp(start, range.end);
            let inside = match reason {
                MissReason::Fresh | MissReason::NotCached | MissReason::SegmentsOff => {
                    MissReason::Evicted
                }
                other => other,
            };
            [(range.start..start, reason), (start..end, inside), (end..range.end, reason)]
        };
        let misses = self.misses.split_off(first).into_iter().flat_map(split);
        self.misses.extend(misses.filter(|(range, _)| !range.is_empty()));
    }
}

impl Index {
    /// Looks a marked range up and appends what lies inside `clip`.
    pub(crate) fn match_marked(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        mark: Range<usize>,
        clip: &Range<usize>,
        matches: &mut Matches,
    ) {
        let mut collided = false;
        let mut found = self.match_own(scope, tokens, &mark);
        let gone = self.departed_of_own(scope, tokens, &mark, found.last());
        let mut at = found.last().map_or(mark.start, |piece| piece.end);
        let aligned = self.match_aligned(scope, tokens, &mark, &found, &mut collided);
        for piece in &aligned {
            self.fill_gap(scope, tokens, at..piece.start, Some(piece.donor), &mut found);
            found.push(*piece);
            at = piece.end;
        }
        self.fill_gap(scope, tokens, at..mark.end, None, &mut found);
        self.say_whose(scope, tokens, mark.start, &mut found);

        let first = matches.misses.len();
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
        matches.say_evicted(first, gone);
    }

    /// What of a segment's own encoding had to go, behind the last piece that is there.
    fn departed_of_own(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        mark: &Range<usize>,
        last: Option<&Piece>,
    ) -> Range<usize> {
        let (parent, start) = match last {
            Some(last) => (Parent::Content(last.donor), last.end),
            None => (Parent::Root, mark.start),
        };
        if !(start - mark.start).is_multiple_of(self.nodes.page_tokens()) {
            return start..start;
        }
        let digest = self.digest_of(parent, self.root(scope));
        start..start + self.departed_after(digest, &tokens[start..mark.end])
    }

    /// The longest head of a marked range that was computed with nothing before it, up to the first
    /// block that nobody else may hold: whole blocks, and the incomplete one that such a text ends
    /// with.
    fn match_own(&self, scope: ScopeId, tokens: &[u32], mark: &Range<usize>) -> Vec<Piece> {
        let mut blocks = Vec::new();
        let (_, partial) = self.walk_prefix(scope, &tokens[mark.clone()], &mut blocks);
        let page = self.nodes.page_tokens();
        let tail = partial.filter(|&(block, common)| self.nodes.tokens(block).len() == common);
        let whole = blocks.into_iter().map(|block| (block, page));
        let usable = whole.chain(tail).take_while(|&(block, _)| self.is_whole(block));
        let starts = (mark.start..).step_by(page);
        let piece =
            |((block, len), at)| Piece { exact: true, own: true, ..self.piece(block, 0, at, len) };
        usable.zip(starts).map(piece).collect()
    }

    /// Blocks at start + iP behind what was found, and the incomplete tail.
    fn match_aligned(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        mark: &Range<usize>,
        found: &[Piece],
        collided: &mut bool,
    ) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        let page = self.nodes.page_tokens();
        let known = found.last().map_or(mark.start, |piece| piece.end);
        let mut at = known - (known - mark.start) % page;
        for content in tokens[at..mark.end].chunks(page) {
            let left = pieces.last().or(found.last()).filter(|piece| piece.end == at);
            let left = left.map(|piece| piece.donor);
            let first = self.find_content(scope, content);
            let nearest = |first| self.nearest(scope, first, &tokens[..at], left);
            match first.and_then(nearest) {
                Some(block) => {
                    let piece = self.piece(block, 0, at, content.len());
                    pieces.extend(piece.clip(&(known..mark.end)));
                }
                None => *collided |= self.content_collides(scope, content),
            }
            at += content.len();
        }
        pieces
    }

    /// Notes which pieces of a segment that begins at `start` lie in a text that agrees with it
    /// from there on.
    fn say_whose(&self, scope: ScopeId, tokens: &[u32], start: usize, found: &mut [Piece]) {
        let page = self.nodes.page_tokens() as u32;
        let mut last: Option<Piece> = None;
        for piece in found {
            let goes_on = last.filter(|last| {
                let stops = last.begin + (last.end - last.start) as u32;
                let same = last.donor == piece.donor && stops == piece.begin;
                let next = || piece.begin == 0 && stops == page;
                let after = || next() && self.before(piece.donor, scope) == Some(last.donor);
                last.end == piece.start && (same || after())
            });
            piece.own |= piece.start == start
                || match goes_on {
                    Some(last) => last.own,
                    None => self.agrees(scope, piece, &tokens[start..piece.start]),
                };
            last = Some(*piece);
        }
    }

    /// Whether the text before a piece is that before its donor's slot.
    fn agrees(&self, scope: ScopeId, piece: &Piece, before: &[u32]) -> bool {
        let head = &self.nodes.tokens(piece.donor)[..piece.begin as usize];
        let Some(rest) = before.len().checked_sub(head.len()) else {
            return head.ends_with(before);
        };
        before.ends_with(head) && self.run_before(scope, piece.donor, &before[..rest]) == rest
    }

    /// What lies between two aligned pieces: the continuation of the left one, the text before
    /// the right one, and anything by content in between.
    fn fill_gap(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        gap: Range<usize>,
        right: Option<ContentId>,
        found: &mut Vec<Piece>,
    ) {
        if gap.is_empty() {
            return;
        }
        let mut start = gap.start;
        let left = found.last().copied().filter(|piece| piece.end == start);
        if let Some(left) = left {
            let slot = left.begin as usize + left.end - left.start;
            start = self.extend_right(scope, tokens, start..gap.end, left.donor, slot, found);
        }
        let mut tail = Vec::new();
        let end = match right {
            Some(right) => self.extend_left(scope, tokens, start..gap.end, right, &mut tail),
            None => gap.end,
        };
        self.discover(scope, tokens, start..end, found);
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
