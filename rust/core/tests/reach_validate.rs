//! What the ops refuse about heads with tables, pages and windows of their own.

use kvweave_core::ops::{
    AttendDecode, AttendPrefill, EdgeMass, HeadReach, HeadRows, KvScales, KvView, OpError,
    OpErrorKind, PageGeometry, Pairing, Queries, Reach, RopeTable, ScoreTokens, Scoring, Visible,
};
use proptest::prelude::*;

const D: usize = 8;

/// Pages 0..8 of a cache, P 4.
const ELEMENTS: usize = 8 * 2 * 4 * D;

/// Two requests of two tables each: KV head 0 is global, head 1 local.
struct Call {
    entries: Vec<[i32; 5]>,
    entry_offsets: Vec<i32>,
    row_offsets: Vec<i32>,
    tables: usize,
    heads: Vec<[i32; 4]>,
    window: Option<u32>,
}

fn good() -> Call {
    Call {
        entries: vec![[1, 0, 4, 0, 0], [3, 0, 4, 4, 0], [5, 1, 3, 6, -9], [2, 0, 4, 0, 0]],
        entry_offsets: vec![0, 2, 3, 4, 4],
        row_offsets: vec![0, 1, 2],
        tables: 2,
        heads: vec![[0, 3, 0, 0], [1, 2, 3, 1]],
        window: None,
    }
}

impl Call {
    /// With () for numbers: validation looks at lengths alone.
    fn validate(&self) -> [Result<(), OpError>; 2] {
        let (cache, q) = (vec![0.0f32; ELEMENTS], vec![(); 2 * 4 * D]);
        let rope = RopeTable::new(vec![1.0; 4], 1, Pairing::Half).expect("a valid table");
        let queries = Queries { vectors: HeadRows::contiguous(&q, 2, 4, D), positions: &[7, 3] };
        let geometry = PageGeometry::arena(1, 2, 4, D);
        let reach = Some(Reach { tables: self.tables, heads: &self.heads });
        let kv = KvView {
            cache: &cache,
            geometry,
            layer: 0,
            entries: &self.entries,
            reach,
            scales: KvScales::ONE,
        };
        let scoring = Scoring { scale: 1.0, rope: &rope, window: self.window, softcap: None };
        let (row_offsets, entry_offsets) = (&self.row_offsets[..], &self.entry_offsets[..]);
        let (out, lse) = (&mut vec![(); 2 * 4 * D][..], &mut [0.0; 8][..]);
        let prefill =
            AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse }.validate();
        let (out, lse) = (&mut vec![(); 2 * 4 * D][..], &mut [0.0; 8][..]);
        [prefill, AttendDecode { queries, kv, scoring, entry_offsets, out, lse }.validate()]
    }
}

#[test]
fn good_params_pass() {
    assert_eq!(good().validate(), [Ok(()), Ok(())]);
}

#[test]
fn attention_refuses() {
    use OpErrorKind::{InvalidArgument, OutOfRange, Shape};
    type Change = fn(&mut Call);
    let cases: [(&str, OpErrorKind, Change); 16] = [
        ("table of a head", OutOfRange, |c| c.heads[1][0] = 2),
        ("table of a head", OutOfRange, |c| c.heads[0][0] = -1),
        ("heads of reach", Shape, |c| c.heads.truncate(1)),
        ("heads of reach", Shape, |c| c.heads.push([0, 0, 0, 0])),
        ("heads of reach", Shape, |c| c.heads.clear()),
        ("tables of reach", Shape, |c| c.tables = 0),
        ("rank of a head", OutOfRange, |c| c.heads[0][1] = -1),
        ("rank of a head", OutOfRange, |c| c.heads[0][1] = 5),
        ("rank of a head", OutOfRange, |c| c.heads[1][1] = 3),
        ("rank of a head", OutOfRange, |c| c.heads[1][1] = i32::MAX),
        ("window of a head", OutOfRange, |c| c.heads[1][2] = -1),
        ("sink of a head", OutOfRange, |c| c.heads[1][3] = i32::MIN),
        ("window", InvalidArgument, |c| c.window = Some(3)),
        ("entry_offsets", Shape, |c| c.entry_offsets = vec![0, 2, 3, 4]),
        ("entry_offsets", Shape, |c| c.entry_offsets = vec![0, 2, 3, 4, 5]),
        ("entry_offsets", Shape, |c| c.tables = 3),
    ];
    for (what, kind, change) in cases {
        let mut call = good();
        change(&mut call);
        for outcome in call.validate() {
            let error = outcome.expect_err(what);
            assert_eq!((error.what(), error.kind()), (what, kind), "{error}");
            assert!(!error.expected().is_empty() && !error.got().is_empty());
        }
    }
    let mut call = good();
    call.entries.truncate(3);
    call.entry_offsets = vec![0, 2, 3];
    let [prefill, decode] = call.validate().map(|outcome| outcome.expect_err("one request"));
    assert_eq!((prefill.what(), decode.what()), ("row_offsets", "q rows"));
}

