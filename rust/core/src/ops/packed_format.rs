//! The bytes of a packed page: the one place that says where its codes, scales and zeros lie.
//!
//! A packed page holds P tokens of one KV head of one layer in few bits. What lies in a top-r page
//! says [`TopRPage`]. The parts of an INT4 page follow each other without gaps, each on a boundary
//! of 16 bytes:
//!
//! | part | bytes | what lies there |
//! |---|---|---|
//! | key codes | P·D/2 | see [`PackedFormat::key_code`] |
//! | value codes | P·D/2 | see [`PackedFormat::value_code`] |
//! | key scales | 2·D | one a channel |
//! | key zeros | 2·D | one a channel |
//! | value steps | 4·P | scale, then zero, of each token |
//!
//! So an INT4 page is P·D + 4·D + 4·P bytes, where one of bf16 is 4·P·D.
//!
//! Keys have a scale and zero a channel, since what is large in keys is so in few channels, at all
//! tokens; values have them a token (KIVI, section 3; research of `MosaicKV`'s baselines). A number
//! is `zero + scale · code` ([`Step`](super::Step)).
//!
//! Codes lie in little-endian words of 32 bits, in the order in which a warp takes them as
//! operands of a 16 × 8 × 16 product: in every word nibbles i and i + 4 are neighbours there, so
//! that one mask brings two of them into the halves of a register.

use std::fmt;
use std::ops::Range;

use super::error::{OpError, OpErrorKind, ensure};
use super::step::ScaleDtype;
use super::top_r::{TopR, TopRPage};

/// What the numbers of a packed page are made of. Further kinds are further parts of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedKind {
    /// Codes from 0 to 15.
    Int4,
    /// Of each vector the largest numbers in its text's basis.
    TopR(TopR),
}

impl PackedKind {
    /// The name that it is asked for by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int4 => "int4",
            Self::TopR(_) => "top-r",
        }
    }
}

/// Where a code of four bits lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodePlace {
    /// Byte of the page.
    pub byte: usize,
    /// First bit of that byte.
    pub shift: u32,
}

/// Tokens whose value codes lie together: those of one product.
const UNIT: usize = 16;
const SCALE_BYTES: usize = 2;
const WORD_BYTES: usize = 4;

/// What a packed page is, by kind and sizes: all that its bytes need to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedFormat {
    kind: PackedKind,
    scales: ScaleDtype,
    page_tokens: usize,
    head_dim: usize,
}

impl PackedFormat {
    /// P at most.
    pub const MAX_PAGE_TOKENS: usize = 256;
    /// D at most.
    pub const MAX_HEAD_DIM: usize = 1024;
    /// The largest code of four bits.
    pub const LARGEST_CODE: u8 = 15;

    /// Checks and builds a format.
    ///
    /// # Errors
    /// `InvalidArgument` where P or D is no multiple of 16, 0, or above the largest, or a top-r
    /// page has no such parts.
    pub fn new(
        kind: PackedKind,
        scales: ScaleDtype,
        page_tokens: usize,
        head_dim: usize,
    ) -> Result<Self, OpError> {
        let sizes = [
            ("page_tokens", page_tokens, Self::MAX_PAGE_TOKENS),
            ("head_dim", head_dim, Self::MAX_HEAD_DIM),
        ];
        for (what, size, most) in sizes {
            let sound = size > 0 && size.is_multiple_of(UNIT) && size <= most;
            ensure(sound, OpErrorKind::InvalidArgument, what, || {
                (format!("a multiple of {UNIT} from {UNIT} to {most}"), size)
            })?;
        }
        if let PackedKind::TopR(of) = kind {
            of.check(head_dim)?;
        }
        Ok(Self { kind, scales, page_tokens, head_dim })
    }

    /// What numbers are made of.
    #[must_use]
    pub fn kind(&self) -> PackedKind {
        self.kind
    }

    /// Elements that scales and zeros are stored as.
    #[must_use]
    pub fn scales(&self) -> ScaleDtype {
        self.scales
    }

