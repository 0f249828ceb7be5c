//! A step of a whole batch is as many single appends, or nothing; and what it says of tables is
//! what the requests' own tables say.

mod window_cache;

use std::collections::{BTreeMap, HashMap};

use kvweave_core::{
    Admission, DecodeRows, ErrorKind, GroupId, KvCache, Mode, Request, Reuse, StepHead, StepRows,
};
use proptest::prelude::*;

use window_cache::cache_of;

fn settle(request: &mut Request) {
    for group in 0..request.tables() - request.promoted().len() {
        request.take_copies_of(GroupId(group as u8)).unwrap();
    }
    request.finish_copies();
}

/// Something that can be done twice over, in two caches, with the same outcome.
#[derive(Clone, Debug)]
enum Event {
    Admit {
        tokens: usize,
        text: u8,
        reserve: usize,
        promotes: Vec<u8>,
        share: bool,
    },
    Fork(u8),
    Drop(u8),
    Commit(u8),
    Rewrite(u8),
    Append(u8, usize),
    /// Those of the batch, in order, the first `leaves` of them gone from the rows before.
    Step {
        mask: u64,
        turned: bool,
        leaves: u8,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let admit =
        (1usize..40, 0u8..3, 0usize..12, prop::collection::vec(0u8..6, 0..3), any::<bool>());
    prop_oneof![
        5 => admit.prop_map(|(tokens, text, reserve, promotes, share)| Event::Admit {
            tokens, text, reserve, promotes, share,
        }),
        2 => any::<u8>().prop_map(Event::Fork),
        1 => any::<u8>().prop_map(Event::Drop),
        1 => any::<u8>().prop_map(Event::Commit),
        1 => any::<u8>().prop_map(Event::Rewrite),
        1 => (any::<u8>(), 1usize..9).prop_map(|(which, count)| Event::Append(which, count)),
        12 => (any::<u64>(), any::<bool>(), 0u8..4)
            .prop_map(|(mask, turned, leaves)| Event::Step { mask, turned, leaves }),
    ]
}

struct World {
    cache: KvCache,
    live: Vec<Request>,
}

fn text(which: u8, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| i * (u32::from(which) + 1) % 5).collect()
}

impl World {
    fn new(cache: KvCache) -> World {
        World { cache, live: Vec::new() }
    }

    fn pick(&self, which: u8) -> Option<usize> {
        (!self.live.is_empty()).then(|| usize::from(which) % self.live.len())
    }

    fn run(&mut self, event: &Event) {
        match event {
            Event::Admit { tokens, text: which, reserve, promotes, share } => {
                let tokens = text(*which, *tokens);
                let mode = if *share { Mode::Share } else { Mode::Materialise };
                let reuse = if *share { Reuse::Segments } else { Reuse::Prefix };
                let discover = *share;
                let admission = Admission {
                    reserve_tokens: *reserve,
                    mode,
                    reuse,
                    discover,
                    ..Admission::new(&tokens)
                };
                let Ok(mut request) = self.cache.admit(&admission) else { return };
                settle(&mut request);
                for &head in promotes {
                    let _ = request.promote(u32::from(head) / 3, u32::from(head) % 3);
                }
                let len = request.len();
                request.advance(len, len).unwrap();
                settle(&mut request);
                self.live.push(request);
            }
            Event::Fork(which) => {
                let Some(at) = self.pick(*which) else { return };
                if let Ok(fork) = self.live[at].fork() {
                    self.live.push(fork);
                }
            }
            Event::Drop(which) => {
                let Some(at) = self.pick(*which) else { return };
                self.live.remove(at);
            }
            Event::Commit(which) => {
                let Some(at) = self.pick(*which) else { return };
                let len = self.live[at].len();
                let _ = self.live[at].commit(len, len);
            }
            Event::Rewrite(which) => {
                let Some(at) = self.pick(*which) else { return };
                let last = self.live[at].len() as i32 - 1;
                let _ = self.live[at].make_writable(&[last], None);
                settle(&mut self.live[at]);
            }
            Event::Append(which, count) => {
                let Some(at) = self.pick(*which) else { return };
                if self.live[at].append(&vec![4; *count]).is_ok() {
                    settle(&mut self.live[at]);
                }
            }
            Event::Step { .. } => {}
        }
    }

