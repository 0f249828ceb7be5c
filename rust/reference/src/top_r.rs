//! One vector of a top-r page: into its bytes, and back.

use kvweave_core::ops::{Basis, Side, TopRPage, VectorPlace};

use crate::basis_numbers::basis_numbers;

/// Packs the vector x of a token into a page of zeros. Energies are f64, which holds them exactly;
/// of groups with the same energy the first are kept.
pub(crate) fn pack_vector(
    page: &TopRPage,
    basis: Basis<'_>,
    (side, token): (Side, usize),
    x: &[f32],
    bytes: &mut [u8],
) {
    let group = page.of().group;
    let directions = &basis.directions[..page.of().channels * x.len()];
    let (rotated, finite) = basis_numbers(directions, x, basis.mean);
    let energy = |of: usize| -> f64 {
        rotated[of * group..(of + 1) * group].iter().map(|&c| f64::from(c) * f64::from(c)).sum()
    };
    let mut groups: Vec<usize> = (0..page.of().groups()).collect();
    if finite {
        groups.sort_by(|&a, &b| energy(b).total_cmp(&energy(a)));
    }
    groups.truncate(page.of().kept_groups());
    groups.sort_unstable();
    let kept: Vec<f32> =
        groups.iter().flat_map(|of| &rotated[of * group..(of + 1) * group]).copied().collect();
    let largest = kept.iter().fold(0.0f32, |largest, c| largest.max(c.abs()));
    let stored = page.scale(if finite { largest } else { f32::NAN }).to_le_bytes();
    let scale = page.wide_scale(&stored);
    let VectorPlace { bitmap, numbers, scale: scale_at } = page.place(side, token);
    for of in groups {
        bytes[bitmap.start + of / 8] |= 1 << (of % 8);
    }
    if !scale_at.is_empty() {
        bytes[scale_at].copy_from_slice(&stored);
    }
    for (i, &c) in kept.iter().enumerate() {
        page.put(&mut bytes[numbers.clone()], i, c, scale);
    }
}

/// What the bytes of a token's vector stand for, [D]: f32, summed in the order of channels, the
/// mean last.
pub(crate) fn unpack_vector(
    page: &TopRPage,
    basis: Basis<'_>,
    at: (Side, usize),
    bytes: &[u8],
) -> Vec<f32> {
    let dim = basis.mean.len();
    let mut x = vec![0.0f32; dim];
    for (channel, c) in kept_of(page, at, bytes) {
        for (x, d) in x.iter_mut().zip(&basis.directions[channel * dim..][..dim]) {
            *x += c * d;
        }
    }
    x.iter().zip(basis.mean).map(|(x, mean)| x + mean).collect()
}

/// The numbers of a token's vector along all directions, [D].
pub(crate) fn numbers_of(page: &TopRPage, dim: usize, at: (Side, usize), bytes: &[u8]) -> Vec<f32> {
    let mut numbers = vec![0.0f32; dim];
    for (channel, c) in kept_of(page, at, bytes) {
        numbers[channel] = c;
    }
    numbers
}

/// The numbers that a token's vector kept, each with its channel.
fn kept_of(page: &TopRPage, (side, token): (Side, usize), bytes: &[u8]) -> Vec<(usize, f32)> {
    let VectorPlace { bitmap, numbers, scale } = page.place(side, token);
    let (scale, group) = (page.wide_scale(&bytes[scale]), page.of().group);
    let numbers = &bytes[numbers];
    let number = |nth: usize| page.number(numbers, nth, scale);
    page.kept_groups(&bytes[bitmap])
        .enumerate()
        .flat_map(|(nth, of)| {
            (0..group).map(move |member| (nth * group + member, of * group + member))
        })
        .map(|(nth, channel)| (channel, number(nth)))
        .collect()
}
