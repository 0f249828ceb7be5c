//! The KV of a block says what stood before it: a document is served its own, and what is served of
//! strangers is called so.

use std::collections::{BTreeMap, HashMap};

use kvweave_core::{
    Admission, CacheConfig, KvCache, KvDtype, KvShape, MarkedSegment, Mode, Outcome, PlanSpan,
    Request, Reuse, SegmentSource,
};
use proptest::prelude::*;

const PAGE: usize = 4;

/// A cache of one head, and for each slot the text that stood before the token whose KV it holds,
/// that token included.
struct World {
    cache: KvCache,
    slots: HashMap<(i32, i32), Vec<u32>>,
}

fn world(blocks: u64) -> World {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    let cache = KvCache::new(CacheConfig::new(shape, 0).sized_for(blocks).unwrap()).unwrap();
    World { cache, slots: HashMap::new() }
}

impl World {
    /// Computes a prompt in full and commits it.
    fn learn(&mut self, tokens: &[u32]) -> Request {
        let admission = Admission { reuse: Reuse::None, ..Admission::new(tokens) };
        let mut request = self.cache.admit(&admission).unwrap();
        let positions: Vec<i32> = (0..tokens.len() as i32).collect();
        for (at, slot) in request.slots(&positions).unwrap().into_iter().enumerate() {
            self.slots.insert(slot.into(), tokens[..=at].to_vec());
        }
        request.commit(tokens.len(), tokens.len()).unwrap();
        self.cache.check().unwrap();
        request
    }

    fn insert(&mut self, name: &str, tokens: &[u32]) {
        self.learn(tokens).freeze(name, 0..tokens.len()).unwrap();
        self.cache.check().unwrap();
    }

    /// What a prompt with this segment reads of it: for each of its tokens that is reused, the
    /// outcome and the text that its KV saw.
    fn read(&mut self, segment: &[u32], mode: Mode) -> Vec<Option<(Outcome, Vec<u32>)>> {
        let (start, end) = (3, 3 + segment.len());
        let tokens = [&[901, 902, 903], segment, &[904, 905]].concat();
        let marked = [MarkedSegment { start, end, namespace: "" }];
        let admission = Admission { marked: &marked, mode, ..Admission::new(&tokens) };
        let mut request = self.cache.admit(&admission).unwrap();
        for [src, from, dst, to, count, _] in request.take_copies() {
            for i in 0..count {
                let seen = self.slots[&(src, from + i)].clone();
                self.slots.insert((dst, to + i), seen);
            }
        }
        let mut seen = vec![None; tokens.len()];
        for [block, begin, end, position, _] in request.entries() {
            for slot in begin..end {
                let at = (position + slot - begin) as usize;
                seen[at] = self.slots.get(&(block, slot)).cloned();
            }
        }
        let spans = &request.plan().spans;
        let outcome = |at: usize| {
            let holds = |span: &&PlanSpan| (span.start..span.end).contains(&at);
            let found = spans.iter().find(holds).map(|span| span.outcome.clone());
            found.filter(|outcome| matches!(outcome, Outcome::Segment { .. }))
        };
        (start..end).map(|at| outcome(at).zip(seen[at].take())).collect()
    }
}

fn own(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Segment { own: true, .. })
}

fn name_of(outcome: &Outcome) -> Option<&str> {
    match outcome {
        Outcome::Segment { source: SegmentSource::Frozen(name), .. } => Some(name),
        _ => None,
    }
}