    /// All that can be told of the requests, and of the pool.
    fn told(&self) -> (Vec<Told>, Vec<(usize, usize)>) {
        let told = self.live.iter().map(Told::of).collect();
        let groups = self.cache.stats().groups;
        (told, groups.iter().map(|group| (group.held, group.total)).collect())
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    entries: Vec<Vec<[i32; 5]>>,
    bytes: (u64, u64),
}

impl Told {
    fn of(request: &Request) -> Told {
        let entries = (0..request.tables()).map(|t| request.entries_of(t).unwrap()).collect();
        Told { tokens: request.tokens().to_vec(), entries, bytes: request.kv_bytes() }
    }
}

/// Which of the batch take part in a step, in which order.
fn batch_of(count: usize, mask: u64, turned: bool) -> Vec<usize> {
    let mut batch: Vec<usize> = (0..count).filter(|at| mask >> (at % 64) & 1 == 1).collect();
    if turned {
        batch.reverse();
    }
    batch
}

fn picked<'a>(live: &'a mut [Request], batch: &[usize]) -> Vec<&'a mut Request> {
    let mut by_number: HashMap<usize, &mut Request> = live.iter_mut().enumerate().collect();
    batch.iter().map(|at| by_number.remove(at).unwrap()).collect()
}

/// Block numbers of one cache and of its twin, which may lie elsewhere.
#[derive(Default)]
struct Twins(BTreeMap<(i32, usize), i32>, BTreeMap<(i32, usize), i32>);

impl Twins {
    fn same(&mut self, table: usize, one: i32, other: i32) {
        assert_eq!(*self.0.entry((one, table)).or_insert(other), other, "blocks {one}, {other}");
        assert_eq!(*self.1.entry((other, table)).or_insert(one), one, "blocks {one}, {other}");
    }

    fn compare(&mut self, one: &Told, other: &Told) {
        assert_eq!(one.tokens, other.tokens);
        assert_eq!(one.entries.len(), other.entries.len());
        for (table, (ours, theirs)) in one.entries.iter().zip(&other.entries).enumerate() {
            assert_eq!(ours.len(), theirs.len(), "table {table}: {ours:?}, {theirs:?}");
            for (a, b) in ours.iter().zip(theirs) {
                assert_eq!(a[1..], b[1..]);
                self.same(table, a[0], b[0]);
            }
        }
    }
}

/// Whether two caches hold the same, if in other blocks.
fn are_twins(world: &World, twin: &World) -> bool {
    let shape = |told: &Told| -> Vec<Vec<[i32; 4]>> {
        let parts = |&[_, begin, end, position, delta]: &[i32; 5]| [begin, end, position, delta];
        told.entries.iter().map(|table| table.iter().map(parts).collect()).collect()
    };
    let (ours, theirs) = (world.told().0, twin.told().0);
    let same = |(a, b): (&Told, &Told)| a.bytes == b.bytes && shape(a) == shape(b);
    ours.len() == theirs.len() && ours.iter().zip(&theirs).all(same)
}

