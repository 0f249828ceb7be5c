//! Random interleavings of everything a cache can do, executed on a simulated arena.
//!
//! After every step, failed ones included: the books balance (law 1), every plan is a partition
//! (law 2), and every head of every live request reads exactly its own tokens at their positions.

mod simulated_arena;
mod spilled_blocks;

use kvweave_core::{
    Admission, CacheConfig, Error, ErrorKind, GroupId, HashKind, HeadClass, HeadClassMap, KvCache,
    KvDtype, KvShape, MarkedSegment, Mode, RankedBy, Request, Reuse,
};
use proptest::prelude::*;
use simulated_arena::{Arena, assert_partition};
use spilled_blocks::{bring_back, is_spilled, spill};

#[derive(Clone, Debug)]
enum Step {
    Admit {
        parts: Vec<(u8, u8, u8)>,
        discover: bool,
        share: bool,
        reuse: u8,
        reserve: u8,
        ns: u8,
        chunk: u8,
    },
    Advance {
        which: u8,
    },
    Promote {
        which: u8,
        head: u8,
    },
    Rewrite {
        which: u8,
        at: u8,
        count: u8,
        first_only: bool,
    },
    Append {
        which: u8,
        tokens: Vec<u32>,
    },
    Commit {
        which: u8,
        back: u8,
        approximate: u8,
    },
    Freeze {
        which: u8,
        from: u8,
        name: u8,
    },
    Fork {
        which: u8,
    },
    Spill {
        which: u8,
        blocks: u8,
        slots: u8,
    },
    BringBack {
        which: u8,
    },
    Drop {
        which: u8,
    },
    Delete {
        name: u8,
    },
    Quota {
        ns: u8,
        blocks: Option<u8>,
    },
    Rebalance,
}

fn step() -> impl Strategy<Value = Step> {
    let part = (any::<u8>(), any::<u8>(), 0u8..4);
    let tokens = proptest::collection::vec(0u32..3, 1..6);
    prop_oneof![
        6 => (
            proptest::collection::vec(part, 1..4), any::<bool>(), any::<bool>(), 0u8..6, 0u8..9,
            0u8..2, 0u8..30,
        )
            .prop_map(|(parts, discover, share, reuse, reserve, ns, chunk)| Step::Admit {
                parts, discover, share, reuse, reserve, ns, chunk: chunk.saturating_sub(10),
            }),
        6 => any::<u8>().prop_map(|which| Step::Advance { which }),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(which, head)| Step::Promote { which, head }),
        3 => (any::<u8>(), any::<u8>(), 1u8..6, any::<bool>())
            .prop_map(|(which, at, count, first_only)| Step::Rewrite {
                which, at, count, first_only,
            }),
        4 => (any::<u8>(), tokens).prop_map(|(which, tokens)| Step::Append { which, tokens }),
        5 => (any::<u8>(), 0u8..4, 0u8..30)
            .prop_map(|(which, back, approximate)| Step::Commit { which, back, approximate }),
        2 => (any::<u8>(), any::<u8>(), 0u8..3)
            .prop_map(|(which, from, name)| Step::Freeze { which, from, name }),
        2 => any::<u8>().prop_map(|which| Step::Fork { which }),
        4 => (any::<u8>(), 0u8..8, 0u8..6)
            .prop_map(|(which, blocks, slots)| Step::Spill { which, blocks, slots }),
        2 => any::<u8>().prop_map(|which| Step::BringBack { which }),
        4 => any::<u8>().prop_map(|which| Step::Drop { which }),
        1 => (0u8..3).prop_map(|name| Step::Delete { name }),
        1 => (0u8..2, proptest::option::of(0u8..12))
            .prop_map(|(ns, blocks)| Step::Quota { ns, blocks }),
        1 => Just(Step::Rebalance),
    ]
}

const NAMESPACES: [&str; 2] = ["a", "b"];

/// A few texts over a tiny alphabet, so that prompts share heads, middles and tails.
fn text(which: u8) -> Vec<u32> {
    let mut state = u64::from(which % 5) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as u32 % 5
    };
    (0..40).map(|_| next()).collect()
}

