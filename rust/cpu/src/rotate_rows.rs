//! Vectors of rows turned by cosines and sines that are given.
//!
//! A row's cosines and sines are widened once for all of its heads. Every element is computed by
//! itself, two products and their sum, without fused steps: so its bits are the same wherever it
//! stands in a vector loop, in every call, and in the kernels of CUDA.

use kvweave_core::ops::{Element, OpError, Pairing, RotateRows};
use rayon::prelude::*;

use crate::disjoint::Disjoint;

/// Fewest elements that a thread turns before another could help, some 50 µs.
const ELEMENTS: usize = 1 << 16;

/// See [`RotateRows`].
///
/// # Errors
/// What [`RotateRows::validate`] refuses.
pub fn rotate_rows<T: Element>(params: RotateRows<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let pairs = params.pairs();
    let RotateRows { vectors, source, cos, sin, pairing, .. } = params;
    let (rows, heads, dim) = (vectors.rows, vectors.heads, vectors.head_dim);
    let strides = (vectors.row_stride, vectors.head_stride);
    let values = Disjoint::new(vectors.values);
    let fewest = (ELEMENTS / (heads * dim).max(1)).max(1);
    (0..rows).into_par_iter().with_min_len(fewest).for_each_init(
        || (vec![0.0; 2 * pairs], vec![0.0; pairs], vec![0.0; pairs]),
        |(wide, cosines, sines), row| {
            T::widen(&cos.vector(row, 0)[..pairs], cosines);
            T::widen(&sin.vector(row, 0)[..pairs], sines);
            for head in 0..heads {
                let start = row * strides.0 + head * strides.1;
                // SAFETY: `validate` proved that different (row, head) share no element.
                let vector = unsafe { values.piece(start, dim) };
                if let Some(source) = source {
                    vector.copy_from_slice(source.vector(row, head));
                }
                let turned = &mut vector[..2 * pairs];
                T::widen(turned, wide);
                turn(wide, cosines, sines, pairing);
                T::narrow(wide, turned);
            }
        },
    );
    Ok(())
}

fn turn(vector: &mut [f32], cosines: &[f32], sines: &[f32], pairing: Pairing) {
    let angles = cosines.iter().zip(sines);
    let pair = |(x, y): (&mut f32, &mut f32), (cos, sin): (&f32, &f32)| {
        (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
    };
    match pairing {
        Pairing::Half => {
            let (first, second) = vector.split_at_mut(cosines.len());
            first.iter_mut().zip(second).zip(angles).for_each(|(both, angle)| pair(both, angle));
        }
        Pairing::Interleaved => {
            for ([x, y], angle) in vector.as_chunks_mut().0.iter_mut().zip(angles) {
                pair((x, y), angle);
            }
        }
    }
}
