//! The bytes of a planes page: codes of 8, 4 or 2 bits along the directions of a basis.
//!
//! A vector x is `mean + Σ (code[j] − largest[j] / 2) · step[j]` in the basis of its text
//! ([`Bases`](super::Bases)), where `step[j]` is a direction times the distance of two codes. How
//! many bits a channel has is the basis' to say: first all channels of 8, then those of 4, then
//! those of 2; of the others nothing is stored. So a vector is three dense planes, without a
//! bitmap and without a scale. A page has, without gaps:
//!
//! | part | bytes | what lies there |
//! |---|---|---|
//! | flags | P/4, up to the next 16 | a bit a token: its key is NaN; behind them, of its value |
//! | planes of keys | P·(n₈ + n₄/2 + n₂/4) | codes of 8 bits, token by token, of 4, then of 2 |
//! | planes of values | as of keys | the same, with the values' own numbers of channels |
//!
//! In a byte the lowest bits are the first channel's. Keys and values share `token_bytes` a token,
//! each page as its basis says; what they leave is 0. So every page of a pool has
//! P/4 (up to the next 16) + P·`token_bytes` bytes.

use super::code_place::CodePlace;
use super::error::{OpError, OpErrorKind, ensure};
use super::top_r::Side;

/// Bits of a channel's code, plane by plane.
pub const PLANE_BITS: [u32; 3] = [8, 4, 2];
/// Channels of a plane come in so many.
pub const CHANNELS_TOGETHER: usize = 4;

/// The largest code of so many bits.
#[must_use]
pub fn largest_code(bits: u32) -> f32 {
    ((1u32 << bits) - 1) as f32
}

/// How many channels of a vector have 8, 4 and 2 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaneWidths(pub [usize; 3]);

impl PlaneWidths {
    /// Of the bits that a basis has for each channel; `None` where these are not so many channels
    /// of 8, of 4, of 2 and of 0 bits, one after the other, or not all in groups of
    /// [`CHANNELS_TOGETHER`].
    #[must_use]
    pub fn of(bits: &[f32]) -> Option<Self> {
        let mut widths = [0; 3];
        let mut rest = bits;
        for (width, bits) in widths.iter_mut().zip(PLANE_BITS) {
            *width = rest.iter().take_while(|&&of| of == bits as f32).count();
            rest = &rest[*width..];
        }
        let sound = rest.iter().all(|&of| of == 0.0)
            && widths.iter().all(|width| width.is_multiple_of(CHANNELS_TOGETHER));
        sound.then_some(Self(widths))
    }

    /// Channels that have a code at all.
    #[must_use]
    pub fn channels(self) -> usize {
        self.0.iter().sum()
    }

    /// Bytes of one vector in each plane.
    #[must_use]
    pub fn row_bytes(self) -> [usize; 3] {
        let [eight, four, two] = self.0;
        [eight, four / 2, two / 4]
    }

    /// Bytes of one vector.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.row_bytes().iter().sum()
    }
}

/// Where everything lies in a planes page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanesPage {
    token_bytes: usize,
    page_tokens: usize,
}

impl PlanesPage {
    /// Of pages that a format was checked for.
    pub(super) fn new(token_bytes: usize, page_tokens: usize) -> Self {
        Self { token_bytes, page_tokens }
    }

    /// Checks the bytes of a token's codes for vectors of D channels.
    ///
    /// # Errors
    /// `InvalidArgument` for none, or more than 8 bits a channel.
    pub(super) fn check(token_bytes: usize, head_dim: usize) -> Result<(), OpError> {
        let most = 2 * head_dim;
        let sound = (1..=most).contains(&token_bytes);
        ensure(sound, OpErrorKind::InvalidArgument, "token_bytes", || {
            (format!("1 to {most}"), token_bytes)
        })
    }

    /// Bytes of the codes of a token's key and value.
    #[must_use]
    pub fn token_bytes(&self) -> usize {
        self.token_bytes
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.flag_bytes() + self.page_tokens * self.token_bytes
    }

    fn flag_bytes(&self) -> usize {
        (self.page_tokens / 4).next_multiple_of(16)
    }

    /// Where the codes of one side lie, of keys and values of such widths.
    #[must_use]
    pub fn side(&self, [keys, values]: [PlaneWidths; 2], side: Side) -> PlanesSide {
        let tokens = self.page_tokens;
        let (first_flag, start, widths) = match side {
            Side::Keys => (0, self.flag_bytes(), keys),
            Side::Values => (tokens / 8, self.flag_bytes() + tokens * keys.bytes(), values),
        };
        let [eight, four, _] = widths.row_bytes().map(|bytes| tokens * bytes);
        PlanesSide { first_flag, starts: [start, start + eight, start + eight + four], widths }
    }
}

/// Where the codes of keys, or of values, lie in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanesSide {
    first_flag: usize,
    starts: [usize; 3],
    widths: PlaneWidths,
}

