//! Vectors into pages of planes and back, a page at a time.

use kvweave_core::ops::{CodePlace, PLANE_BITS, PlanesBasis, PlanesSide, largest_code, plane_code};

use crate::basis_numbers::BasisNumbers;
use crate::simd::{Kernel, Vector, dispatch};
use crate::top_r_page::add;

/// Packs rows [tokens, D] of one side into a page of zeros. `measures` is room that is used again.
pub(crate) fn pack(
    basis: &PlanesBasis<'_>,
    rows: &[f32],
    measures: &mut BasisNumbers,
    bytes: &mut [u8],
) {
    let (dim, channels) = (basis.mean.len(), basis.place.widths().channels());
    measures.of(&basis.measures[..channels * dim], dim);
    let mut steps = vec![0.0f32; channels];
    for (token, row) in rows.chunks_exact(dim).enumerate() {
        if !measures.numbers(row, basis.mean, &mut steps) {
            let CodePlace { byte, shift } = basis.place.flag(token);
            bytes[byte] |= 1 << shift;
            continue;
        }
        for (channel, &steps) in steps.iter().enumerate() {
            let (CodePlace { byte, shift }, bits) = basis.place.code(token, channel);
            bytes[byte] |= plane_code(steps, bits) << shift;
        }
    }
}

/// What a page's tokens stand for on one side, into rows [tokens, D].
pub(crate) fn unpack(basis: &PlanesBasis<'_>, bytes: &[u8], rows: &mut [f32]) {
    let (dim, channels) = (basis.mean.len(), basis.place.widths().channels());
    let mut steps = vec![0.0f32; channels];
    for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
        steps_of(&basis.place, [token], bytes, &mut steps);
        row.fill(0.0);
        for (&steps, step) in steps.iter().zip(basis.steps.chunks_exact(dim)) {
            add(row, steps, step);
        }
        add(row, 1.0, basis.mean);
        if is_nan(&basis.place, token, bytes) {
            row.fill(f32::NAN);
        }
    }
}

/// The steps of a page's tokens along all directions on one side, into rows [tokens, D].
pub(crate) fn numbers(place: &PlanesSide, dim: usize, bytes: &[u8], rows: &mut [f32]) {
    let channels = place.widths().channels();
    rows.fill(0.0);
    for (token, row) in rows.chunks_exact_mut(dim).enumerate() {
        steps_of(place, [token], bytes, &mut row[..channels]);
        if is_nan(place, token, bytes) {
            row.fill(f32::NAN);
        }
    }
}

/// The numbers of steps that tokens have along their channels, into `rows`, [tokens, C]; NaN of
/// vectors that are.
pub(crate) fn steps_of(
    place: &PlanesSide,
    tokens: impl IntoIterator<Item = usize>,
    bytes: &[u8],
    rows: &mut [f32],
) {
    let channels = place.widths().channels();
    if channels == 0 {
        return;
    }
    for (token, row) in tokens.into_iter().zip(rows.chunks_exact_mut(channels)) {
        dispatch(Steps { place, token, bytes, row });
        if is_nan(place, token, bytes) {
            row.fill(f32::NAN);
        }
    }
}

/// Whether a token's vector is NaN.
pub(crate) fn is_nan(place: &PlanesSide, token: usize, bytes: &[u8]) -> bool {
    let CodePlace { byte, shift } = place.flag(token);
    bytes[byte] >> shift & 1 == 1
}

/// One token's planes as numbers of steps.
struct Steps<'a> {
    place: &'a PlanesSide,
    token: usize,
    bytes: &'a [u8],
    row: &'a mut [f32],
}

impl Kernel for Steps<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { place, token, bytes, row } = self;
        let [eight, four, two] = place.widths().row_bytes();
        let plane = |nth: usize, bytes_of: usize| &bytes[place.row(nth, token)..][..bytes_of];
        let [most8, most4, most2] = PLANE_BITS.map(|bits| largest_code(bits) / 2.0);
        let (of8, rest) = row.split_at_mut(eight);
        let (of4, of2) = rest.split_at_mut(2 * four);
        for (x, &code) in of8.iter_mut().zip(plane(0, eight)) {
            *x = f32::from(code) - most8;
        }
        for (x, &byte) in of4.as_chunks_mut::<2>().0.iter_mut().zip(plane(1, four)) {
            *x = [byte & 15, byte >> 4].map(|code| f32::from(code) - most4);
        }
        for (x, &byte) in of2.as_chunks_mut::<4>().0.iter_mut().zip(plane(2, two)) {
            *x = [0, 2, 4, 6].map(|shift| f32::from(byte >> shift & 3) - most2);
        }
    }
}
