//! The bytes of a packed page: the one place that says where its codes, scales and zeros lie.
//!
//! A packed page holds P tokens of one KV head of one layer in few bits. What lies in a top-r page
//! says [`TopRPage`], in one of planes [`PlanesPage`]. The parts of an INT4 page follow each other
//! without gaps, each on a boundary of 16 bytes:
//!
//! | part | bytes | what lies there |
//! |---|---|---|
//! | key codes | P·D/2 | see [`PackedFormat::key_code`] |
//! | value codes | P·D/2 | see [`PackedFormat::value_code`] |
//! | key scales | 2·D | one a channel |
//! | key zeros | 2·D | one a channel |
//! | value steps | 4·P | scale, then zero, of each token |
//!
//! So an INT4 page is P·D + 4·D + 4·P bytes, where one of bf16 is 4·P·D. An INT8 page has the same
//! parts, its codes twice as large: [P, D] of keys, then [P, D] of values, a byte each.
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

use super::code_place::CodePlace;
use super::error::{OpError, OpErrorKind, ensure};
use super::planes::PlanesPage;
use super::step::ScaleDtype;
use super::top_r::{TopR, TopRPage};

/// What the numbers of a packed page are made of. Further kinds are further parts of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedKind {
    /// Codes from 0 to 15.
    Int4,
    /// Codes from 0 to 255.
    Int8,
    /// Of each vector the largest numbers in its text's basis.
    TopR(TopR),
    /// Of each vector codes of 8, 4 or 2 bits along the directions of its text's basis, in so many
    /// bytes a token.
    Planes(usize),
}

impl PackedKind {
    /// The name that it is asked for by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int4 => "int4",
            Self::Int8 => "int8",
            Self::TopR(_) => "top-r",
            Self::Planes(_) => "planes",
        }
    }
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
    /// Checks and builds a format.
    ///
    /// # Errors
    /// `InvalidArgument` where P or D is no multiple of 16, 0, or above the largest, or a top-r
    /// page has no such parts, or one of planes no such bytes.
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
        match kind {
            PackedKind::TopR(of) => of.check(head_dim)?,
            PackedKind::Planes(token_bytes) => PlanesPage::check(token_bytes, head_dim)?,
            PackedKind::Int4 | PackedKind::Int8 => {}
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
        match self.kind {
            PackedKind::TopR(of) => self.of_top_r(of).page_bytes(),
            PackedKind::Planes(token_bytes) => self.of_planes(token_bytes).page_bytes(),
            PackedKind::Int4 | PackedKind::Int8 => self.value_steps().end,
        }
    }

    /// Where everything lies in a top-r page; the places below are those of INT4 and INT8 pages.
    #[must_use]
    pub fn top_r(&self) -> Option<TopRPage> {
        if let PackedKind::TopR(of) = self.kind { Some(self.of_top_r(of)) } else { None }
    }

    /// Where everything lies in a page of planes.
    #[must_use]
    pub fn planes(&self) -> Option<PlanesPage> {
        let PackedKind::Planes(token_bytes) = self.kind else { return None };
        Some(self.of_planes(token_bytes))
    }

    fn of_top_r(&self, of: TopR) -> TopRPage {
        TopRPage::new(of, self.scales, self.page_tokens)
    }

    fn of_planes(&self, token_bytes: usize) -> PlanesPage {
        PlanesPage::new(token_bytes, self.page_tokens)
    }

    /// Rows of D numbers that a basis of it has, of keys and of values each; `None` for kinds that
    /// have no basis.
    #[must_use]
    pub fn basis_rows(&self) -> Option<usize> {
        match self.kind {
            PackedKind::TopR(of) => Some(of.channels + 1),
            PackedKind::Planes(_) => Some(2 * self.head_dim + 2),
            PackedKind::Int4 | PackedKind::Int8 => None,
        }
    }

    /// Bits of a code of an INT4 or INT8 page.
    #[must_use]
    pub fn code_bits(&self) -> usize {
        if self.kind == PackedKind::Int8 { 8 } else { 4 }
    }

    /// The largest code of an INT4 or INT8 page.
    #[must_use]
    pub fn largest_code(&self) -> u8 {
        if self.kind == PackedKind::Int8 { 255 } else { 15 }
    }

    /// Bytes of the keys' codes, which are a row of D/8 words a token in an INT4 page.
    #[must_use]
    pub fn key_codes(&self) -> Range<usize> {
        0..self.code_bytes()
    }

    /// Bytes of the values' codes, which are 2·D words for each 16 tokens of an INT4 page.
    #[must_use]
    pub fn value_codes(&self) -> Range<usize> {
        self.after(&self.key_codes(), self.code_bytes())
    }

    fn code_bytes(&self) -> usize {
        self.page_tokens * self.head_dim * self.code_bits() / 8
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

    /// The code of a key: of four bits, channels 8w to 8w + 7 of a token are word w of its row, and
    /// channel 8w + 2i + b is nibble i + 4b of that.
    #[must_use]
    pub fn key_code(&self, token: usize, channel: usize) -> CodePlace {
        if self.code_bits() == 8 {
            return CodePlace { byte: token * self.head_dim + channel, shift: 0 };
        }
        let word = (token * self.head_dim + channel) / 8;
        let (pair, second) = (channel % 8 / 2, channel % 2);
        place(0, word, pair + 4 * second)
    }

    /// The code of a value. Of four bits, a word has two channels of four tokens: of 16 tokens,
    /// lane 4g + t of a warp takes tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of channels 16j + g and
    /// 16j + g + 8, and finds the words of [`value_run`](Self::value_run) of its j beside each
    /// other. Channel 16j + g + 8h of token 2t + b + 8k is nibble 2k + h + 4b.
    #[must_use]
    pub fn value_code(&self, token: usize, channel: usize) -> CodePlace {
        if self.code_bits() == 8 {
            let byte = self.value_codes().start + token * self.head_dim + channel;
            return CodePlace { byte, shift: 0 };
        }
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
    fn an_int8_page_has_a_byte_a_number_and_the_steps_of_int4() {
        for (page_tokens, head_dim) in [(16, 16), (32, 80), (64, 128)] {
            let of = PackedFormat::new(PackedKind::Int8, ScaleDtype::Bf16, page_tokens, head_dim)
                .expect("sound sizes");
            let codes = 2 * page_tokens * head_dim;
            assert_eq!(of.page_bytes(), codes + 4 * head_dim + 4 * page_tokens);
            let mut taken = vec![false; codes];
            for token in 0..page_tokens {
                for channel in 0..head_dim {
                    for place in [of.key_code(token, channel), of.value_code(token, channel)] {
                        assert!(place.shift == 0 && !taken[place.byte]);
                        taken[place.byte] = true;
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_of_planes_are_the_formula() {
        for (page_tokens, head_dim, token_bytes, bytes) in
            [(64, 128, 80, 16 + 64 * 80), (64, 64, 48, 16 + 64 * 48), (80, 64, 40, 32 + 80 * 40)]
        {
            let kind = PackedKind::Planes(token_bytes);
            let made = PackedFormat::new(kind, ScaleDtype::Bf16, page_tokens, head_dim);
            assert_eq!(made.expect("sound sizes").page_bytes(), bytes);
        }
        for token_bytes in [0, 129] {
            let kind = PackedKind::Planes(token_bytes);
            assert!(PackedFormat::new(kind, ScaleDtype::Bf16, 64, 64).is_err());
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
