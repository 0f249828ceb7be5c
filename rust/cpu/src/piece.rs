//! Entries cut into pieces: what one key tile takes at a time.

use kvweave_core::ops::Entry;

use crate::tile::KEYS;

/// Consecutive positions of one request that lie in one key tile and were cached under one delta.
///
/// Tiles are the spans `[64t, 64t + 64)` of absolute positions. Where the delta changes or a
/// position is missing inside a tile, the tile is cut.
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

    /// `[first, end)` of visible positions as a range of this piece's keys; `(0, 0)` when empty.
    pub(crate) fn clip(&self, (first, end): (i64, i64)) -> (usize, usize) {
        let low = (first - self.position).clamp(0, self.tokens as i64) as usize;
        let high = (end - self.position).clamp(0, self.tokens as i64) as usize;
        if low < high { (low, high) } else { (0, 0) }
    }
}

/// Cuts the entries `range` of a table; entry numbers in the pieces count from the table's start.
pub(crate) fn cut(table: &[[i32; 5]], range: std::ops::Range<usize>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let tile = |position: i64| position / KEYS as i64;
    for index in range {
        let entry = Entry::new(table[index]);
        let mut skip = 0;
        while skip < entry.tokens() {
            let position = entry.position + skip as i64;
            let tile_end = (tile(position) + 1) * KEYS as i64;
            let tokens = (entry.tokens() - skip).min((tile_end - position) as usize);
            match pieces.last_mut() {
                Some(last)
                    if last.end() == position
                        && last.delta == entry.delta
                        && tile(last.position) == tile(position) =>
                {
                    last.tokens += tokens;
                }
                _ => {
                    pieces.push(Piece { position, tokens, entry: index, skip, delta: entry.delta })
                }
            }
            skip += tokens;
        }
    }
    pieces
}

/// The pieces that hold a position in `[first, end)`.
pub(crate) fn within(pieces: &[Piece], (first, end): (i64, i64)) -> &[Piece] {
    let start = pieces.partition_point(|piece| piece.end() <= first);
    let stop = pieces.partition_point(|piece| piece.position < end);
    &pieces[start..stop.max(start)]
}

#[cfg(test)]
mod tests {
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
        assert_eq!(cut(&table, 0..5), expected);
        assert_eq!(within(&expected, (64, 71)), &expected[1..3]);
        assert_eq!(within(&expected, (100, 120)), &[]);
        assert_eq!(within(&expected, (0, 0)), &[]);
    }

    #[test]
    fn clips_to_its_own_keys() {
        let piece = piece(70, 30, 2, 0, 5);
        assert_eq!(piece.clip((0, 71)), (0, 1));
        assert_eq!(piece.clip((80, 1000)), (10, 30));
        assert_eq!(piece.clip((100, 200)), (0, 0));
        assert_eq!(piece.clip((0, 70)), (0, 0));
    }
}