/// A request, of which rows before `done` are computed, `chunk` at a time.
struct Live {
    request: Request,
    done: usize,
    chunk: usize,
}

struct World {
    cache: KvCache,
    arena: Arena,
    live: Vec<Live>,
    /// Blocks of the host's memory that were ever given.
    home: i32,
}

fn expect_kind(outcome: &Result<(), Error>, allowed: &[ErrorKind]) {
    if let Err(error) = outcome {
        let full = matches!(error.kind(), ErrorKind::PoolFull { .. });
        assert!(full || allowed.contains(&error.kind()), "{error}");
    }
}

impl World {
    fn pick(&self, which: u8) -> Option<usize> {
        (!self.live.is_empty()).then(|| usize::from(which) % self.live.len())
    }

    fn run(&mut self, step: &Step) {
        let which = match step {
            Step::Admit { parts, discover, share, reuse, reserve, ns, chunk } => {
                self.admit(parts, (*discover, *share, *reuse, *reserve, *ns), *chunk);
                return;
            }
            Step::Delete { name } => {
                let _ = self.cache.delete_frozen(&format!("n{name}"), "a");
                return;
            }
            Step::Quota { ns, blocks } => {
                let blocks = blocks.map(usize::from);
                return self.cache.set_quota(NAMESPACES[usize::from(*ns)], blocks).unwrap();
            }
            Step::Rebalance => return self.cache.rebalance(),
            Step::Advance { which }
            | Step::Promote { which, .. }
            | Step::Rewrite { which, .. }
            | Step::Append { which, .. }
            | Step::Commit { which, .. }
            | Step::Freeze { which, .. }
            | Step::Fork { which }
            | Step::Spill { which, .. }
            | Step::BringBack { which }
            | Step::Drop { which } => *which,
        };
        let Some(i) = self.pick(which) else { return };
        match step {
            Step::Advance { .. } => self.advance(i),
            Step::Promote { head, .. } => self.promote(i, *head),
            Step::Rewrite { at, count, first_only, .. } => {
                self.rewrite(i, *at, *count, *first_only)
            }
            Step::Append { tokens, .. } => self.append(i, tokens),
            Step::Spill { blocks, slots, .. } => {
                let Live { request, done, .. } = &mut self.live[i];
                let wanted = (usize::from(*blocks), usize::from(*slots));
                if *done == request.len() {
                    spill(&self.cache, &mut self.arena, request, &mut self.home, wanted);
                }
            }
            Step::BringBack { .. } => {
                bring_back(&self.cache, &mut self.arena, &mut self.live[i].request);
            }
            Step::Commit { back, approximate, .. } => self.commit(i, *back, *approximate),
            Step::Freeze { from, name, .. } => {
                let request = &mut self.live[i].request;
                let start = usize::from(*from) % request.len();
                let _ = request.freeze(&format!("n{name}"), start..request.len());
            }
            Step::Fork { .. } => {
                let Live { request, done, chunk } = &self.live[i];
                let whole = *done == request.len();
                match request.fork() {
                    Ok(request) if whole => {
                        self.live.push(Live { request, done: *done, chunk: *chunk });
                    }
                    Ok(_) => {}
                    Err(error) => {
                        // Chunks end with the advance after the last one.
                        let in_chunks = *chunk > 0 && request.len() == request.plan().tokens;
                        let may = !request.promoted().is_empty() || is_spilled(request);
                        assert!(in_chunks || may, "{error}");
                    }
                }
            }
            _ => drop(self.live.swap_remove(i)),
        }
    }

    fn commit(&mut self, i: usize, back: u8, approximate: u8) {
        let Live { request, done, .. } = &mut self.live[i];
        let computed = *done - usize::from(back).min(*done);
        let first_segment = request.plan().prefix_tokens();
        let exact = match request.plan().segment_tokens() {
            0 => computed,
            _ => computed.min(first_segment),
        };
        let exact = exact.saturating_sub(usize::from(approximate));
        let outcome = request.commit(computed, exact);
        assert_eq!(outcome.is_err(), is_spilled(request), "{outcome:?}");
    }