    /// P.
    #[must_use]
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// D.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.top_r().map_or_else(|| self.value_steps().end, |page| page.page_bytes())
    }

    /// Where everything lies in a top-r page; the places below are those of an INT4 page.
    #[must_use]
    pub fn top_r(&self) -> Option<TopRPage> {
        match self.kind {
            PackedKind::TopR(of) => Some(TopRPage::new(of, self.scales, self.page_tokens)),
            PackedKind::Int4 => None,
        }
    }

    /// Bytes of the keys' codes, which are a row of D/8 words a token.
    #[must_use]
    pub fn key_codes(&self) -> Range<usize> {
        0..self.page_tokens * self.head_dim / 2
    }

    /// Bytes of the values' codes, which are 2·D words for each 16 tokens.
    #[must_use]
    pub fn value_codes(&self) -> Range<usize> {
        self.after(&self.key_codes(), self.page_tokens * self.head_dim / 2)
    }

    /// Bytes of the scales of keys, [D].
    #[must_use]
    pub fn key_scales(&self) -> Range<usize> {
        self.after(&self.value_codes(), SCALE_BYTES * self.head_dim)
    }

    /// Bytes of the zeros of keys, [D].
    #[must_use]
    pub fn key_zeros(&self) -> Range<usize> {
        self.after(&self.key_scales(), SCALE_BYTES * self.head_dim)
    }

    /// Bytes of the scales and zeros of values, [P, 2].
    #[must_use]
    pub fn value_steps(&self) -> Range<usize> {
        self.after(&self.key_zeros(), 2 * SCALE_BYTES * self.page_tokens)
    }

    fn after(&self, before: &Range<usize>, bytes: usize) -> Range<usize> {
        before.end..before.end + bytes
    }

    /// The code of a key: channels 8w to 8w + 7 of a token are word w of its row, and channel
    /// 8w + 2i + b is nibble i + 4b of that.
    #[must_use]
    pub fn key_code(&self, token: usize, channel: usize) -> CodePlace {
        let word = (token * self.head_dim + channel) / 8;
        let (pair, second) = (channel % 8 / 2, channel % 2);
        place(0, word, pair + 4 * second)
    }

    /// The code of a value. A word has two channels of four tokens: of 16 tokens, lane 4g + t of a
    /// warp takes tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of channels 16j + g and 16j + g + 8, and
    /// finds the words of [`value_run`](Self::value_run) of its j beside each other. Channel
    /// 16j + g + 8h of token 2t + b + 8k is nibble 2k + h + 4b.
    #[must_use]
    pub fn value_code(&self, token: usize, channel: usize) -> CodePlace {
        let (unit, row) = (token / UNIT, token % UNIT);
        let word = unit * 2 * self.head_dim + self.value_word(row, channel);
        let (low_half, later) = (channel % 16 / 8, row / 8);
        place(self.value_codes().start, word, 2 * later + low_half + 4 * (row % 2))
    }

    /// Which of the 2·D words of 16 tokens has the code of one of them.
    #[must_use]
    pub fn value_word(&self, row: usize, channel: usize) -> usize {
        let run = self.value_run();
        let (tile, lane) = (channel / 16, channel % 8 * 4 + row % 8 / 2);
        (tile / run * 32 + lane) * run + tile % run
    }

    /// Words that a lane finds beside each other: 4, or the 2 or 1 that divide D/16.
    #[must_use]
    pub fn value_run(&self) -> usize {
        let tiles = self.head_dim / 16;
        if tiles.is_multiple_of(4) { 4 } else { 2 - tiles % 2 }
    }

    /// First byte of a key channel's scale.
    #[must_use]
    pub fn key_scale(&self, channel: usize) -> usize {
        self.key_scales().start + SCALE_BYTES * channel
    }

    /// First byte of a key channel's zero.
    #[must_use]
    pub fn key_zero(&self, channel: usize) -> usize {
        self.key_zeros().start + SCALE_BYTES * channel
    }

    /// First byte of the scale of a token's values.
    #[must_use]
    pub fn value_scale(&self, token: usize) -> usize {
        self.value_steps().start + 2 * SCALE_BYTES * token
    }

    /// First byte of the zero of a token's values.
    #[must_use]
    pub fn value_zero(&self, token: usize) -> usize {
        self.value_scale(token) + SCALE_BYTES
    }
}

impl fmt::Display for PackedFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, scales, page_tokens, head_dim } = self;
        let (kind, scales) = (kind.name(), scales.name());
        write!(f, "{kind} pages of {page_tokens} tokens of {head_dim} with scales of {scales}")
    }
}

fn place(start: usize, word: usize, nibble: usize) -> CodePlace {
    CodePlace { byte: start + WORD_BYTES * word + nibble / 2, shift: 4 * (nibble % 2) as u32 }
}

