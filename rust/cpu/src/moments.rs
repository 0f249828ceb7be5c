//! What the bases of a text are made of: mean and covariance of its keys and values, as they come.

use kvweave_core::ops::{Element, OpError, PackedFormat, Packs};
use rayon::prelude::*;

use crate::symmetric_eigen::{NoEigenvectors, symmetric_eigen};

/// Sums over the keys and values of each page of a block: count, Σ x and Σ x xᵀ in f64, so that a
/// token more is an outer product more (`MosaicKV`, section 5.5). Vectors with a number that is NaN
/// or infinite are left out and counted: what they are packed as has no basis.
#[derive(Debug)]
pub struct Moments {
    format: PackedFormat,
    channels: usize,
    /// [pages, 2] of keys, then values.
    sides: Vec<Sums>,
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
    /// Of texts that are packed in a top-r format, in blocks of so many pages; `None` for another.
    #[must_use]
    pub fn new(format: PackedFormat, pages: usize) -> Option<Self> {
        let channels = format.top_r()?.of().channels;
        let dim = format.head_dim();
        let nothing =
            Sums { count: 0, left_out: 0, sum: vec![0.0; dim], products: vec![0.0; dim * dim] };
        Some(Self { format, channels, sides: vec![nothing; 2 * pages] })
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
        self.sides.iter().map(|side| side.left_out).sum()
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

    /// A basis [pages, 2, C + 1, D] of what was taken in: the mean, or zeros unless `centred`, and
    /// the directions of the largest spread around it, the largest first. Of no vectors any
    /// directions are as good.
    ///
    /// # Errors
    /// `NoEigenvectors` where they do not converge.
    pub fn basis(&self, centred: bool) -> Result<Vec<f32>, NoEigenvectors> {
        let parts: Result<Vec<Vec<f32>>, NoEigenvectors> =
            self.sides.par_iter().map(|side| side.basis(centred, self.channels)).collect();
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

    fn basis(&self, centred: bool, channels: usize) -> Result<Vec<f32>, NoEigenvectors> {
        let dim = self.sum.len();
        let count = self.count.max(1) as f64;
        let mean = |i: usize| if centred { self.sum[i] / count } else { 0.0 };
        let spread: Vec<f64> = (0..dim * dim)
            .map(|at| self.products[at] / count - mean(at / dim) * mean(at % dim))
            .collect();
        let directions = symmetric_eigen(&spread, dim)?;
        let means = (0..dim).map(mean);
        Ok(means.chain(directions[..channels * dim].iter().copied()).map(|x| x as f32).collect())
    }
}
