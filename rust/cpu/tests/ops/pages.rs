//! Pages that a decode step reads: scored by their bounds, and the best of them selected.

use kvweave_core::ops::{
    Bounds, Fp8Bounds, Fp8E4m3, KvView, OpError, OpErrorKind, PageScore, ScorePages, SelectPages,
    SharedScore, fp8_vectors, round_bounds,
};
use proptest::prelude::*;

use crate::match_reference::cases;
use crate::paged::{Case, POISON, Random, World, assert_close};

type Score = fn(ScorePages<'_, f32>) -> Result<(), OpError>;
type Select = fn(SelectPages<'_>) -> Result<(), OpError>;

const SELECTS: [Select; 2] = [kvweave_reference::select_pages, kvweave_cpu::select_pages];
const SCORES: [Score; 2] = [kvweave_reference::score_pages, kvweave_cpu::score_pages];
const KINDS: [PageScore; 2] = [PageScore::MinMax, PageScore::Mean];
const SHARED: [SharedScore; 2] = [SharedScore::Highest, SharedScore::Sum];

/// One row a request, so that each is a decode step.
fn world(case: &Case) -> World<f32> {
    World::new(&Case { rows: vec![1; case.lens.len()], window: None, ..case.clone() })
}

fn pages_of(world: &World<f32>) -> usize {
    world.cache.len() / world.geometry.block_stride
}

/// Bounds [pages, 3, D] of the keys that entries list; of all other pages NaN.
fn bounds_of(world: &World<f32>) -> Vec<f32> {
    let dim = world.geometry.head_dim;
    let mut bounds = vec![f32::NAN; pages_of(world) * 3 * dim];
    for &[block, begin, end, ..] in &world.entries {
        for head in 0..world.geometry.kv_heads {
            let page = block as usize + world.layer * world.geometry.kv_heads + head;
            for d in 0..dim {
                let key = |slot| world.cache[world.vectors(block, head, slot)[0] + d];
                let keys = || (begin..end).map(key);
                let mean = keys().map(f64::from).sum::<f64>() / f64::from(end - begin);
                bounds[page * 3 * dim + d] = keys().fold(f32::INFINITY, f32::min);
                bounds[(page * 3 + 1) * dim + d] = keys().fold(f32::NEG_INFINITY, f32::max);
                bounds[(page * 3 + 2) * dim + d] = mean as f32;
            }
        }
    }
    bounds
}

/// The same bounds as e4m3 keeps them: numbers and scales.
fn rounded(bounds: &[f32], dim: usize, score: PageScore) -> (Vec<Fp8E4m3>, Vec<u8>) {
    let (row, pages) = (fp8_vectors(score) * dim, bounds.len() / (3 * dim));
    let mut numbers = vec![Fp8E4m3::default(); pages * row];
    let of_pages = bounds.chunks_exact(3 * dim).zip(numbers.chunks_exact_mut(row));
    let scales = of_pages.map(|(exact, kept)| round_bounds(score, exact, kept).to_bits()).collect();
    (numbers, scales)
}

/// Scores [B, G, S] and counts [B, G].
fn score(
    world: &World<f32>,
    bounds: Bounds<'_>,
    kind: (PageScore, SharedScore),
    run: Score,
) -> Result<(Vec<f32>, Vec<i32>), OpError> {
    let kv = world.kv();
    let cache = vec![(); world.cache.len()];
    let spans = world.entry_offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
    let width = spans.max().unwrap_or(0) + 2;
    let heads = world.geometry.kv_heads * (world.entry_offsets.len() - 1);
    let (mut scores, mut counts) = (vec![POISON; heads * width], vec![-1; heads]);
    run(ScorePages {
        queries: world.queries(),
        kv: KvView {
            cache: &cache,
            geometry: kv.geometry,
            layer: kv.layer,
            entries: kv.entries,
            reach: kv.reach,
            scales: kv.scales,
        },
        scoring: world.scoring(),
        entry_offsets: &world.entry_offsets,
        bounds,
        score: kind.0,
        shared: kind.1,
        scores: &mut scores,
        width,
        counts: &mut counts,
    })?;
    Ok((scores, counts))
}

/// Logits of one query head's key, by hand: [slot] of an entry.
fn logits(world: &World<f32>, request: usize, head: usize, entry: [i32; 5]) -> Vec<f64> {
    let (dim, group) = (world.geometry.head_dim, world.heads / world.geometry.kv_heads);
    let q = world.queries().vectors.vector(request, head);
    let [block, begin, end, _, delta] = entry;
    let logit = |slot: i32| {
        let start = world.vectors(block, head / group, slot)[0];
        let mut key: Vec<f64> =
            world.cache[start..start + dim].iter().map(|&x| f64::from(x)).collect();
        for (i, &frequency) in world.rope.inv_freq(world.layer).iter().enumerate() {
            let (sin, cos) = (f64::from(delta) * f64::from(frequency)).sin_cos();
            let (a, b) = world.rope.pairing().elements(i, world.rope.pairs());
            (key[a], key[b]) = (key[a] * cos - key[b] * sin, key[a] * sin + key[b] * cos);
        }
        let dot: f64 = q.iter().zip(&key).map(|(&q, k)| f64::from(q) * k).sum();
        let logit = dot * f64::from(world.scale);
        world.softcap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh())
    };
    (begin..end).map(logit).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn score_pages(case in cases()) {
        let world = world(&case);
        let bounds = bounds_of(&world);
        for kind in KINDS.into_iter().flat_map(|kind| SHARED.map(|shared| (kind, shared))) {
            let dim = world.geometry.head_dim;
            let (numbers, scales) = rounded(&bounds, dim, kind.0);
            let fp8 = Fp8Bounds { score: kind.0, numbers: &numbers[..], scales: &scales[..] };
            for bounds in [Bounds::F32(&bounds), Bounds::Fp8(fp8)] {
                let (expected, counts) = score(&world, bounds, kind, SCORES[0]).unwrap();
                let (got, also) = score(&world, bounds, kind, SCORES[1]).unwrap();
                // Sums of as many products as an element has, rounded one by one.
                let slack = 2e-5 * world.scale * (dim * case.group) as f32;
                assert_close(&got, &expected, slack, "scores");
                prop_assert_eq!(&counts, &also);
            }
        }
    }

    /// No key scores higher than its page; a page's mean key scores the mean of its keys.
    #[test]
    fn scores_are_bounds_of_logits(case in cases()) {
        let world = World { softcap: None, ..world(&case) };
        let bounds = bounds_of(&world);
        let heads = world.geometry.kv_heads;
        let exact = Bounds::F32(&bounds);
        let scored = |kind, shared| score(&world, exact, (kind, shared), SCORES[0]).unwrap();
        let (highest, counts) = scored(PageScore::MinMax, SharedScore::Highest);
        let (mean, _) = scored(PageScore::Mean, SharedScore::Sum);
        let width = highest.len() / counts.len();
        for request in 0..world.entry_offsets.len() - 1 {
            let ends = [0, 1].map(|i| world.entry_offsets[request + i] as usize);
            let span = ends[0]..ends[1];
            for head in 0..heads {
                let at = request * heads + head;
                prop_assert_eq!(counts[at] as usize, span.len());
                for (i, &entry) in world.entries[span.clone()].iter().enumerate() {
                    let of_group = (head * case.group..(head + 1) * case.group)
                        .map(|head| logits(&world, request, head, entry));
                    let sums: Vec<(f64, f64)> = of_group
                        .map(|all| {
                            let top = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                            (top, all.iter().sum::<f64>() / all.len() as f64)
                        })
                        .collect();
                    let top = sums.iter().map(|sum| sum.0).fold(f64::NEG_INFINITY, f64::max);
                    let whole: f64 = sums.iter().map(|sum| sum.1).sum();
                    let slack = 1e-5 * (1.0 + whole.abs() + top.abs());
                    prop_assert!(f64::from(highest[at * width + i]) >= top - slack);
                    let got = f64::from(mean[at * width + i]);
                    prop_assert!((got - whole).abs() <= slack, "{got} {whole}");
                }
                prop_assert_eq!(highest[at * width + span.len()], POISON);
            }
        }
    }

    #[test]
    fn a_bound_that_is_nan_is_no_number(case in cases(), of_mean in any::<bool>()) {
        let world = world(&case);
        let mut bounds = bounds_of(&world);
        let Some(&[block, ..]) = world.entries.first() else { return Ok(()) };
        let dim = world.geometry.head_dim;
        let page = block as usize + world.layer * world.geometry.kv_heads;
        bounds[(page * 3 + if of_mean { 2 } else { 1 }) * dim] = f32::NAN;
        let kind = if of_mean { PageScore::Mean } else { PageScore::MinMax };
        for (run, shared) in SCORES.into_iter().flat_map(|run| SHARED.map(|s| (run, s))) {
            let exact = Bounds::F32(&bounds);
            let (scores, counts) = score(&world, exact, (kind, shared), run).unwrap();
            let first = counts.iter().position(|&count| count > 0).unwrap();
            prop_assert!(scores[first * (scores.len() / counts.len())].is_nan());
        }
    }
}

/// Rows of scores with many that are equal, and some that are no numbers.
#[derive(Clone, Debug)]
struct Rows {
    scores: Vec<f32>,
    width: usize,
    counts: Vec<i32>,
    budgets: Vec<i32>,
    sink: usize,
    recent: usize,
    most: usize,
}

impl Rows {
    fn of(seed: u64, rows: usize, width: usize, levels: usize) -> Self {
        let mut random = Random(seed);
        let score = |random: &mut Random| match random.below(40) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => -0.0,
            _ => (random.below(levels) as f32 - levels as f32 / 2.0) / 3.0,
        };
        let scores = (0..rows * width).map(|_| score(&mut random)).collect();
        let (sink, recent) = (random.below(4), random.below(4));
        let most = sink + recent + random.below(width + 1);
        let between =
            |random: &mut Random, a: usize, b: usize| (a + random.below(b - a + 1)) as i32;
        let counts = (0..rows).map(|_| between(&mut random, 0, width)).collect();
        let budgets = (0..rows).map(|_| between(&mut random, sink + recent, most)).collect();
        Self { scores, width, counts, budgets, sink, recent, most }
    }

    fn select(&self, run: Select) -> Result<(Vec<i32>, Vec<i32>), OpError> {
        let rows = self.counts.len();
        let (mut pages, mut selected) = (vec![-7; rows * self.most], vec![-7; rows]);
        run(SelectPages {
            scores: &self.scores,
            width: self.width,
            counts: &self.counts,
            budgets: &self.budgets,
            sink: self.sink,
            recent: self.recent,
            pages: &mut pages,
            most: self.most,
            selected: &mut selected,
        })?;
        Ok((pages, selected))
    }

    fn row(&self, row: usize) -> Self {
        let scores = self.scores[row * self.width..][..self.width].to_vec();
        let (counts, budgets) = (vec![self.counts[row]], vec![self.budgets[row]]);
        Self { scores, counts, budgets, ..self.clone() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// What is selected is as much as may be, in order, and nothing else comes before it.
    #[test]
    fn select_pages(seed in any::<u64>(), sizes in (0usize..6, 1usize..300, 1usize..50)) {
        let (count, width, levels) = sizes;
        let rows = Rows::of(seed, count, width, levels);
        let (pages, selected) = rows.select(SELECTS[0]).unwrap();
        prop_assert_eq!(rows.select(SELECTS[1]).unwrap(), (pages.clone(), selected.clone()));
        for row in 0..rows.counts.len() {
            let (count, budget) = (rows.counts[row] as usize, rows.budgets[row] as usize);
            let of_row = &pages[row * rows.most..][..rows.most];
            let (chosen, rest) = of_row.split_at(selected[row] as usize);
            prop_assert_eq!(chosen.len(), count.min(budget));
            prop_assert!(rest.iter().all(|&page| page == -1));
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            let has = |page: usize| chosen.contains(&(page as i32));
            let always = |page: usize| page < rows.sink || page + rows.recent >= count;
            prop_assert!((0..count).all(|page| has(page) || !always(page)));
            let score = |page: usize| (rows.scores[row * width + page], page);
            for left in (0..count).filter(|&page| !has(page)) {
                for taken in (0..count).filter(|&page| has(page) && !always(page)) {
                    prop_assert!(SelectPages::before(score(taken), score(left)).is_lt());
                }
            }
            // Whatever else is in the batch.
            for run in SELECTS {
                let alone = rows.row(row).select(run).unwrap();
                prop_assert_eq!(&alone.0, of_row);
            }
        }
    }
}

#[test]
fn long_rows_are_selected_from() {
    let rows = Rows::of(3, 4, 20_000, 900);
    assert_eq!(rows.select(SELECTS[0]).unwrap(), rows.select(SELECTS[1]).unwrap());
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let good = Rows::of(1, 3, 8, 4);
    let bad: [(&str, Rows); 6] = [
        ("scores", Rows { width: 9, ..good.clone() }),
        ("counts", Rows { counts: vec![0, 9, 1], ..good.clone() }),
        ("counts", Rows { counts: vec![0, -1, 1], ..good.clone() }),
        ("budgets", Rows { budgets: vec![good.most as i32 + 1; 3], ..good.clone() }),
        ("budgets", Rows { budgets: good.budgets[..2].to_vec(), ..good.clone() }),
        ("budgets", Rows { sink: usize::MAX, ..good.clone() }),
    ];
    for (what, rows) in bad {
        for run in SELECTS {
            assert_eq!(rows.select(run).unwrap_err().what(), what);
        }
    }
}

#[test]
fn pages_without_bounds_are_refused() {
    let case = Case {
        seed: 5,
        head_dim: 8,
        kv_heads: 2,
        group: 2,
        page_tokens: 8,
        lens: vec![40, 3],
        rows: vec![],
        window: None,
        softcap: None,
        interleaved: false,
        deltas: vec![0, 3],
        ragged: false,
    };
    let world = world(&case);
    let bounds = bounds_of(&world);
    let kind = (PageScore::Mean, SharedScore::Sum);
    for run in SCORES {
        let few = score(&world, Bounds::F32(&bounds[..3 * 8]), kind, run).unwrap_err();
        assert_eq!((few.kind(), few.what()), (OpErrorKind::OutOfRange, "bounds"));
        let odd = score(&world, Bounds::F32(&bounds[1..]), kind, run).unwrap_err();
        assert_eq!((odd.kind(), odd.what()), (OpErrorKind::Shape, "bounds"));
    }
}
