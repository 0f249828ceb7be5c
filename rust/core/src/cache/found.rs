//! What of a prompt is cached: prefix first, then marked segments, then unmarked text.

use std::ops::Range;
use std::sync::Arc;

use crate::content::{ContentId, Index, Matches, MissReason, Parent, Piece, PrefixMatch};
use crate::ids::ScopeId;
use crate::plan::{Outcome, PlanSpan, ReusePlan, SegmentSource};

use super::admission::{Admission, MarkedSegment, Mode, Reuse};

/// What the indexes hold of a prompt.
pub(super) struct Found {
    pub(super) scope: ScopeId,
    pub(super) marks: Vec<(Range<usize>, ScopeId)>,
    pub(super) prefix: Vec<ContentId>,
    pub(super) chain: PrefixMatch,
    /// Positions [whole, prefix_end) continue the prefix inside a block.
    pub(super) whole: usize,
    pub(super) prefix_end: usize,
    pub(super) matches: Matches,
}

/// Looks a prompt up. The caller releases the namespaces that it names, see [`Found::keys`].
pub(super) fn find(
    index: &mut Index,
    request: &Admission<'_>,
    marks: &[MarkedSegment<'_>],
    page: usize,
) -> Found {
    let scope = index.acquire_scope(request.namespace, request.regime);
    let marks: Vec<_> = marks
        .iter()
        .map(|mark| (mark.start..mark.end, index.acquire_scope(mark.namespace, request.regime)))
        .collect();
    // The last token is always computed: its logits are wanted.
    let last = request.tokens.len() - 1;
    let mut prefix = Vec::new();
    let root = PrefixMatch { parent: Parent::Root, digest: index.root(scope), partial: None };
    let chain = match request.reuse {
        Reuse::None => root,
        _ => index.match_prefix(scope, &request.tokens[..last], &mut prefix),
    };
    let whole = prefix.len() * page;
    let prefix_end = whole + chain.partial.map_or(0, |(_, tokens)| tokens);
    let mut found =
        Found { scope, marks, prefix, chain, whole, prefix_end, matches: Matches::default() };
    found.search(index, request, prefix_end..last);
    if !matches!(request.reuse, Reuse::None) {
        let gone = index.departed_after(found.chain.digest, &request.tokens[whole..last]);
        found.matches.say_evicted(0, whole..whole + gone);
    }
    found.matches.pieces.sort_unstable_by_key(|piece| piece.start);
    found.matches.misses.push((last..last + 1, MissReason::LastToken));
    found
}

impl Found {
    /// The namespaces that were acquired to look: the prompt's and those of the marks.
    pub(super) fn scopes(&self) -> impl Iterator<Item = ScopeId> + '_ {
        std::iter::once(self.scope).chain(self.marks.iter().map(|&(_, scope)| scope))
    }

    /// Walks marks and the text between them over `clip`.
    fn search(&mut self, index: &Index, request: &Admission<'_>, clip: Range<usize>) {
        let mut at = clip.start;
        for (mark, scope) in self.marks.clone() {
            let (start, end) = (mark.start.max(at), mark.end.min(clip.end));
            if start >= end {
                continue;
            }
            self.unmarked(index, request, at..start);
            match request.reuse {
                Reuse::None => self.matches.misses.push((start..end, MissReason::ReuseOff)),
                Reuse::Prefix => self.matches.misses.push((start..end, MissReason::SegmentsOff)),
                Reuse::Segments => {
                    index.match_marked(scope, request.tokens, mark, &clip, &mut self.matches);
                }
            }
            at = end;
        }
        self.unmarked(index, request, at..clip.end);
    }

    fn unmarked(&mut self, index: &Index, request: &Admission<'_>, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let reason = match request.reuse {
            Reuse::None => MissReason::ReuseOff,
            Reuse::Segments if request.discover => MissReason::NotCached,
            _ => MissReason::Fresh,
        };
        let mut at = range.start;
        let end = range.end;
        if reason == MissReason::NotCached {
            let first = self.matches.pieces.len();
            index.discover(self.scope, request.tokens, range, &mut self.matches.pieces);
            for piece in &self.matches.pieces[first..] {
                self.matches.misses.push((at..piece.start, reason));
                at = piece.end;
            }
        }
        self.matches.misses.push((at..end, reason));
    }

    pub(super) fn plan(&self, index: &Index, tokens: usize) -> ReusePlan {
        let span = |range: &Range<usize>, outcome| PlanSpan {
            start: range.start,
            end: range.end,
            outcome,
        };
        let mut spans = vec![span(&(0..self.prefix_end), Outcome::Prefix)];
        // From the end on: what documents have in common is called by the name that the rest has.
        let mut last: Option<(usize, &Arc<str>)> = None;
        for piece in self.matches.pieces.iter().rev() {
            let goes_on = last.filter(|last| last.0 == piece.end).map(|last| last.1);
            let same =
                goes_on.filter(|&name| index.frozen.names_of(piece.donor).any(|n| n == name));
            let name = same.or_else(|| index.frozen.names_of(piece.donor).next());
            last = name.map(|name| (piece.start, name));
            let source =
                name.map_or(SegmentSource::Request, |name| SegmentSource::Frozen(name.to_string()));
            let Piece { delta, exact, own, .. } = *piece;
            let outcome = Outcome::Segment { delta, source, exact, own };
            spans.push(span(&(piece.start..piece.end), outcome));
        }
        for (range, reason) in &self.matches.misses {
            spans.push(span(range, Outcome::Recompute { reason: *reason }));
        }
        ReusePlan::new(tokens, spans)
    }

    /// The donors of copies and windows: the block a prefix ends inside, then the segments'.
    pub(super) fn donors(&self) -> impl Iterator<Item = ContentId> + '_ {
        let partial = self.chain.partial.map(|(block, _)| block);
        partial.into_iter().chain(self.matches.pieces.iter().map(|piece| piece.donor))
    }

    /// The pieces to be copied: the partial prefix always, segments when materialised.
    pub(super) fn copied(&self, mode: Mode) -> Vec<Piece> {
        let partial = self.chain.partial.map(|(donor, tokens)| Piece {
            start: self.whole,
            end: self.whole + tokens,
            donor,
            begin: 0,
            delta: 0,
            exact: true,
            own: true,
        });
        let segments = match mode {
            Mode::Materialise => &self.matches.pieces[..],
            Mode::Share => &[],
        };
        partial.into_iter().chain(segments.iter().copied()).collect()
    }

    /// Which grid blocks after the prefix and before `end` need memory of their own.
    pub(super) fn private_grid(&self, mode: Mode, page: usize, end: usize) -> Vec<bool> {
        let first = self.prefix.len();
        let mut needed = vec![true; end.div_ceil(page) - first];
        if mode == Mode::Materialise {
            return needed;
        }
        needed.fill(false);
        let mut at = self.whole;
        let pieces = self.matches.pieces.iter().map(|piece| (piece.start, piece.end));
        for (start, stop) in pieces.chain([(end, end)]) {
            if at < start {
                needed[at / page - first..start.div_ceil(page) - first].fill(true);
            }
            at = stop;
        }
        needed
    }
}
