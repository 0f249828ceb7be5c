//! Random interleavings of everything a cache can do, executed on a simulated arena.
//!
//! After every step, failed ones included: the books balance (law 1), every plan is a partition
//! (law 2), and every live request reads exactly its own tokens at their positions.

mod simulated_arena;

use kvweave_core::{
    Admission, CacheConfig, ErrorKind, HashKind, HeadClass, HeadClassMap, KvCache, KvDtype,
    KvShape, MarkedSegment, Mode, Request, Reuse,
};
use proptest::prelude::*;
use simulated_arena::{Arena, assert_partition};

#[derive(Clone, Debug)]
enum Step {
    Admit { parts: Vec<(u8, u8, u8)>, discover: bool, share: bool, reuse: u8, reserve: u8, ns: u8 },
    Rewrite { which: u8, at: u8, count: u8 },
    Append { which: u8, tokens: Vec<u32> },
    Commit { which: u8, back: u8, approximate: u8 },
    Freeze { which: u8, from: u8, name: u8 },
    Fork { which: u8 },
    Drop { which: u8 },
    Delete { name: u8 },
    Rebalance,
}

fn step() -> impl Strategy<Value = Step> {
    let part = (any::<u8>(), any::<u8>(), 0u8..4);
    let tokens = proptest::collection::vec(0u32..3, 1..6);
    prop_oneof![
        6 => (
            proptest::collection::vec(part, 1..4), any::<bool>(), any::<bool>(), 0u8..6, 0u8..9,
            0u8..2,
        )
            .prop_map(|(parts, discover, share, reuse, reserve, ns)| Step::Admit {
                parts, discover, share, reuse, reserve, ns,
            }),
        3 => (any::<u8>(), any::<u8>(), 1u8..6)
            .prop_map(|(which, at, count)| Step::Rewrite { which, at, count }),
        4 => (any::<u8>(), tokens).prop_map(|(which, tokens)| Step::Append { which, tokens }),
        5 => (any::<u8>(), 0u8..4, 0u8..30)
            .prop_map(|(which, back, approximate)| Step::Commit { which, back, approximate }),
        2 => (any::<u8>(), any::<u8>(), 0u8..3)
            .prop_map(|(which, from, name)| Step::Freeze { which, from, name }),
        2 => any::<u8>().prop_map(|which| Step::Fork { which }),
        4 => any::<u8>().prop_map(|which| Step::Drop { which }),
        1 => (0u8..3).prop_map(|name| Step::Delete { name }),
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

struct World {
    cache: KvCache,
    arena: Arena,
    live: Vec<Request>,
}

impl World {
    fn pick(&self, which: u8) -> Option<usize> {
        (!self.live.is_empty()).then(|| usize::from(which) % self.live.len())
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Admit { parts, discover, share, reuse, reserve, ns } => {
                self.admit(parts, *discover, *share, *reuse, *reserve, *ns);
            }
            Step::Rewrite { which, at, count } => self.rewrite(*which, *at, *count),
            Step::Append { which, tokens } => self.append(*which, tokens),
            Step::Commit { which, back, approximate } => {
                let Some(i) = self.pick(*which) else { return };
                let request = &mut self.live[i];
                let computed = request.len() - usize::from(*back).min(request.len());
                let first_segment = request.plan().prefix_tokens();
                let exact = match request.plan().segment_tokens() {
                    0 => computed,
                    _ => computed.min(first_segment),
                };
                let exact = exact.saturating_sub(usize::from(*approximate));
                request.commit(computed, exact).unwrap();
            }
            Step::Freeze { which, from, name } => {
                let Some(i) = self.pick(*which) else { return };
                let request = &mut self.live[i];
                let start = usize::from(*from) % request.len();
                let end = request.len();
                let _ = request.freeze(&format!("n{name}"), start..end);
            }
            Step::Fork { which } => {
                let Some(i) = self.pick(*which) else { return };
                let fork = self.live[i].fork().unwrap();
                self.live.push(fork);
            }
            Step::Drop { which } => {
                let Some(i) = self.pick(*which) else { return };
                drop(self.live.swap_remove(i));
            }
            Step::Delete { name } => {
                let _ = self.cache.delete_frozen(&format!("n{name}"), "a");
            }
            Step::Rebalance => self.cache.rebalance(),
        }
    }

    fn admit(
        &mut self,
        parts: &[(u8, u8, u8)],
        discover: bool,
        share: bool,
        reuse: u8,
        reserve: u8,
        ns: u8,
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
            ..Admission::new(&tokens)
        };
        match self.cache.admit(&admission) {
            Ok(mut request) => {
                assert_partition(&request, tokens.len());
                self.arena.prefill(&self.cache, &mut request);
                self.live.push(request);
            }
            Err(error) => assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}"),
        }
    }

    fn rewrite(&mut self, which: u8, at: u8, count: u8) {
        let Some(i) = self.pick(which) else { return };
        let request = &mut self.live[i];
        let len = request.len() as i32;
        let at = i32::from(at) % len;
        let positions: Vec<i32> = (at..len.min(at + i32::from(count))).collect();
        match request.make_writable(&positions, None) {
            Ok(()) => {
                self.arena.settle(&self.cache, request);
                self.arena.verify(&self.cache, request);
                self.arena.write(&self.cache, request, &positions);
            }
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::PoolFull { .. } | ErrorKind::NotWritable),
                "{error}"
            ),
        }
    }

    fn append(&mut self, which: u8, tokens: &[u32]) {
        let Some(i) = self.pick(which) else { return };
        let request = &mut self.live[i];
        let before = request.len() as i32;
        match request.append(tokens) {
            Ok(()) => {
                self.arena.settle(&self.cache, request);
                let positions: Vec<i32> = (before..request.len() as i32).collect();
                self.arena.write(&self.cache, request, &positions);
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}");
                assert_eq!(request.len() as i32, before);
            }
        }
    }

    fn verify(&self) {
        self.cache.check().unwrap();
        for request in &self.live {
            self.arena.verify(&self.cache, request);
        }
    }
}