#[cfg(test)]
mod tests {
    use super::super::top_r::KeptNumbers;
    use super::*;

    fn format(page_tokens: usize, head_dim: usize) -> PackedFormat {
        PackedFormat::new(PackedKind::Int4, ScaleDtype::Bf16, page_tokens, head_dim)
            .expect("sound sizes")
    }

    #[test]
    fn bytes_are_the_formula_and_few_enough() {
        for (page_tokens, head_dim) in [(16, 128), (64, 128), (64, 64), (128, 256), (32, 80)] {
            let format = format(page_tokens, head_dim);
            let bytes = page_tokens * head_dim + 4 * head_dim + 4 * page_tokens;
            assert_eq!(format.page_bytes(), bytes);
            assert!(bytes.is_multiple_of(16));
        }
        assert_eq!(format(64, 128).page_bytes(), 8960);
        for head_dim in [64, 128, 256] {
            let of_bf16 = 4 * 64 * head_dim;
            assert!(of_bf16 * 2 >= 7 * format(64, head_dim).page_bytes(), "3.5 times fewer");
        }
    }

    #[test]
    fn every_code_has_a_place_of_its_own_in_its_part() {
        for (page_tokens, head_dim) in [(16, 16), (32, 80), (48, 96), (64, 64), (64, 128)] {
            let format = format(page_tokens, head_dim);
            let mut taken = vec![0u8; format.page_bytes()];
            for token in 0..page_tokens {
                for channel in 0..head_dim {
                    let places = [
                        (format.key_code(token, channel), format.key_codes()),
                        (format.value_code(token, channel), format.value_codes()),
                    ];
                    for (CodePlace { byte, shift }, part) in places {
                        assert!(part.contains(&byte));
                        assert_eq!(taken[byte] >> shift & 15, 0);
                        taken[byte] |= 15 << shift;
                    }
                }
            }
            assert!(taken[..format.key_scales().start].iter().all(|&byte| byte == 0xFF));
        }
    }

    #[test]
    fn bytes_of_a_top_r_page_are_the_formula() {
        let bytes = |kept, group, channels, numbers| {
            let kind = PackedKind::TopR(TopR { kept, group, channels, numbers });
            PackedFormat::new(kind, ScaleDtype::Bf16, 64, 128).expect("sound sizes").page_bytes()
        };
        // Of a vector: bitmap, numbers, scale.
        assert_eq!(bytes(32, 1, 128, KeptNumbers::Bf16), 128 * (16 + 64));
        assert_eq!(bytes(32, 2, 128, KeptNumbers::Bf16), 128 * (8 + 64));
        assert_eq!(bytes(32, 4, 128, KeptNumbers::Bf16), 128 * (4 + 64));
        assert_eq!(bytes(32, 1, 100, KeptNumbers::Bf16), 128 * (13 + 64));
        assert_eq!(bytes(64, 1, 128, KeptNumbers::Fp8), 128 * (16 + 64 + 2));
        assert_eq!(bytes(64, 1, 128, KeptNumbers::Int4), 128 * (16 + 32 + 2));
        let of_bf16 = 4 * 64 * 128;
        assert!(of_bf16 >= 5 * bytes(64, 1, 128, KeptNumbers::Int4), "five times fewer");
    }

    #[test]
    fn what_is_no_top_r_is_refused() {
        for (kept, group, channels, numbers) in [
            (16, 3, 64, KeptNumbers::Bf16),
            (18, 4, 64, KeptNumbers::Bf16),
            (0, 1, 64, KeptNumbers::Bf16),
            (65, 1, 64, KeptNumbers::Bf16),
            (33, 1, 32, KeptNumbers::Fp8),
            (16, 2, 63, KeptNumbers::Fp8),
            (16, 1, 80, KeptNumbers::Fp8),
            (15, 1, 64, KeptNumbers::Int4),
        ] {
            let kind = PackedKind::TopR(TopR { kept, group, channels, numbers });
            assert!(PackedFormat::new(kind, ScaleDtype::Bf16, 64, 64).is_err());
        }
    }

    #[test]
    fn sizes_that_no_product_takes_are_refused() {
        for (page_tokens, head_dim) in [(0, 64), (8, 64), (272, 64), (16, 8), (16, 0), (16, 1040)] {
            let made = PackedFormat::new(PackedKind::Int4, ScaleDtype::F16, page_tokens, head_dim);
            assert!(made.is_err());
        }
    }
}