impl PlanesSide {
    /// Channels of each plane.
    #[must_use]
    pub fn widths(&self) -> PlaneWidths {
        self.widths
    }

    /// The bit that says that a token's vector is NaN.
    #[must_use]
    pub fn flag(&self, token: usize) -> CodePlace {
        CodePlace { byte: self.first_flag + token / 8, shift: (token % 8) as u32 }
    }

    /// Bytes of a token in a plane: the first of them.
    #[must_use]
    pub fn row(&self, plane: usize, token: usize) -> usize {
        self.starts[plane] + token * self.widths.row_bytes()[plane]
    }

    /// The plane of a channel that has a code, and its number there.
    ///
    /// # Panics
    /// For a channel that has none.
    #[must_use]
    pub fn plane(&self, channel: usize) -> (usize, usize) {
        let mut nth = channel;
        for (plane, width) in self.widths.0.into_iter().enumerate() {
            if nth < width {
                return (plane, nth);
            }
            nth -= width;
        }
        panic!("channel {channel} has no code")
    }

    /// The code of a channel, and its bits.
    #[must_use]
    pub fn code(&self, token: usize, channel: usize) -> (CodePlace, u32) {
        let (plane, nth) = self.plane(channel);
        let bits = PLANE_BITS[plane];
        let bit = nth * bits as usize;
        (CodePlace { byte: self.row(plane, token) + bit / 8, shift: (bit % 8) as u32 }, bits)
    }
}

/// The code nearest to a number of steps, of two the even one.
#[must_use]
pub fn plane_code(steps: f32, bits: u32) -> u8 {
    let largest = largest_code(bits);
    (steps + largest / 2.0).round_ties_even().clamp(0.0, largest) as u8
}

/// Steps that a code stands for.
#[must_use]
pub fn plane_steps(code: u8, bits: u32) -> f32 {
    f32::from(code) - largest_code(bits) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_and_flag_has_bits_of_its_own_in_the_page() {
        let widths = [PlaneWidths([4, 8, 12]), PlaneWidths([0, 4, 20])];
        for tokens in [16, 48, 64] {
            let page = PlanesPage::new(widths[0].bytes() + widths[1].bytes() + 3, tokens);
            let mut taken = vec![0u8; page.page_bytes()];
            let mut take = |CodePlace { byte, shift }: CodePlace, bits: u32| {
                let mask = (largest_code(bits) as u8) << shift;
                assert_eq!(taken[byte] & mask, 0);
                taken[byte] |= mask;
            };
            for side in [Side::Keys, Side::Values] {
                let side = page.side(widths, side);
                for token in 0..tokens {
                    take(side.flag(token), 1);
                    for channel in 0..side.widths().channels() {
                        let (place, bits) = side.code(token, channel);
                        take(place, bits);
                    }
                }
            }
            let used: u32 = taken.iter().map(|byte| byte.count_ones()).sum();
            let codes: usize = widths.iter().map(|widths| 8 * widths.bytes()).sum();
            assert_eq!(used as usize, tokens * (2 + codes));
            assert!(page.page_bytes() >= tokens / 4 + tokens * page.token_bytes());
        }
    }

    #[test]
    fn bits_of_a_basis_are_planes_or_nothing() {
        let bits = |counts: [(f32, usize); 4]| -> Vec<f32> {
            counts.iter().flat_map(|&(bits, count)| vec![bits; count]).collect()
        };
        let widths = PlaneWidths::of(&bits([(8.0, 4), (4.0, 8), (2.0, 0), (0.0, 3)]));
        assert_eq!(widths, Some(PlaneWidths([4, 8, 0])));
        assert_eq!(PlaneWidths::of(&[]), Some(PlaneWidths::default()));
        for wrong in [
            bits([(4.0, 4), (8.0, 4), (0.0, 0), (0.0, 0)]),
            bits([(8.0, 3), (4.0, 4), (2.0, 4), (0.0, 4)]),
            bits([(8.0, 4), (3.0, 4), (0.0, 0), (0.0, 0)]),
            bits([(0.0, 4), (2.0, 4), (0.0, 0), (0.0, 0)]),
            vec![f32::NAN; 4],
        ] {
            assert_eq!(PlaneWidths::of(&wrong), None);
        }
    }

    #[test]
    fn a_number_of_steps_is_half_a_step_away_at_most() {
        for bits in PLANE_BITS {
            let most = largest_code(bits) / 2.0;
            for i in -1000i16..=1000 {
                let steps = f32::from(i) / 1000.0 * (most + 0.5);
                assert!((plane_steps(plane_code(steps, bits), bits) - steps).abs() <= 0.5);
            }
            assert_eq!(plane_steps(plane_code(1e30, bits), bits), most);
            assert_eq!(plane_steps(plane_code(-1e30, bits), bits), -most);
        }
    }
}