fn mixed_heads(shape: &KvShape) -> HeadClassMap {
    let mut map = HeadClassMap::full(shape, "mixed");
    for (i, entry) in map.heads.iter_mut().enumerate() {
        if i % 3 == 1 {
            entry.class = HeadClass::Window { sink: 4, recent: 64 };
        }
    }
    map
}

fn run(steps: &[Step], hash: HashKind, blocks: u64, mixed: bool) {
    let shape = KvShape::new(2, 2, 8, 4, KvDtype::F32).unwrap();
    let mut config = CacheConfig::new(shape, shape.pages_for_blocks(blocks).unwrap());
    config.hash = hash;
    if mixed {
        config.heads = Some(mixed_heads(&shape));
        config.slab_pages = Some(7);
    }
    let cache = KvCache::new(config).unwrap();
    let mut world = World { cache, arena: Arena::default(), live: Vec::new() };
    for step in steps {
        world.run(step);
        world.verify();
    }
    world.live.clear();
    world.verify();
    let stats = world.cache.stats();
    for group in &stats.groups {
        assert_eq!(group.held, group.frozen, "something is held by nobody");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn plenty_of_room(steps in proptest::collection::vec(step(), 1..60)) {
        run(&steps, HashKind::Xxh3_128, 400, false);
    }

    #[test]
    fn hardly_any_room(steps in proptest::collection::vec(step(), 1..60)) {
        run(&steps, HashKind::Sha256, 24, false);
    }

    #[test]
    fn every_digest_collides(
        steps in proptest::collection::vec(step(), 1..60), bits in 0u8..3, blocks in 16u64..80,
    ) {
        run(&steps, HashKind::Truncated { bits }, blocks, false);
    }

    #[test]
    fn two_head_groups(
        steps in proptest::collection::vec(step(), 1..60), blocks in 20u64..120,
    ) {
        run(&steps, HashKind::Xxh3_128, blocks, true);
    }
}
