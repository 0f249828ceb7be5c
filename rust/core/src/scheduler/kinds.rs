//! Whose step it is: requests of different kinds never share one.

use super::books::Books;

/// Kinds in the order in which they are tried. Whoever has waited for `kind_patience` steps comes
/// first, longest first; then the kind of most requests. Nobody gives room up for another kind's
/// turn: those who run keep theirs, and wait a step.
pub(super) fn in_turn(books: &Books) -> Vec<u32> {
    let step = books.step;
    let mut kinds: Vec<(bool, u64, usize, u32)> = Vec::with_capacity(books.kinds.len());
    for (&number, kind) in &books.kinds {
        let waited = step - kind.served;
        let overdue = waited >= books.config.kind_patience;
        kinds.push((overdue, if overdue { waited } else { 0 }, kind.live, number));
    }
    kinds.sort_by_key(|&(overdue, waited, live, number)| {
        (!overdue, u64::MAX - waited, usize::MAX - live, number)
    });
    kinds.into_iter().map(|(_, _, _, number)| number).collect()
}
