//! Entries cut into pieces: what one key tile takes at a time.

use std::ops::Range;

use kvweave_core::ops::{Entry, KvView, Scoring, Visible};

/// Keys of a tile.
pub(crate) const KEYS: usize = 64;

/// Consecutive positions of one request that lie in one key tile and were cached under one delta.
///
/// Tiles are the spans `[64t, 64t + 64)` of absolute positions. Where the delta changes, a position
/// is missing or a head's sink ends inside a tile, the tile is cut: so a row sees one range of a
/// piece's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Request position of the first key.
    pub(crate) position: i64,
    /// Keys, at most [`KEYS`].
    pub(crate) tokens: usize,
    /// Entry of the first key.
    pub(crate) entry: usize,
    /// Keys of that entry before the first.
    pub(crate) skip: usize,
    /// Delta of all its entries.
    pub(crate) delta: i32,
}

impl Piece {
    /// One past the last position.
    pub(crate) fn end(&self) -> i64 {
        self.position + self.tokens as i64
    }

    /// The piece's keys that a row sees, as a range; `(0, 0)` when empty.
    pub(crate) fn clip(&self, seen: Visible) -> (usize, usize) {
        if self.end() <= seen.sink {
            return (0, self.tokens);
        }
        self.clip_to((seen.first, seen.end))
    }

    /// `[first, end)` of positions as a range of this piece's keys; `(0, 0)` when empty.
    pub(crate) fn clip_to(&self, (first, end): (i64, i64)) -> (usize, usize) {
        let low = (first - self.position).clamp(0, self.tokens as i64) as usize;
        let high = (end - self.position).clamp(0, self.tokens as i64) as usize;
        if low < high { (low, high) } else { (0, 0) }
    }

    /// Whether any of its keys is seen.
    pub(crate) fn is_seen(&self, seen: Visible) -> bool {
        self.end() <= seen.sink || (self.end() > seen.first && self.position < seen.end)
    }
}

/// The pieces of every request of a call, cut once for all heads of one table and sink.
pub(crate) struct Pieces {
    /// [B, kinds]
    cut: Vec<Vec<Piece>>,
    kinds: usize,
    /// [G]
    kind_of: Vec<usize>,
}

impl Pieces {
    pub(crate) fn new<T>(kv: &KvView<'_, T>, scoring: &Scoring<'_>, offsets: &[i32]) -> Self {
        let mut kinds = Vec::new();
        let mut kind_of = Vec::new();
        for head in 0..kv.geometry.kv_heads {
            let reach = kv.head(head, scoring);
            let kind = (reach.table, reach.window.map_or(0, |_| reach.sink));
            let known = kinds.iter().position(|other| *other == kind);
            kind_of.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push(kind);
            }
        }
        let requests = (offsets.len() - 1) / kv.tables();
        let each = (0..requests).flat_map(|request| kinds.iter().map(move |&kind| (request, kind)));
        let cut = each
            .map(|(request, (table, sink))| {
                cut(kv.entries, kv.span(offsets, request, table), i64::from(sink))
            })
            .collect();
        Self { cut, kinds: kinds.len(), kind_of }
    }

    /// The delta of every piece.
    pub(crate) fn deltas(&self) -> impl Iterator<Item = i32> + '_ {
        self.cut.iter().flatten().map(|piece| piece.delta)
    }

    pub(crate) fn of(&self, request: usize, kv_head: usize) -> &[Piece] {
        &self.cut[request * self.kinds + self.kind_of[kv_head]]
    }
}

/// Cuts the entries `range` of a table, also at position `sink`; entry numbers in the pieces count
/// from the table's start.
fn cut(table: &[[i32; 5]], range: Range<usize>, sink: i64) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let tile = |position: i64| position / KEYS as i64;
    for index in range {
        let entry = Entry::new(table[index]);
        let mut skip = 0;
        while skip < entry.tokens() {
            let position = entry.position + skip as i64;
            let mut end = (tile(position) + 1) * KEYS as i64;
            if position < sink {
                end = end.min(sink);
            }
            let tokens = (entry.tokens() - skip).min((end - position) as usize);
            match pieces.last_mut() {
                Some(last)
                    if last.end() == position
                        && last.delta == entry.delta
                        && tile(last.position) == tile(position)
                        && position != sink =>
                {
                    last.tokens += tokens;
                }
                _ => {
                    let (entry, delta) = (index, entry.delta);
                    pieces.push(Piece { position, tokens, entry, skip, delta });
                }
            }
            skip += tokens;
        }
    }
    pieces
}

/// The pieces that hold a position seen: those of the sink, then the others.
pub(crate) fn within(pieces: &[Piece], seen: Visible) -> [&[Piece]; 2] {
    let sink = pieces.partition_point(|piece| piece.end() <= seen.sink);
    let start = pieces.partition_point(|piece| piece.end() <= seen.first);
    let stop = pieces.partition_point(|piece| piece.position < seen.end);
    [&pieces[..sink], &pieces[start..stop.max(start)]]
}

#[cfg(test)]
mod tests {
    use kvweave_core::ops::Visible;

    use super::{Piece, cut, within};

    fn piece(position: i64, tokens: usize, entry: usize, skip: usize, delta: i32) -> Piece {
        Piece { position, tokens, entry, skip, delta }
    }

    #[test]
    fn cuts_at_tiles_deltas_and_gaps() {
        let table = [
            [9, 0, 60, 0, 0],
            [8, 2, 12, 60, 0],
            [7, 0, 20, 70, 5],
            [7, 20, 30, 90, 5],
            [6, 0, 4, 120, 5],
        ];
        let expected = [
            piece(0, 64, 0, 0, 0),
            piece(64, 6, 1, 4, 0),
            piece(70, 30, 2, 0, 5),
            piece(120, 4, 4, 0, 5),
        ];
        assert_eq!(cut(&table, 0..5, 0), expected);
        assert_eq!(within(&expected, seen(64, 71)), [&[], &expected[1..3]]);
        assert_eq!(within(&expected, seen(100, 120)), [&[][..], &[]]);
        assert_eq!(within(&expected, seen(0, 0)), [&[][..], &[]]);
    }

    #[test]
    fn cuts_at_a_sink() {
        let table = [[9, 0, 60, 0, 0], [8, 2, 12, 60, 0], [7, 0, 9, 200, 0]];
        let expected = [
            piece(0, 4, 0, 0, 0),
            piece(4, 60, 0, 4, 0),
            piece(64, 6, 1, 4, 0),
            piece(200, 9, 2, 0, 0),
        ];
        assert_eq!(cut(&table, 0..3, 4), expected);
        let row = Visible { sink: 4, first: 66, end: 205 };
        assert_eq!(within(&expected, row), [&expected[..1], &expected[2..]]);
        assert_eq!(expected.map(|piece| piece.clip(row)), [(0, 4), (0, 0), (2, 6), (0, 5)]);
        assert_eq!(expected.map(|piece| piece.is_seen(row)), [true, false, true, true]);
    }

    #[test]
    fn clips_to_its_own_keys() {
        let piece = piece(70, 30, 2, 0, 5);
        assert_eq!(piece.clip(seen(0, 71)), (0, 1));
        assert_eq!(piece.clip(seen(80, 1000)), (10, 30));
        assert_eq!(piece.clip(seen(100, 200)), (0, 0));
        assert_eq!(piece.clip(seen(0, 70)), (0, 0));
    }

    fn seen(first: i64, end: i64) -> Visible {
        Visible { sink: 0, first, end }
    }
}
