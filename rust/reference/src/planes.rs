//! One vector of a page of planes: into its bytes, and back.

use kvweave_core::ops::{CodePlace, PlanesBasis, largest_code, plane_code, plane_steps};

use crate::basis_numbers::basis_numbers;

/// Packs the vector x of a token into a page of zeros. A vector that is not finite, or whose
/// numbers of steps are not, has a flag and no codes.
pub(crate) fn pack_vector(basis: PlanesBasis<'_>, token: usize, x: &[f32], bytes: &mut [u8]) {
    let place = basis.place;
    let measures = &basis.measures[..place.widths().channels() * x.len()];
    let (steps, finite) = basis_numbers(measures, x, basis.mean);
    if !finite {
        let CodePlace { byte, shift } = place.flag(token);
        bytes[byte] |= 1 << shift;
        return;
    }
    for (channel, &steps) in steps.iter().enumerate() {
        let (CodePlace { byte, shift }, bits) = place.code(token, channel);
        bytes[byte] |= plane_code(steps, bits) << shift;
    }
}

/// What the bytes of a token's vector stand for, [D]: f32, summed in the order of channels, the
/// mean last.
pub(crate) fn unpack_vector(basis: PlanesBasis<'_>, token: usize, bytes: &[u8]) -> Vec<f32> {
    let (place, dim) = (basis.place, basis.mean.len());
    let steps = numbers_of(basis, token, bytes);
    if is_nan(basis, token, bytes) {
        return steps;
    }
    let mut x = vec![0.0f32; dim];
    for (steps, step) in
        steps.iter().zip(basis.steps.chunks_exact(dim)).take(place.widths().channels())
    {
        for (x, step) in x.iter_mut().zip(step) {
            *x += steps * step;
        }
    }
    x.iter().zip(basis.mean).map(|(x, mean)| x + mean).collect()
}

/// The steps of a token's vector along all directions, [D].
pub(crate) fn numbers_of(basis: PlanesBasis<'_>, token: usize, bytes: &[u8]) -> Vec<f32> {
    let (place, dim) = (basis.place, basis.mean.len());
    if is_nan(basis, token, bytes) {
        return vec![f32::NAN; dim];
    }
    let mut steps = vec![0.0f32; dim];
    for (channel, steps) in steps.iter_mut().enumerate().take(place.widths().channels()) {
        let (CodePlace { byte, shift }, bits) = place.code(token, channel);
        let code = bytes[byte] >> shift & largest_code(bits) as u8;
        *steps = plane_steps(code, bits);
    }
    steps
}

fn is_nan(basis: PlanesBasis<'_>, token: usize, bytes: &[u8]) -> bool {
    let CodePlace { byte, shift } = basis.place.flag(token);
    bytes[byte] >> shift & 1 == 1
}