/// Carries out what both copy, which is the same.
fn settle_both(live: &mut [Request], twins: &mut [Request]) {
    for (one, other) in live.iter_mut().zip(twins) {
        for group in 0..one.tables() - one.promoted().len() {
            let group = GroupId(group as u8);
            let ours = one.take_copies_of(group).unwrap();
            let theirs = other.take_copies_of(group).unwrap();
            assert_eq!(ours.len(), theirs.len());
            for (a, b) in ours.iter().zip(&theirs) {
                assert_eq!((a[1], a[3], a[4], a[5]), (b[1], b[3], b[4], b[5]));
            }
        }
        one.finish_copies();
        other.finish_copies();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// In a pool with hardly any room, against a twin in which the same tokens are appended one
    /// request after the other.
    #[test]
    fn a_step_is_single_appends_or_nothing(
        blocks in 4u64..60,
        windows in any::<bool>(),
        events in prop::collection::vec(event(), 1..60),
    ) {
        let [mut world, mut twin] = [(); 2].map(|()| World::new(cache_of(blocks, windows)));
        for event in &events {
            let Event::Step { mask, turned, .. } = event else {
                world.run(event);
                twin.run(event);
                if !are_twins(&world, &twin) {
                    // Of several groups blocks may lie elsewhere, so that other slabs are full and
                    // other content was evicted.
                    prop_assert!(windows, "no twins after {event:?}");
                    return Ok(());
                }
                continue;
            };
            let batch = batch_of(world.live.len(), *mask, *turned);
            let before = world.told();
            let cache = world.cache.clone();
            let stepped = {
                let mut requests = picked(&mut world.live, &batch);
                cache.append_step(&mut requests, &vec![3; batch.len()])
            };
            world.cache.check().unwrap();
            let single = batch.iter().try_for_each(|&at| {
                let outcome = twin.live[at].append(&[3]);
                outcome.map_err(|error| (at, error))
            });
            match (&stepped, single) {
                (Ok(()), Ok(())) => {
                    let mut twins = Twins::default();
                    settle_both(&mut world.live, &mut twin.live);
                    let mut same_bytes = true;
                    for (one, other) in world.told().0.iter().zip(&twin.told().0) {
                        twins.compare(one, other);
                        same_bytes &= one.bytes == other.bytes;
                    }
                    prop_assert!(windows || same_bytes, "bytes differ");
                    if !same_bytes {
                        // Blocks that a window group only wishes for came for none of the step
                        // and for some of the appends: what is cached may differ from now on.
                        return Ok(());
                    }
                }
                (Ok(()), Err(_)) => return Ok(()),
                (Err(refused), single) => {
                    let full = matches!(refused.error.kind(), ErrorKind::PoolFull { .. });
                    prop_assert!(full, "{refused}");
                    let at = refused.request.expect("a request");
                    assert!(refused.to_string().contains(&format!("request {at} of")));
                    prop_assert_eq!(&before, &world.told());
                    // Of several groups the twin's blocks may lie in other slabs by now, with
                    // more of them empty.
                    prop_assert!(windows || single.is_err(), "single appends found room");
                    // Tried again, it is refused again.
                    let mut requests = picked(&mut world.live, &batch);
                    let again = cache.append_step(&mut requests, &vec![3; batch.len()]);
                    prop_assert_eq!(again, Err(refused.clone()));
                    prop_assert_eq!(&before, &world.told());
                    return Ok(());
                }
            }
        }
    }
}

/// The rows of a step's requests and the array that their entries lie in.
struct Rows {
    rows: DecodeRows,
    heads: Vec<StepHead>,
    array: Vec<[i32; 5]>,
    of: Vec<Option<usize>>,
}

impl Rows {
    fn new(cache: &KvCache) -> Rows {
        let rows = cache.decode_rows();
        Rows { rows, heads: Vec::new(), array: Vec::new(), of: Vec::new() }
    }

    fn step(&mut self, live: &mut [Request], batch: &[usize]) -> Option<StepRows> {
        self.of.resize(live.len(), None);
        for &at in batch {
            if self.of[at].is_none() {
                self.of[at] = Some(self.rows.join());
            }
            for &(layer, head) in live[at].promoted() {
                if !self.heads.iter().any(|h| (h.layer, h.head) == (layer, head)) {
                    let (window, sink) = if head == 1 { (7, 3) } else { (9, 0) };
                    self.heads.push(StepHead { layer, head, window, sink });
                }
            }
        }
        self.rows.set_heads(&self.heads).unwrap();
        let rows: Vec<usize> = batch.iter().map(|&at| self.of[at].unwrap()).collect();
        let tokens = vec![3; batch.len()];
        let step = self.rows.step(&mut picked(live, batch), &rows, &tokens).ok()?;
        self.array.resize(self.rows.entries(), [i32::MIN; 5]);
        let mut places = step.moves.places.clone();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), step.moves.places.len(), "a place twice");
        for (&place, &entry) in step.moves.places.iter().zip(&step.moves.entries) {
            self.array[place as usize] = entry;
        }
        Some(step)
    }

    fn listed(&self, step: &StepRows, number: usize, table: usize) -> &[[i32; 5]] {
        let [from, to] = step.spans[number * self.rows.tables() + table];
        &self.array[from as usize..to as usize]
    }
}

/// Block and slot of each position that entries list.
fn lies(entries: &[[i32; 5]]) -> BTreeMap<i32, (i32, i32, i32)> {
    let each = |&[block, begin, end, position, delta]: &[i32; 5]| {
        (begin..end).map(move |slot| (position + slot - begin, (block, slot, delta)))
    };
    entries.iter().flat_map(each).collect()
}

