//! Tokens that were appended and taken back leave nothing behind; lists of entries follow.

mod window_cache;

use kvweave_core::{Admission, ErrorKind, GroupId, KvCache, Request};
use proptest::prelude::*;

use window_cache::cache_of;

fn settle(request: &mut Request) {
    for group in 0..request.tables() {
        request.take_copies_of(GroupId(group as u8)).unwrap();
    }
    request.finish_copies();
}

fn admit(cache: &KvCache, tokens: &[u32], reserve: usize) -> Request {
    let admission = Admission { reserve_tokens: reserve, ..Admission::new(tokens) };
    let mut request = cache.admit(&admission).unwrap();
    settle(&mut request);
    let len = request.len();
    request.advance(len, len).unwrap();
    settle(&mut request);
    request
}

fn append(request: &mut Request, tokens: &[u32]) {
    request.append(tokens).unwrap();
    settle(request);
}

fn text(from: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| from + i).collect()
}

type Told = (Vec<u32>, Vec<Vec<[i32; 4]>>, (u64, u64), Vec<usize>);

/// All that can be told of a request and of the pool, but for the numbers of blocks.
fn told(cache: &KvCache, request: &Request) -> Told {
    let parts = |&[_, begin, end, position, delta]: &[i32; 5]| [begin, end, position, delta];
    let table = |t: usize| request.entries_of(t).unwrap().iter().map(parts).collect();
    let entries = (0..request.tables()).map(table).collect();
    let held = cache.stats().groups.iter().map(|group| group.held).collect();
    (request.tokens().to_vec(), entries, request.kv_bytes(), held)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// append a; append b; take b back == append a: tokens, entries, blocks, and what is found.
    #[test]
    fn what_is_taken_back_was_never_there(
        windows in any::<bool>(),
        prompt in 1usize..30,
        reserve in 0usize..20,
        [a, b] in [0usize..14, 1usize..14],
        forked in any::<bool>(),
        commits in any::<bool>(),
    ) {
        let [cache, twin_cache] = [(); 2].map(|()| cache_of(60, windows));
        let tokens = text(0, prompt);
        let [mut request, mut twin] = [&cache, &twin_cache].map(|c| admit(c, &tokens, reserve));
        let (said, guessed) = (text(100, a), text(200, b));
        append(&mut request, &said);
        append(&mut twin, &said);
        if commits {
            let len = request.len();
            request.commit(len, len).unwrap();
            twin.commit(len, len).unwrap();
        }
        let forks = forked.then(|| (request.fork().unwrap(), twin.fork().unwrap()));
        append(&mut request, &guessed);
        let len = prompt + a;
        request.truncate(len).unwrap();
        cache.check().unwrap();
        // The row behind the text comes next: windows have moved on to it, and a block that a fork
        // shares was copied.
        twin.advance(len, len).unwrap();
        settle(&mut twin);
        if forks.is_none() {
            let (ours, theirs) = (told(&cache, &request), told(&twin_cache, &twin));
            prop_assert_eq!(&ours.0, &theirs.0);
            prop_assert_eq!(&ours.1, &theirs.1);
            if !windows {
                prop_assert_eq!(ours, theirs);
            }
        }
        // What comes next does as if nothing had been.
        append(&mut request, &text(300, b));
        append(&mut twin, &text(300, b));
        let (ours, theirs) = (told(&cache, &request), told(&twin_cache, &twin));
        prop_assert_eq!(&ours.0, &theirs.0);
        prop_assert_eq!(&ours.1, &theirs.1);
        if !windows {
            prop_assert_eq!(&ours, &theirs);
        }
        for (request, cache) in [(&mut request, &cache), (&mut twin, &twin_cache)] {
            let len = request.len();
            request.commit(len, len).unwrap();
            cache.check().unwrap();
        }
        let wrong = [tokens.clone(), said.clone(), guessed].concat();
        prop_assert_eq!(cache.lookup_prefix(&wrong, ""), twin_cache.lookup_prefix(&wrong, ""));
        prop_assert!(cache.lookup_prefix(&wrong, "") <= len);
        let right = [tokens, said, text(300, b)].concat();
        prop_assert_eq!(cache.lookup_prefix(&right, ""), twin_cache.lookup_prefix(&right, ""));
        drop((request, forks));
        cache.check().unwrap();
        prop_assert_eq!(cache.stats().groups.iter().map(|group| group.held).sum::<usize>(), 0);
    }

    /// Rounds of several tokens of which some are taken back, in a batch that comes and goes.
    #[test]
    fn lists_of_entries_follow(
        windows in any::<bool>(),
        prompts in prop::collection::vec(1usize..20, 1..4),
        rounds in prop::collection::vec(
            (prop::collection::vec((1usize..9, 0usize..9), 4), any::<u8>(), 0usize..12), 1..20),
    ) {
        let cache = cache_of(200, windows);
        let admitted = |(i, &n): (usize, &usize)| admit(&cache, &text(1000 * i as u32, n), 0);
        let mut live: Vec<Request> = prompts.iter().enumerate().map(admitted).collect();
        let mut rows = cache.decode_rows();
        let mut of: Vec<usize> = live.iter().map(|_| rows.join()).collect();
        let mut array: Vec<[i32; 5]> = Vec::new();
        let mut reloaded = 0;
        for (sizes, forks, leaves) in rounds {
            if let Some(row) = of.get_mut(leaves) {
                rows.leave(*row).unwrap();
                *row = rows.join();
            }
            let _fork = live.get(usize::from(forks)).map(|request| request.fork().unwrap());
            let counts: Vec<usize> = sizes[..live.len()].iter().map(|size| size.0).collect();
            let all: usize = counts.iter().sum();
            let known: Vec<usize> = live.iter().map(Request::len).collect();
            let mut requests: Vec<&mut Request> = live.iter_mut().collect();
            let step = rows.steps(&mut requests, &of, &vec![7; all], &counts).unwrap();
            array.resize(rows.entries(), [i32::MIN; 5]);
            let mut places = step.moves.places.clone();
            places.sort_unstable();
            places.dedup();
            prop_assert_eq!(places.len(), step.moves.places.len());
            for (&place, &entry) in step.moves.places.iter().zip(&step.moves.entries) {
                array[place as usize] = entry;
            }
            reloaded += places.len();
            let mut at = 0;
            for (number, request) in live.iter_mut().enumerate() {
                let new: Vec<i32> = (known[number]..request.len()).map(|p| p as i32).collect();
                prop_assert_eq!(&step.positions[at..at + new.len()], &new[..]);
                for table in 0..rows.tables() {
                    let [from, to] = step.spans[number * rows.tables() + table];
                    let listed = &array[from as usize..to as usize];
                    let kept = request.entries_of(table).unwrap();
                    prop_assert_eq!(listed, &kept[..], "table {}", table);
                    let slots = &step.slots[table * all + at..][..new.len()];
                    prop_assert_eq!(slots, &request.slots_of(table, &new).unwrap()[..]);
                }
                at += new.len();
                request.finish_copies();
                let (count, accepted) = sizes[number];
                let len = known[number] + 1 + accepted.min(count - 1);
                request.set_tokens(known[number], &text(9000, len - known[number])).unwrap();
                request.truncate(len).unwrap();
            }
            cache.check().unwrap();
        }
        prop_assert!(reloaded > 0);
    }
}

