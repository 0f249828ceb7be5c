//! How many parts work is cut into, so that the rounds in which a device takes it are full.

/// The fewest parts, of `most` at most, that keep nine tenths of a device busy, or those that keep
/// most of it busy. A part has `blocks` thread blocks, `at_once` of which run at the same time.
pub(crate) fn parts_of(blocks: usize, at_once: usize, most: usize) -> usize {
    let busy = |parts: usize| {
        let all = blocks * parts;
        1000 * all / all.next_multiple_of(at_once).max(1)
    };
    let enough = (1..=most).find(|&parts| busy(parts) >= 900);
    enough.unwrap_or_else(|| (1..=most).rev().max_by_key(|&parts| busy(parts)).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::parts_of;

    #[test]
    fn parts_fill_whole_rounds() {
        assert_eq!(parts_of(264, 264, 64), 1);
        assert_eq!(parts_of(128, 264, 64), 2);
        assert_eq!(parts_of(1, 264, 8), 8);
        assert_eq!(parts_of(0, 264, 8), 1);
    }
}
