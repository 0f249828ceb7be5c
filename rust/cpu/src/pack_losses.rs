//! What exact pages lose by being packed, a page a task.

use kvweave_core::ops::{Element, OpError, Pack, PackLosses, PackedFormat};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::pack_pages::{BasisPacker, load, pack_page, unpack_page};

/// Numbers that are summed up side by side.
const LANES: usize = 8;

/// Of a page's keys and values what is lost, then Σ |x|² of both.
type Sums = [f64; 4];

/// See [`PackLosses`].
///
/// # Errors
/// What [`PackLosses::validate`] refuses.
pub fn pack_losses<C: Element>(params: PackLosses<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let bases = params.bases();
    let PackLosses { cache, packs, ranks, roots, left_out, .. } = params;
    let (format, count) = (packs.format, ranks.len());
    let (dim, bytes) = (format.head_dim(), format.page_bytes());
    let rows: Vec<Pack<'_>> = packs.iter().collect();
    let packed = params.packed.map(Disjoint::new);
    let of_each: Vec<Sums> = (0..rows.len() * count)
        .into_par_iter()
        .map_init(
            || Room::<C>::new(&format),
            |room, task| {
                let (row, at) = (task / count, task % count);
                let Room { packer, page, exact: [keys, values], back, narrow } = room;
                load(cache, &packs, (rows[row], ranks[at] as usize), keys, values);
                let page = match &packed {
                    // SAFETY: each row and rank has a page of its own, and one task.
                    Some(packed) => unsafe { packed.piece(task * bytes, bytes) },
                    None => &mut page[..],
                };
                let held = rows[row].tokens * dim;
                let exact = [&keys[..held], &values[..held]];
                pack_page((&format, bases, (0, at)), exact, packer, page);
                let [keys, values] = back;
                let back = [&mut keys[..held], &mut values[..held]];
                unpack_page((&format, bases, (0, at)), page, back);
                round(&mut keys[..held], narrow);
                round(&mut values[..held], narrow);
                let some = if row == 0 { left_out * dim } else { 0 }.min(held)..held;
                let root = roots.map(|roots| &roots[at * dim * dim..][..dim * dim]);
                let [of_keys, of_values] = exact.map(|numbers| &numbers[some.clone()]);
                [
                    match root {
                        Some(root) => turned_errors(&keys[some.clone()], of_keys, root, dim),
                        None => errors(&keys[some.clone()], of_keys),
                    },
                    errors(&values[some], of_values),
                    squares(of_keys),
                    squares(of_values),
                ]
            },
        )
        .collect();
    params.sums.fill(0.0);
    for (task, sums) in of_each.into_iter().enumerate() {
        let at = task % count;
        for (place, sum) in
            [2 * at, 2 * at + 1, 2 * (count + at), 2 * (count + at) + 1].into_iter().zip(sums)
        {
            params.sums[place] += sum;
        }
    }
    Ok(())
}

/// What a task works with, used again for every page.
struct Room<C> {
    packer: BasisPacker,
    page: Vec<u8>,
    exact: [Vec<f32>; 2],
    back: [Vec<f32>; 2],
    narrow: Vec<C>,
}

impl<C: Element> Room<C> {
    fn new(format: &PackedFormat) -> Self {
        let numbers = format.page_tokens() * format.head_dim();
        let side = || vec![0.0; numbers];
        Self {
            packer: BasisPacker::default(),
            page: vec![0; format.page_bytes()],
            exact: [side(), side()],
            back: [side(), side()],
            narrow: vec![C::from_f32(0.0); numbers],
        }
    }
}

/// Rounds numbers to elements.
fn round<C: Element>(numbers: &mut [f32], narrow: &mut [C]) {
    let narrow = &mut narrow[..numbers.len()];
    C::narrow(numbers, narrow);
    C::widen(narrow, numbers);
}

/// Σ x².
fn squares(x: &[f32]) -> f64 {
    let mut sums = [0.0; LANES];
    for x in x.as_chunks::<LANES>().0 {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    sums.iter().sum()
}

/// Σ (x − y)².
fn errors(x: &[f32], y: &[f32]) -> f64 {
    let mut sums = [0.0; LANES];
    for (x, y) in x.as_chunks::<LANES>().0.iter().zip(y.as_chunks::<LANES>().0) {
        for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
            let error = f64::from(*x) - f64::from(*y);
            *sum += error * error;
        }
    }
    sums.iter().sum()
}

/// Σ |(x − y) · root|² over rows [D], of a root [D, D].
fn turned_errors(x: &[f32], y: &[f32], root: &[f64], dim: usize) -> f64 {
    let (mut total, mut turned) = (0.0, vec![0.0; dim]);
    for (x, y) in x.chunks_exact(dim).zip(y.chunks_exact(dim)) {
        turned.fill(0.0);
        for ((x, y), row) in x.iter().zip(y).zip(root.chunks_exact(dim)) {
            let error = f64::from(*x) - f64::from(*y);
            for (turned, root) in turned.iter_mut().zip(row) {
                *turned += error * root;
            }
        }
        total += turned.iter().map(|turned| turned * turned).sum::<f64>();
    }
    total
}