    /// The next chunk, or all that is left to do; never refused.
    fn advance(&mut self, i: usize) {
        let Live { request, done, chunk } = &mut self.live[i];
        let end = request.len().min(*done + (*chunk).max(1));
        request.advance(*done, end).unwrap();
        self.arena.settle(&self.cache, request, &[]);
        let chunk = *done as i32..end as i32;
        let computed = |position: &i32| {
            let all = request.plan().rows();
            *position >= request.plan().tokens as i32 || all.binary_search(position).is_ok()
        };
        let rows: Vec<i32> = chunk.filter(computed).collect();
        self.arena.write(&self.cache, request, &rows, None);
        self.arena.verify(&self.cache, request, *done..end);
        *done = end;
    }

    fn promote(&mut self, i: usize, head: u8) {
        let shape = self.cache.config().shape;
        let head = u32::from(head) % (shape.layers() * shape.kv_heads());
        let (layer, head) = (head / shape.kv_heads(), head % shape.kv_heads());
        let request = &mut self.live[i].request;
        let before = request.entries();
        match request.promote(layer, head) {
            Ok(copies) => {
                self.arena.settle(&self.cache, request, &copies);
                assert_eq!(request.promoted().last(), Some(&(layer, head)));
            }
            Err(error) => {
                let full = matches!(error.kind(), ErrorKind::PoolFull { .. });
                assert!(full || error.kind() == ErrorKind::InvalidArgument, "{error}");
                assert_eq!(request.entries(), before);
            }
        }
    }

    fn admit(
        &mut self,
        parts: &[(u8, u8, u8)],
        (discover, share, reuse, reserve, ns): (bool, bool, u8, u8, u8),
        chunk: u8,
    ) {
        let mut tokens = Vec::new();
        let mut marked = Vec::new();
        for &(which, from, mark) in parts {
            let source = text(which);
            let from = usize::from(from) % 12;
            let start = tokens.len();
            tokens.extend_from_slice(&source[from..from + 5 + usize::from(which) % 23]);
            if mark < 2 {
                let namespace = NAMESPACES[usize::from(mark)];
                marked.push(MarkedSegment { start, end: tokens.len(), namespace });
            }
        }
        let admission = Admission {
            namespace: NAMESPACES[usize::from(ns)],
            marked: &marked,
            discover,
            mode: if share { Mode::Share } else { Mode::Materialise },
            reuse: match reuse {
                0 => Reuse::None,
                1 => Reuse::Prefix,
                _ => Reuse::Segments,
            },
            reserve_tokens: usize::from(reserve),
            chunk_tokens: usize::from(chunk),
            ..Admission::new(&tokens)
        };
        let before = self.cache.stats();
        match self.cache.admit(&admission) {
            Ok(mut request) => {
                assert_partition(&request, tokens.len());
                let (mut done, chunk) = (request.plan().prefix_tokens(), usize::from(chunk));
                if chunk == 0 {
                    self.arena.prefill(&self.cache, &mut request);
                    done = tokens.len();
                } else {
                    self.arena.settle(&self.cache, &mut request, &[]);
                }
                self.live.push(Live { request, done, chunk });
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}");
                assert_eq!(self.cache.stats(), before, "a refused admission changed something");
            }
        }
    }

    fn rewrite(&mut self, i: usize, at: u8, count: u8, first_only: bool) {
        let Live { request, done, .. } = &mut self.live[i];
        if *done == 0 {
            return;
        }
        let end = *done as i32;
        let at = i32::from(at) % end;
        let positions: Vec<i32> = (at..end.min(at + i32::from(count))).collect();
        let outcome = request.make_writable(&positions, first_only.then_some(GroupId(0)));
        if is_spilled(request) {
            assert!(outcome.is_err());
            return;
        }
        expect_kind(&outcome, &[ErrorKind::NotWritable]);
        if outcome.is_ok() {
            self.arena.settle(&self.cache, request, &[]);
            self.arena.verify(&self.cache, request, *done..*done);
            self.arena.write(&self.cache, request, &positions, first_only.then_some(0));
        }
    }

    fn append(&mut self, i: usize, tokens: &[u32]) {
        let Live { request, done, .. } = &mut self.live[i];
        if *done < request.len() {
            return;
        }
        let (before, stats) = (request.len(), self.cache.stats());
        let outcome = request.append(tokens);
        expect_kind(&outcome, &[]);
        if outcome.is_ok() {
            self.arena.settle(&self.cache, request, &[]);
            let positions: Vec<i32> = (before as i32..request.len() as i32).collect();
            self.arena.write(&self.cache, request, &positions, None);
            *done = request.len();
        } else {
            assert_eq!((request.len(), self.cache.stats()), (before, stats));
        }
        self.arena.verify(&self.cache, request, before..*done);
    }

    fn verify(&self) {
        self.cache.check().unwrap();
        for Live { request, done, .. } in &self.live {
            self.arena.verify(&self.cache, request, *done..*done);
        }
    }
}