fn text(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

/// Two revisions of a text of 4 + 9 tokens: the first line differs.
fn revisions() -> [Vec<u32>; 2] {
    [100, 200].map(|line| [text(line, 4), text(500, 9)].concat())
}

/// Every token is reused, and its KV saw the segment alone.
fn assert_alone(world: &mut World, segment: &[u32], name: &str) {
    for mode in [Mode::Materialise, Mode::Share] {
        for (at, read) in world.read(segment, mode).into_iter().enumerate() {
            let (outcome, seen) = read.unwrap_or_else(|| panic!("token {at} was not reused"));
            assert_eq!(seen, segment[..=at], "token {at} saw another text");
            assert_eq!((own(&outcome), name_of(&outcome)), (true, Some(name)), "token {at}");
        }
    }
}

#[test]
fn a_replaced_document_is_served_as_it_is_now() {
    let [old, new] = revisions();
    for delete in [false, true] {
        let mut world = world(40);
        world.insert("book", &old);
        if delete {
            world.cache.delete_frozen("book", "").unwrap();
        }
        world.insert("book", &new);
        assert_alone(&mut world, &new, "book");
        assert_eq!(world.cache.stats().frozen_blocks, 4);
    }
}

#[test]
fn documents_with_a_common_passage_have_an_encoding_each() {
    let [first, second] = revisions();
    for order in [["first", "second"], ["second", "first"]] {
        let mut world = world(40);
        for name in order {
            world.insert(name, if name == "first" { &first } else { &second });
        }
        assert_alone(&mut world, &first, "first");
        assert_alone(&mut world, &second, "second");
        world.cache.delete_frozen("first", "").unwrap();
        assert_alone(&mut world, &second, "second");
    }
}

#[test]
fn what_a_deleted_name_alone_owned_is_no_donor_of_other_texts() {
    let [old, new] = revisions();
    let mut world = world(40);
    world.insert("book", &old);
    let strangers = world.read(&new, Mode::Materialise);
    assert!(strangers[..4].iter().all(Option::is_none));
    for (at, read) in strangers.into_iter().enumerate().skip(4) {
        let (outcome, seen) = read.expect("a stranger's block");
        assert_eq!((own(&outcome), name_of(&outcome)), (false, Some("book")));
        assert_eq!(seen, old[..=at]);
    }
    world.cache.delete_frozen("book", "").unwrap();
    assert!(world.read(&new, Mode::Share).iter().all(Option::is_none));
    // The text itself is still cached, as a prompt that nobody has given a name.
    let same = world.read(&old, Mode::Share);
    assert!(same.iter().flatten().all(|(outcome, _)| own(outcome) && name_of(outcome).is_none()));
    assert_eq!(same.iter().flatten().count(), old.len());
}

#[test]
fn documents_that_begin_alike_are_called_by_their_own_names() {
    let mut world = world(40);
    let [first, second] = [10, 20].map(|rest| [text(500, 8), text(rest, 6)].concat());
    world.insert("first", &first);
    world.insert("second", &second);
    assert_eq!(world.cache.stats().frozen_blocks, 6, "the common head is stored once");
    assert_alone(&mut world, &first, "first");
    assert_alone(&mut world, &second, "second");
    world.cache.delete_frozen("first", "").unwrap();
    assert_alone(&mut world, &second, "second");
}

#[test]
fn a_document_may_be_replaced_where_both_revisions_do_not_fit_the_share() {
    let mut world = world(20);
    world.insert("book", &text(100, 32));
    world.insert("book", &text(300, 32));
    assert_alone(&mut world, &text(300, 32), "book");
    assert_eq!(world.cache.stats().frozen_blocks, 8);
}

#[test]
fn what_was_given_up_comes_back_as_its_own_encoding_alone() {
    let [book, _] = revisions();
    let mut world = world(20);
    world.insert("book", &book);
    // All blocks are needed: the book is evicted.
    drop(world.learn(&text(2000, 80)));
    drop(world.learn(&text(3000, 80)));
    world.cache.rebalance();
    let resident = |world: &World| world.cache.frozen(None)[0].resident_blocks;
    assert_eq!(resident(&world), 0);
    drop(world.learn(&[text(7000, 4), text(500, 9)].concat()));
    world.cache.rebalance();
    assert_eq!(resident(&world), 0, "a stranger's blocks are not the book");
    drop(world.learn(&book));
    world.cache.rebalance();
    assert_eq!(resident(&world), 4);
    assert_alone(&mut world, &book, "book");
}

#[derive(Clone, Debug)]
enum Step {
    Insert {
        name: u8,
        text: usize,
    },
    Delete {
        name: u8,
    },
    /// An earlier prompt with the text behind others.
    Learn {
        before: u8,
        text: usize,
    },
    Read {
        text: usize,
        share: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let text = 0usize..8;
    prop_oneof![
        3 => (0u8..3, text.clone()).prop_map(|(name, text)| Step::Insert { name, text }),
        1 => (0u8..3).prop_map(|name| Step::Delete { name }),
        2 => (0u8..7, text.clone()).prop_map(|(before, text)| Step::Learn { before, text }),
        4 => (text, any::<bool>()).prop_map(|(text, share)| Step::Read { text, share }),
    ]
}

/// Texts of two lines and a tail, of which any two have parts in common.
fn texts() -> Vec<Vec<u32>> {
    let line = |which: usize| text(if which == 0 { 100 } else { 200 }, 6);
    let made = |bits: usize| {
        let tail = text(600, 3 + bits as u32 % 2);
        [line(bits & 1), text(500, 10), line(bits >> 1 & 1), text(500, 9), tail].concat()
    };
    let mut all: Vec<_> = (0..6).map(made).collect();
    all.push(vec![7; 22]);
    all.push([text(100, 6), vec![7; 20]].concat());
    all
}

proptest! {
    /// Whatever was inserted, replaced, deleted and learnt before: a document that is there is read
    /// whole and as it was encoded alone, and of anything else the plan says truly whose it is.
    #[test]
    fn a_plan_says_whose_encoding_is_read(steps in proptest::collection::vec(step(), 1..24)) {
        let (mut world, texts) = (world(600), texts());
        let mut names: BTreeMap<u8, usize> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Insert { name, text } => {
                    world.insert(&format!("n{name}"), &texts[text]);
                    names.insert(name, text);
                }
                Step::Delete { name } => {
                    let deleted = world.cache.delete_frozen(&format!("n{name}"), "").is_ok();
                    prop_assert_eq!(deleted, names.remove(&name).is_some());
                }
                Step::Learn { before, text: which } => {
                    let before = text(800, before.into());
                    drop(world.learn(&[&before[..], &texts[which]].concat()));
                }
                Step::Read { text, share } => {
                    let mode = if share { Mode::Share } else { Mode::Materialise };
                    let segment = &texts[text];
                    let there = names.values().any(|&named| named == text);
                    for (at, read) in world.read(segment, mode).into_iter().enumerate() {
                        let Some((outcome, seen)) = read else {
                            prop_assert!(!there, "token {} of a document was not reused", at);
                            continue;
                        };
                        if there {
                            prop_assert_eq!(&seen[..], &segment[..=at]);
                            prop_assert!(own(&outcome) && name_of(&outcome).is_some());
                        }
                        prop_assert_eq!(own(&outcome), seen.ends_with(&segment[..=at]));
                    }
                }
            }
            world.cache.check().unwrap();
        }
    }
}
