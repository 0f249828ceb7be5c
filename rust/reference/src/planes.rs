//! One vector of a page of planes: into its bytes, and back.

use kvweave_core::ops::{CodePlace, PlanesBasis, largest_code, plane_code, plane_steps};

/// Packs the vector x of a token into a page of zeros. All arithmetic is f32 in this order. A
/// vector that is not finite, or whose numbers of steps are not, has a flag and no codes.
pub(crate) fn pack_vector(basis: PlanesBasis<'_>, token: usize, x: &[f32], bytes: &mut [u8]) {
    let place = basis.place;
    let steps: Vec<f32> = (0..place.widths().channels())
        .map(|channel| {
            let measure = &basis.measures[channel * x.len()..][..x.len()];
            let centred = x.iter().zip(basis.mean).map(|(x, mean)| x - mean);
            measure.iter().zip(centred).fold(0.0, |sum, (m, x)| sum + m * x)
        })
        .collect();
    if !x.iter().chain(&steps).all(|x| x.is_finite()) {
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
    let CodePlace { byte, shift } = place.flag(token);
    if bytes[byte] >> shift & 1 == 1 {
        return vec![f32::NAN; dim];
    }
    let mut x = vec![0.0f32; dim];
    for channel in 0..place.widths().channels() {
        let (CodePlace { byte, shift }, bits) = place.code(token, channel);
        let code = bytes[byte] >> shift & largest_code(bits) as u8;
        let steps = plane_steps(code, bits);
        for (x, step) in x.iter_mut().zip(&basis.steps[channel * dim..][..dim]) {
            *x += steps * step;
        }
    }
    x.iter().zip(basis.mean).map(|(x, mean)| x + mean).collect()
}