#[test]
fn a_page_is_checked_with_the_entries_that_lead_there() {
    let mut call = good();
    // Block 5 is read by head 1 alone, whose page is then the last of the cache.
    call.heads[1][1] = 2;
    assert_eq!(call.validate(), [Ok(()), Ok(())]);
    // Nobody reads table 1 any more: its blocks need not lie in the cache.
    call.heads[1] = [0, 4, 0, 0];
    call.entries[2][0] = i32::MAX;
    assert_eq!(call.validate(), [Ok(()), Ok(())]);
}

#[test]
fn messages_say_expected_and_got() {
    let mut call = good();
    call.heads[1][0] = 2;
    let [error, _] = call.validate().map(|outcome| outcome.expect_err("a refusal"));
    assert_eq!(error.to_string(), "table of a head: expected a table from 0 to 1, got 2");
}

#[test]
fn scores_check_their_own_shapes() {
    let (cache, q) = (vec![0.0f32; ELEMENTS], vec![(); 4 * D]);
    let rope = RopeTable::new(vec![1.0; 4], 1, Pairing::Half).expect("a valid table");
    let call = good();
    let score = |offsets: &[i32], mass: usize, window: u32, edge: usize| {
        let queries = Queries { vectors: HeadRows::contiguous(&q, 1, 4, D), positions: &[7] };
        let geometry = PageGeometry::arena(1, 2, 4, D);
        let reach = Some(Reach { tables: 2, heads: &call.heads });
        let kv = KvView {
            cache: &cache,
            geometry,
            layer: 0,
            entries: &call.entries[..3],
            reach,
            scales: KvScales::ONE,
        };
        let scoring = Scoring { scale: 1.0, rope: &rope, window: None, softcap: None };
        let (mass, share) = (&mut vec![0.0; mass][..], &mut vec![0.0; edge][..]);
        let edge = Some(EdgeMass { window, sink: 0, share });
        ScoreTokens { queries, kv, scoring, entry_offsets: offsets, mass, edge }.validate()
    };
    assert_eq!(score(&[0, 2, 3], 8, 1, 4), Ok(()));
    let what = |outcome: Result<(), OpError>| outcome.expect_err("a refusal").what();
    assert_eq!(what(score(&[0, 3], 8, 1, 4)), "entry_offsets");
    assert_eq!(what(score(&[0, 2, 3, 3, 3], 8, 1, 4)), "entry_offsets");
    assert_eq!(what(score(&[0, 2, 3], 6, 1, 4)), "mass");
    assert_eq!(what(score(&[0, 2, 3], 8, 0, 4)), "window of edge");
    assert_eq!(what(score(&[0, 2, 3], 8, 1, 5)), "edge");
}

proptest! {
    /// Sink and window as two ranges = the sentence that defines them.
    #[test]
    fn visible_is_as_defined(
        position in 0i32..300,
        window in 0i32..200,
        sink in 0i32..200,
        key in 0i64..300,
    ) {
        let head = HeadReach::new([1, 2, window, sink]);
        prop_assert_eq!((head.table, head.rank), (1, 2));
        let row = i64::from(position);
        let near = window == 0 || key > row - i64::from(window) || key < i64::from(sink);
        let seen = head.visible(position);
        prop_assert_eq!(seen.contains(key), key <= row && near);
        prop_assert!(seen.sink == 0 || seen.sink < seen.first);
        prop_assert_eq!(head.visible(i32::MAX).end, 1 << 31);
        let all = Visible { sink: 0, first: 0, end: row + 1 };
        prop_assert_eq!(Visible::new(position, None, 9), all);
    }

    /// Whatever the numbers, validation answers: it neither panics nor overflows.
    #[test]
    fn any_numbers_are_answered(
        tables in any::<usize>(),
        head in prop::array::uniform4(any::<i32>()),
        offsets in prop::collection::vec(any::<i32>(), 0..4),
        entry in prop::array::uniform5(any::<i32>()),
    ) {
        for (tables, offsets) in [(tables, vec![0]), (2, offsets), (usize::MAX, vec![0])] {
            let mut call = good();
            (call.tables, call.entry_offsets, call.heads[1], call.entries[2]) =
                (tables, offsets, head, entry);
            let _ = call.validate();
        }
        let mut call = good();
        call.heads[1] = head;
        let _ = call.validate();
        (call.entries, call.entry_offsets, call.tables) = (Vec::new(), vec![0], usize::MAX);
        let _ = call.validate();
    }
}
