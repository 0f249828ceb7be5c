//! What the bases of a text are made of: mean and covariance of its keys and values, as they come.

use kvweave_core::ops::{Element, OpError, PackedFormat, Packs, RopeTable};
use rayon::prelude::*;

use crate::planes_basis::{Spread, metric, planes_basis};
use crate::symmetric_eigen::{NoEigenvectors, symmetric_eigen};

/// Sums over the keys and values of each page of a block: count, Σ x and Σ x xᵀ in f64, so that a
/// token more is an outer product more (`MosaicKV`, section 5.5). Vectors with a number that is NaN
/// or infinite are left out and counted: what they are packed as has no basis. Planes may be told
/// of queries besides, whose Σ q qᵀ says which errors of keys matter.
#[derive(Debug)]
pub struct Moments {
    format: PackedFormat,
    /// [pages, 2] of keys, then values.
    sides: Vec<Sums>,
    /// [pages] of the queries that read a page's keys.
    queries: Vec<Sums>,
}

#[derive(Clone, Debug)]
struct Sums {
    count: u64,
    left_out: u64,
    /// Σ x, [D].
    sum: Vec<f64>,
    /// Σ x xᵀ, [D, D], the lower triangle.
    products: Vec<f64>,
}

impl Moments {
    /// Of texts that are packed in bases, as top-r pages or planes, in blocks of so many pages;
    /// `None` for a format that has none.
    #[must_use]
    pub fn new(format: PackedFormat, pages: usize) -> Option<Self> {
        format.basis_rows()?;
        let dim = format.head_dim();
        let nothing =
            Sums { count: 0, left_out: 0, sum: vec![0.0; dim], products: vec![0.0; dim * dim] };
        let (sides, queries) = (vec![nothing.clone(); 2 * pages], vec![nothing; pages]);
        Some(Self { format, sides, queries })
    }

    /// Pages of a block.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.sides.len() / 2
    }

    /// What will be packed.
    #[must_use]
    pub fn format(&self) -> &PackedFormat {
        &self.format
    }

    /// Vectors of page 0's keys that were taken in.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.sides.first().map_or(0, |keys| keys.count + keys.left_out)
    }

    /// Vectors of any page that were left out, for they are not finite.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.sides.iter().chain(&self.queries).map(|side| side.left_out).sum()
    }

    /// Takes in the tokens that `packs` has, whose packed blocks count for nothing here.
    ///
    /// # Errors
    /// What `PackPages` refuses of the exact side; nothing is then taken in.
    ///
    /// # Panics
    /// If `packs` is of another format or other pages.
    pub fn add<C: Element>(&mut self, cache: &[C], packs: &Packs<'_>) -> Result<(), OpError> {
        assert!(packs.format == self.format && packs.pages == self.pages(), "packs of its own");
        packs.validate_sources(cache.len())?;
        let (geometry, dim) = (packs.geometry(), self.format.head_dim());
        self.sides.par_chunks_exact_mut(2).enumerate().for_each(|(page, sides)| {
            let mut row = vec![0.0f32; dim];
            for pack in packs.iter() {
                for token in 0..pack.tokens {
                    let block = pack.sources[token / packs.page_tokens] as usize;
                    let at = geometry.key_offset(block, 0, page, token % packs.page_tokens);
                    for (side, at) in sides.iter_mut().zip([at, at + geometry.value_offset]) {
                        C::widen(&cache[at..at + dim], &mut row);
                        side.add(&row);
                    }
                }
            }
        });
        Ok(())
    }

    /// Takes in the rotated queries [R, H, D] of a layer, which read the keys of `kv_heads` pages
    /// from `first` on: the first H / `kv_heads` heads of a row those of the first page.
    ///
    /// # Panics
    /// If there are no such pages, or not whole rows of so many heads.
    pub fn add_queries<T: Element>(
        &mut self,
        queries: &[T],
        heads: usize,
        (first, kv_heads): (usize, usize),
    ) {
        let dim = self.format.head_dim();
        assert!(queries.len().is_multiple_of(heads * dim), "whole rows");
        assert!(heads.is_multiple_of(kv_heads), "as many query heads a KV head");
        let group = heads / kv_heads;
        let sums = &mut self.queries[first..first + kv_heads];
        sums.par_iter_mut().enumerate().for_each(|(kv_head, sums)| {
            let mut wide = vec![0.0f32; dim];
            for row in queries.chunks_exact(heads * dim) {
                let own = &row[kv_head * group * dim..][..group * dim];
                for query in own.chunks_exact(dim) {
                    T::widen(query, &mut wide);
                    sums.add(&wide);
                }
            }
        });
    }

    /// The same of texts that stand at other positions too: the mean over `deltas` of the sums of
    /// keys and queries that have moved by so many. Exact, as a turn is linear: Σ x becomes T Σ x
    /// and Σ x xᵀ becomes T (Σ x xᵀ) Tᵀ. Values have no position. The pages are those of `kv_heads`
    /// heads a layer, of the layers from `first_layer` on.
    ///
    /// # Panics
    /// If there are no deltas, or the table has no such layers or turns more channels than D.
    #[must_use]
    pub fn moved(
        &self,
        rope: &RopeTable,
        (first_layer, kv_heads): (usize, usize),
        deltas: &[i32],
    ) -> Self {
        assert!(!deltas.is_empty(), "moved by something, if by 0");
        let mut moved =
            Self { format: self.format, sides: self.sides.clone(), queries: self.queries.clone() };
        let pages = moved.sides.par_chunks_exact_mut(2).zip(&mut moved.queries);
        pages.enumerate().for_each(|(page, (sides, queries))| {
            let layer = first_layer + page / kv_heads;
            for sums in [&mut sides[0], queries] {
                *sums = sums.moved(rope, layer, deltas);
            }
        });
        moved
    }

    /// What the bases of planes count errors of keys by, [pages, D, D]: the mean of q qᵀ, and a
    /// hundredth of the queries' mean square in every direction. `None` unless every page had some.
    #[must_use]
    pub fn metric(&self) -> Option<Vec<f64>> {
        let parts: Option<Vec<_>> = self.queries.iter().map(|sums| sums.metric(true)).collect();
        Some(parts?.concat())
    }

    /// A basis of what was taken in. Of top-r pages [pages, 2, C + 1, D]: the mean, or zeros unless
    /// `centred`, and the directions of the largest spread around it, the largest first. Of planes
    /// [pages, 2, 2D + 2, D]: the mean, each channel's bits, its step, and what measures it. Of no
    /// vectors any directions are as good. Unless `rotated` the directions are the axes, in the
    /// order of their spread: few vectors tell these apart, and not yet which directions there are.
    ///
    /// # Errors
    /// `NoEigenvectors` where they do not converge.
    pub fn basis(&self, centred: bool, rotated: bool) -> Result<Vec<f32>, NoEigenvectors> {
        let pages = self.sides.par_chunks_exact(2).zip(&self.queries);
        let parts: Result<Vec<Vec<f32>>, NoEigenvectors> = pages
            .map(|(sides, queries)| {
                if let Some(planes) = self.format.planes() {
                    let sides = [0, 1].map(|side| sides[side].spread(centred, rotated));
                    let metric = queries.metric(rotated);
                    return planes_basis(&sides, metric.as_deref(), planes.token_bytes());
                }
                let channels = self.format.top_r().map_or(0, |page| page.of().channels);
                let both = sides.iter().map(|side| side.directions(centred, rotated, channels));
                Ok(both.collect::<Result<Vec<_>, _>>()?.concat())
            })
            .collect();
        Ok(parts?.concat())
    }
}