fn compare(rows: &Rows, step: &StepRows, cache: &KvCache, live: &[Request], batch: &[usize]) {
    let groups = cache.groups().len();
    for (number, &at) in batch.iter().enumerate() {
        let request = &live[at];
        let len = request.len() as i32;
        assert_eq!(step.positions[number], len - 1);
        for table in 0..rows.rows.tables() {
            let listed = rows.listed(step, number, table);
            let [block, slot] = step.slots[table * batch.len() + number];
            assert_eq!(lies(listed).get(&(len - 1)), Some(&(block, slot, 0)));
            assert!(listed.windows(2).all(|e| e[0][3] + e[0][2] - e[0][1] <= e[1][3]));
            let Some(head) = table.checked_sub(groups).map(|number| rows.heads[number]) else {
                assert_eq!(listed, request.entries_of(table).unwrap(), "table {table}");
                let slots = request.slots_of(table, &[len - 1]).unwrap();
                assert_eq!(slots, [[block, slot]]);
                continue;
            };
            let (group, rank) = cache.groups().rank(head.layer, head.head).unwrap();
            let own = request.promoted().iter().position(|&at| at == (head.layer, head.head));
            if let Some(own) = own {
                let shifted: Vec<_> = request.entries_of(groups + own).unwrap();
                let back = |&[block, b, e, p, d]: &[i32; 5]| [block + rank as i32, b, e, p, d];
                assert_eq!(listed.iter().map(back).collect::<Vec<_>>(), shifted);
                assert!(listed.iter().all(|entry| entry[0] > 0));
                continue;
            }
            let mut whole = lies(&request.entries_of(group.index()).unwrap());
            let (window, sink) = (head.window as i32, head.sink as i32);
            whole.retain(|&position, _| position >= len - window || position < sink);
            assert_eq!(lies(listed), whole, "{head:?} of {len}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whoever joins and leaves, and whatever else happens to requests between two steps.
    #[test]
    fn rows_list_what_the_requests_tables_list(
        blocks in 20u64..200,
        windows in any::<bool>(),
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut world = World::new(cache_of(blocks, windows));
        let mut rows = Rows::new(&world.cache);
        for event in &events {
            match event {
                Event::Step { mask, turned, leaves } => {
                    let batch = batch_of(world.live.len(), *mask, *turned);
                    for at in 0..usize::from(*leaves).min(rows.of.len()) {
                        if let Some(row) = rows.of[at].take() {
                            rows.rows.leave(row).unwrap();
                        }
                    }
                    let Some(step) = rows.step(&mut world.live, &batch) else { continue };
                    compare(&rows, &step, &world.cache, &world.live, &batch);
                    world.live.iter_mut().for_each(Request::finish_copies);
                }
                Event::Drop(which) => {
                    if let Some(at) = world.pick(*which)
                        && at < rows.of.len()
                        && let Some(row) = rows.of.remove(at)
                    {
                        rows.rows.leave(row).unwrap();
                    }
                    world.run(event);
                }
                _ => world.run(event),
            }
            world.cache.check().unwrap();
        }
    }
}

#[test]
fn bad_steps_are_refused_and_change_nothing() {
    let cache = cache_of(40, true);
    let mut world = World::new(cache.clone());
    for text in 0..3 {
        let promotes = vec![];
        let share = false;
        world.run(&Event::Admit { tokens: 9, text, reserve: 0, promotes, share });
    }
    let before = world.told();
    let mut rows = cache.decode_rows();
    let of: Vec<usize> = (0..3).map(|_| rows.join()).collect();
    let mut refused = |numbers: &[usize], tokens: &[u32], what: &str| {
        let mut requests: Vec<&mut Request> = world.live.iter_mut().collect();
        let error = rows.step(&mut requests, numbers, tokens).expect_err(what);
        assert!(error.to_string().contains(what), "{error}");
    };
    refused(&of, &[1, 2], "tokens: expected 3 of them, got 2");
    refused(&of[..2], &[1, 2, 3], "rows: expected 3 of them, got 2");
    refused(&[0, 1, 1], &[1, 2, 3], "row of request 2 of 3: expected each row once");
    refused(&[0, 1, 7], &[1, 2, 3], "row of request 2 of 3: expected one of the 3");
    let heads = |layer, head, window, sink| [StepHead { layer, head, window, sink }];
    assert!(rows.set_heads(&heads(0, 0, 3, 0)).is_err(), "a full head");
    assert!(rows.set_heads(&heads(5, 0, 3, 0)).is_err(), "no such head");
    assert!(rows.set_heads(&heads(0, 1, 8, 0)).is_err(), "more than is kept");
    assert!(rows.set_heads(&heads(0, 1, 0, 0)).is_err(), "nothing");
    assert_eq!(rows.tables(), cache.groups().len());
    let other = cache_of(40, true);
    let stranger = other.admit(&Admission::new(&[1, 2, 3])).unwrap();
    world.live.push(stranger);
    let mut requests: Vec<&mut Request> = world.live.iter_mut().collect();
    let error = cache.append_step(&mut requests, &[1; 4]).expect_err("another cache");
    assert_eq!((error.request, error.error.kind()), (Some(3), ErrorKind::InvalidArgument));
    world.live.pop();
    assert_eq!(before, world.told());
    assert_eq!(rows.leave(9).unwrap_err().kind(), ErrorKind::OutOfRange);
    rows.step(&mut world.live.iter_mut().collect::<Vec<_>>(), &of, &[1, 2, 3]).unwrap();
}
