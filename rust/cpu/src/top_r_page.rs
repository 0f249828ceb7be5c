//! Vectors into top-r pages and back, a page at a time.

use std::array;

use kvweave_core::ops::{Basis, Side, TopRPage, VectorPlace};

use crate::basis_numbers::BasisNumbers;

/// Room that packing takes, used again for every page of a task.
#[derive(Default)]
pub(crate) struct Packer {
    directions: BasisNumbers,
    /// [C]
    rotated: Vec<f32>,
    /// (energy, group)
    groups: Vec<(u64, u32)>,
}

impl Packer {
    /// Packs rows [tokens, D] of one side into a page of zeros.
    pub(crate) fn pack(
        &mut self,
        page: &TopRPage,
        basis: Basis<'_>,
        side: Side,
        rows: &[f32],
        bytes: &mut [u8],
    ) {
        let (dim, channels) = (basis.mean.len(), page.of().channels);
        self.directions.of(&basis.directions[..channels * dim], dim);
        self.rotated.resize(channels, 0.0);
        for (token, row) in rows.chunks_exact(dim).enumerate() {
            let finite = self.directions.numbers(row, basis.mean, &mut self.rotated);
            self.choose(page, finite);
            self.store(page, (side, token), finite, bytes);
        }
    }

    /// The groups that are kept, in their order.
    fn choose(&mut self, page: &TopRPage, finite: bool) {
        let kept = page.of().kept_groups();
        self.groups.clear();
        let energies = self.rotated.chunks_exact(page.of().group).map(|group| {
            let energy: f64 = group.iter().map(|&c| f64::from(c) * f64::from(c)).sum();
            // Of numbers that are not below 0 the bits have the same order.
            energy.to_bits()
        });
        self.groups.extend(energies.zip(0..));
        if finite && kept < self.groups.len() {
            self.groups
                .select_nth_unstable_by_key(kept, |&(energy, group)| (u64::MAX - energy, group));
        }
        self.groups.truncate(kept);
        self.groups.sort_unstable_by_key(|&(_, group)| group);
    }

    fn store(&self, page: &TopRPage, at: (Side, usize), finite: bool, bytes: &mut [u8]) {
        let size = page.of().group;
        let kept =
            || self.groups.iter().flat_map(|&(_, of)| &self.rotated[of as usize * size..][..size]);
        let largest = kept().fold(0.0f32, |largest, c| largest.max(c.abs()));
        let stored = page.scale(if finite { largest } else { f32::NAN }).to_le_bytes();
        let scale = page.wide_scale(&stored);
        let VectorPlace { bitmap, numbers, scale: scale_at } = page.place(at.0, at.1);
        for &(_, of) in &self.groups {
            bytes[bitmap.start + of as usize / 8] |= 1 << (of % 8);
        }
        if !scale_at.is_empty() {
            bytes[scale_at].copy_from_slice(&stored);
        }
        for (i, &c) in kept().enumerate() {
            page.put(&mut bytes[numbers.clone()], i, c, scale);
        }
    }
}

/// The kept numbers of one vector with their channels, into `kept`.
pub(crate) fn kept_of(
    page: &TopRPage,
    (side, token): (Side, usize),
    bytes: &[u8],
    kept: &mut Vec<(u32, f32)>,
) {
    let VectorPlace { bitmap, numbers, scale } = page.place(side, token);
    let (scale, numbers) = (page.wide_scale(&bytes[scale]), &bytes[numbers]);
    let (size, most) = (page.of().group, page.of().kept);
    let (groups, last) = (page.of().groups(), bitmap.len() - 1);
    kept.clear();
    for (at, &byte) in bytes[bitmap].iter().enumerate() {
        // Bits behind the last group count for nothing.
        let mut bits = if at == last { byte & (0xFF >> (8 * (at + 1) - groups)) } else { byte };
        while bits != 0 && kept.len() < most {
            let group = 8 * at + bits.trailing_zeros() as usize;
            for channel in group * size..(group + 1) * size {
                kept.push((channel as u32, page.number(numbers, kept.len(), scale)));
            }
            bits &= bits - 1;
        }
    }
}

/// What a page's tokens stand for on one side, into rows [tokens, D].
pub(crate) fn unpack(
    page: &TopRPage,
    basis: Basis<'_>,
    side: Side,
    bytes: &[u8],
    rows: &mut [f32],
) {
    let dim = basis.mean.len();
    let mut kept = Vec::with_capacity(page.of().kept);
    for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
        kept_of(page, (side, token), bytes, &mut kept);
        row.fill(0.0);
        for &(channel, c) in &kept {
            add(row, c, &basis.directions[channel as usize * dim..][..dim]);
        }
        add(row, 1.0, basis.mean);
    }
}

/// The numbers of a page's tokens along all directions on one side, into rows [tokens, D].
pub(crate) fn numbers(page: &TopRPage, dim: usize, side: Side, bytes: &[u8], rows: &mut [f32]) {
    let (mut kept, channels) = (Vec::new(), page.of().channels);
    rows.fill(0.0);
    for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
        spread(page, (side, token), bytes, &mut kept, &mut row[..channels]);
    }
}

/// How many bits of a byte are set below each of its bits.
const SET_BELOW: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut bit = 1;
        while bit < 8 {
            table[byte][bit] = table[byte][bit - 1] + (byte >> (bit - 1) & 1) as u8;
            bit += 1;
        }
        byte += 1;
    }
    table
};

/// The numbers of one vector along all channels, into a row [C] of zeros. `kept` is room that is
/// used again.
pub(crate) fn spread(
    page: &TopRPage,
    (side, token): (Side, usize),
    bytes: &[u8],
    kept: &mut Vec<f32>,
    row: &mut [f32],
) {
    let VectorPlace { bitmap, numbers, scale } = page.place(side, token);
    let (scale, of) = (page.wide_scale(&bytes[scale]), page.of());
    // A byte of the bitmap may look at eight numbers more than there are.
    kept.resize(of.kept + 8, 0.0);
    page.read_numbers(&bytes[numbers], scale, &mut kept[..of.kept]);
    let bitmap = &bytes[bitmap];
    let set: u32 = bitmap.iter().map(|byte| byte.count_ones()).sum();
    if of.group == 1 && row.len().is_multiple_of(8) && set as usize == of.kept {
        let mut next = 0;
        for (row, &byte) in row.as_chunks_mut::<8>().0.iter_mut().zip(bitmap) {
            let numbers: &[f32] = &kept[next..next + 8];
            let below = &SET_BELOW[usize::from(byte)];
            *row = array::from_fn(|bit| {
                let number = numbers[usize::from(below[bit] & 7)];
                if byte >> bit & 1 == 1 { number } else { 0.0 }
            });
            next += byte.count_ones() as usize;
        }
        return;
    }
    let numbers = kept[..of.kept].chunks_exact(of.group);
    for (group, numbers) in page.kept_groups(bitmap).zip(numbers) {
        row[group * of.group..][..of.group].copy_from_slice(numbers);
    }
}

/// `sums += factor · row`.
#[inline(always)]
pub(crate) fn add(sums: &mut [f32], factor: f32, row: &[f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += factor * x;
    }
}