impl Sums {
    fn add(&mut self, row: &[f32]) {
        if !row.iter().all(|x| x.is_finite()) {
            self.left_out += 1;
            return;
        }
        self.count += 1;
        let dim = row.len();
        for (i, &x) in row.iter().enumerate() {
            let x = f64::from(x);
            self.sum[i] += x;
            let products = &mut self.products[i * dim..][..=i];
            for (product, &y) in products.iter_mut().zip(row) {
                *product += x * f64::from(y);
            }
        }
    }

    /// An element of Σ x xᵀ, of which the lower triangle is all that is summed.
    fn product(&self, i: usize, j: usize) -> f64 {
        self.products[i.max(j) * self.sum.len() + i.min(j)]
    }

    /// The mean over moves of what the sums of moved vectors are.
    fn moved(&self, rope: &RopeTable, layer: usize, deltas: &[i32]) -> Self {
        let dim = self.sum.len();
        let frequencies = rope.inv_freq(layer);
        let pair = |i| rope.pairing().elements(i, frequencies.len());
        let mut sums = Self { sum: vec![0.0; dim], products: vec![0.0; dim * dim], ..self.clone() };
        let mut whole = vec![0.0; dim * dim];
        for &delta in deltas {
            let mut sum = self.sum.clone();
            for (at, product) in whole.iter_mut().enumerate() {
                *product = self.product(at / dim, at % dim);
            }
            for (i, &frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = (f64::from(delta) * f64::from(frequency)).sin_cos();
                let (a, b) = pair(i);
                let turned = |x: f64, y: f64| (x * cos - y * sin, y * cos + x * sin);
                (sum[a], sum[b]) = turned(sum[a], sum[b]);
                for k in 0..dim {
                    let (x, y) = turned(whole[a * dim + k], whole[b * dim + k]);
                    (whole[a * dim + k], whole[b * dim + k]) = (x, y);
                }
                for row in whole.chunks_exact_mut(dim) {
                    (row[a], row[b]) = turned(row[a], row[b]);
                }
            }
            let share = 1.0 / deltas.len() as f64;
            for (to, x) in sums.sum.iter_mut().zip(&sum) {
                *to += share * x;
            }
            for (to, x) in sums.products.iter_mut().zip(&whole) {
                *to += share * x;
            }
        }
        sums
    }

    /// The mean, or zeros unless `centred`, and the second moments around it: unless `rotated` of
    /// each channel alone.
    fn spread(&self, centred: bool, rotated: bool) -> Spread {
        let dim = self.sum.len();
        let count = self.count.max(1) as f64;
        let mean: Vec<f64> =
            self.sum.iter().map(|sum| if centred { sum / count } else { 0.0 }).collect();
        let around = (0..dim * dim)
            .map(|at| {
                let (i, j) = (at / dim, at % dim);
                if i != j && !rotated {
                    return 0.0;
                }
                self.product(i, j) / count - mean[i] * mean[j]
            })
            .collect();
        Spread { mean, around }
    }

    /// Of queries what errors of keys count by; `None` of no queries.
    fn metric(&self, rotated: bool) -> Option<Vec<f64>> {
        (self.count > 0).then(|| metric(self.spread(false, rotated).around, self.sum.len()))
    }

    /// The mean and so many directions.
    fn directions(
        &self,
        centred: bool,
        rotated: bool,
        channels: usize,
    ) -> Result<Vec<f32>, NoEigenvectors> {
        let dim = self.sum.len();
        let Spread { mean, around } = self.spread(centred, rotated);
        let directions = symmetric_eigen(&around, dim)?.rows;
        Ok(mean.iter().chain(&directions[..channels * dim]).map(|&x| x as f32).collect())
    }
}