const SINK: HeadClass = HeadClass::Window { sink: 3, recent: 5 };
const NEAR: HeadClass = HeadClass::Window { sink: 0, recent: 9 };
const BEST: HeadClass =
    HeadClass::TopK { pages: 3, rerank_every: 2, score: RankedBy::MinMax, estimate: false };

/// Classes of the four heads; none for a cache without a head map.
fn run(steps: &[Step], hash: HashKind, blocks: u64, classes: Option<[HeadClass; 4]>) {
    let shape = KvShape::new(2, 2, 8, 4, KvDtype::F32).unwrap();
    let mut config = CacheConfig::new(shape, 0).sized_for(blocks).unwrap();
    config.hash = hash;
    if let Some(classes) = classes {
        let mut map = HeadClassMap::full(&shape, "mixed");
        for (entry, class) in map.heads.iter_mut().zip(classes) {
            entry.class = class;
        }
        config.heads = Some(map);
        config.slab_pages = Some(7);
    }
    let cache = KvCache::new(config).unwrap();
    let mut world = World { cache, arena: Arena::default(), live: Vec::new(), home: 0 };
    for step in steps {
        world.run(step);
        world.verify();
    }
    world.live.clear();
    world.verify();
    for group in &world.cache.stats().groups {
        assert_eq!(group.held, group.frozen, "something is held by nobody");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn plenty_of_room(steps in proptest::collection::vec(step(), 1..100)) {
        run(&steps, HashKind::Xxh3_128, 400, None);
    }

    #[test]
    fn hardly_any_room(steps in proptest::collection::vec(step(), 1..100)) {
        run(&steps, HashKind::Sha256, 24, None);
    }

    #[test]
    fn every_digest_collides(
        steps in proptest::collection::vec(step(), 1..100), bits in 0u8..3, blocks in 16u64..80,
    ) {
        run(&steps, HashKind::Truncated { bits }, blocks, None);
    }

    #[test]
    fn two_head_groups(
        steps in proptest::collection::vec(step(), 1..100), blocks in 20u64..120,
    ) {
        run(&steps, HashKind::Xxh3_128, blocks, Some([HeadClass::Full, SINK, SINK, SINK]));
    }

    #[test]
    fn three_head_groups(
        steps in proptest::collection::vec(step(), 1..100), blocks in 20u64..120,
    ) {
        run(&steps, HashKind::Xxh3_128, blocks, Some([NEAR, HeadClass::Full, NEAR, SINK]));
    }

    #[test]
    fn heads_that_choose(
        steps in proptest::collection::vec(step(), 1..100), blocks in 20u64..120,
    ) {
        run(&steps, HashKind::Xxh3_128, blocks, Some([BEST, HeadClass::Full, BEST, SINK]));
    }

    #[test]
    fn heads_that_choose_alone(
        steps in proptest::collection::vec(step(), 1..100), blocks in 20u64..120,
    ) {
        run(&steps, HashKind::Xxh3_128, blocks, Some([BEST; 4]));
    }

    #[test]
    fn windows_alone(
        steps in proptest::collection::vec(step(), 1..100), blocks in 20u64..120,
    ) {
        run(&steps, HashKind::Xxh3_128, blocks, Some([NEAR, SINK, SINK, SINK]));
    }

    #[test]
    fn one_window_for_all(
        steps in proptest::collection::vec(step(), 1..100), blocks in 20u64..120, bits in 0u8..9,
    ) {
        run(&steps, HashKind::Truncated { bits }, blocks, Some([SINK; 4]));
    }
}