#[test]
fn a_round_lists_only_what_is_new() {
    let cache = cache_of(400, false);
    let mut request = admit(&cache, &text(0, 400), 0);
    let mut rows = cache.decode_rows();
    let row = rows.join();
    let mut listed_anew = 0;
    for _ in 0..60 {
        let step = rows.steps(&mut [&mut request], &[row], &[7; 5], &[5]).unwrap();
        listed_anew += usize::from(step.moves.places.len() > 3);
        let len = request.len();
        request.truncate(len - 3).unwrap();
    }
    // At first, and once where its part of the array was full.
    assert!(listed_anew <= 2, "{listed_anew} times");
}

#[test]
fn what_cannot_be_taken_back_is_refused_and_stays() {
    let cache = cache_of(60, true);
    let mut request = admit(&cache, &text(0, 9), 0);
    append(&mut request, &text(100, 6));
    let before = told(&cache, &request);
    let kind = |request: &mut Request, len| request.truncate(len).unwrap_err().kind();
    assert_eq!(kind(&mut request, 16), ErrorKind::OutOfRange, "more than there are");
    assert_eq!(kind(&mut request, 8), ErrorKind::OutOfRange, "tokens of the prompt");
    assert_eq!(request.set_tokens(8, &[1]).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.set_tokens(14, &[1, 2]).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.set_tokens(usize::MAX, &[1]).unwrap_err().kind(), ErrorKind::OutOfRange);
    request.truncate(15).unwrap();
    assert_eq!(before, told(&cache, &request));
    // Windows have moved on to the first of the newest.
    append(&mut request, &[1, 2]);
    assert_eq!(kind(&mut request, 14), ErrorKind::OutOfRange, "behind what windows keep");
    request.commit(17, 17).unwrap();
    assert_eq!(kind(&mut request, 16), ErrorKind::NotWritable);
    assert_eq!(request.set_tokens(16, &[1]).unwrap_err().kind(), ErrorKind::NotWritable);
    let fork = request.fork().unwrap();
    request.append(&[1, 2]).unwrap();
    assert_eq!(kind(&mut request, 17), ErrorKind::InvalidArgument, "copies to be taken");
    settle(&mut request);
    request.truncate(17).unwrap();
    assert_eq!(request.tokens(), fork.tokens());
    cache.check().unwrap();
}

#[test]
fn a_long_run_that_finds_no_room_changes_nothing() {
    let cache = cache_of(8, false);
    let mut request = admit(&cache, &text(0, 9), 0);
    let mut rows = cache.decode_rows();
    let row = rows.join();
    let before = told(&cache, &request);
    let refused = rows.steps(&mut [&mut request], &[row], &[7; 40], &[40]).unwrap_err();
    assert!(matches!(refused.error.kind(), ErrorKind::PoolFull { .. }), "{refused}");
    assert_eq!(before, told(&cache, &request));
    rows.steps(&mut [&mut request], &[row], &[7], &[1]).unwrap();
    let wrong = rows.steps(&mut [&mut request], &[row], &[], &[0]).unwrap_err();
    assert_eq!(wrong.error.kind(), ErrorKind::InvalidArgument);
    let wrong = rows.steps(&mut [&mut request], &[row], &[1; 3], &[2]).unwrap_err();
    assert!(wrong.to_string().contains("tokens: expected 2 of them, got 3"), "{wrong}");
    let wrong = rows.steps(&mut [&mut request], &[row], &[1; 3], &[2, 1]).unwrap_err();
    assert!(wrong.to_string().contains("counts: expected 1 of them, got 2"), "{wrong}");
}
