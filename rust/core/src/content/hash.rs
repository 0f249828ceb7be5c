//! Digests of token spans: chained for prefixes, position-free for segments, rolling for search.
//!
//! Prefix: `d[i] = H(d[i-1], tokens of block i)`, `d[-1] = H(namespace, regime, model)`.
//! Virtual (SparseX §4.3): `H(tokens, namespace, regime)`, no position and no context.

use serde::{Deserialize, Serialize};
use sha2::block_api::compress256;
use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

/// A 128-bit digest: where to look, never what was found. Every hit compares the token ids (and for
/// a prefix the block before), so digests that collide cost a comparison and serve nothing foreign.
///
/// That is why 128 bits are enough and the tables index by 64 of them. Of n digests any two are
/// equal with a probability below n² / 2¹²⁹, any two table keys below n² / 2⁶⁵: with 2²⁴ blocks,
/// 268 million tokens, 2⁻⁸¹ and 2⁻¹⁷. Whoever stores content by digest alone needs another digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(u128);

impl Digest {
    pub(super) const ZERO: Digest = Digest(0);

    /// The half that indexes tables.
    #[must_use]
    pub fn low(self) -> u64 {
        self.0 as u64
    }

    fn high(self) -> u64 {
        (self.0 >> 64) as u64
    }
}

/// How token spans are hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HashKind {
    /// XXH3, 128 bits: fast, not against an adversary.
    #[default]
    #[serde(rename = "xxh3-128")]
    Xxh3_128,
    /// SHA-256 cut to 128 bits: nobody can hit a given text's digest (2¹²⁸ hashes). Two texts of
    /// one's own that share a digest take some 2⁶⁴, and slow down no lookups but their own.
    Sha256,
    /// XXH3 of which only the lowest bits are kept, so that digests collide all the time. Serves
    /// to show that collisions cost time and nothing else.
    Truncated {
        /// Bits that are kept.
        bits: u8,
    },
}

/// Spreads a contribution of the parent's high half over all bits; odd, hence injective.
const SPREAD: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
/// FIPS 180-4, 5.3.3.
const SHA256_START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];
const TOKEN_MIX: u64 = 0x9e37_79b9_7f4a_7c15;
const ROLL_BASE: u64 = 0xd6e8_feb8_6659_fd93;

/// Hashes token spans in one of the ways of [`HashKind`].
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    kind: HashKind,
    seed: u64,
    roll_out: u64,
}

impl BlockHasher {
    /// A hasher for pages of `page_tokens` tokens; `seed` separates caches of different shapes.
    #[must_use]
    pub fn new(kind: HashKind, seed: u64, page_tokens: usize) -> BlockHasher {
        let steps = page_tokens.saturating_sub(1);
        let roll_out = (0..steps).fold(1u64, |power, _| power.wrapping_mul(ROLL_BASE));
        BlockHasher { kind, seed, roll_out }
    }

    /// The digest before the first block of a prompt.
    #[must_use]
    pub fn root(&self, namespace: &str, regime: u64, model: &str) -> Digest {
        let mut text = Vec::with_capacity(namespace.len() + model.len() + 32);
        for part in [namespace.as_bytes(), model.as_bytes()] {
            text.extend_from_slice(&(part.len() as u64).to_le_bytes());
            text.extend_from_slice(part);
        }
        text.extend_from_slice(&regime.to_le_bytes());
        text.extend_from_slice(&self.seed.to_le_bytes());
        match self.kind {
            HashKind::Sha256 => sha256(&[], &text),
            _ => Digest(xxh3_128_with_seed(&text, self.seed)),
        }
    }

    /// The digest of a block after the blocks that `parent` stands for. Also the virtual hash,
    /// with the root of another domain as parent.
    #[must_use]
    pub fn chain(&self, parent: Digest, tokens: &[u32]) -> Digest {
        let bytes: &[u8] = bytemuck::cast_slice(tokens);
        match self.kind {
            HashKind::Xxh3_128 => xxh3(parent, bytes),
            HashKind::Sha256 => sha256(&parent.0.to_le_bytes(), bytes),
            HashKind::Truncated { bits } => Digest(xxh3(parent, bytes).0 & mask(bits)),
        }
    }

    /// The rolling hash of a window, to be finished by [`Self::roll_key`]: `Σ v[i]·Bⁿ⁻¹⁻ⁱ`.
    ///
    /// Four tokens a step, since each step waits for the multiplication before.
    #[must_use]
    pub fn roll(&self, window: &[u32]) -> u64 {
        const POWERS: [u64; 4] = powers();
        let chunks = window.chunks_exact(4);
        let rest = chunks.remainder();
        let sum = chunks.fold(0u64, |sum, chunk| {
            let values = chunk.iter().zip(POWERS.iter().rev());
            let own = values.fold(0u64, |own, (&token, power)| {
                own.wrapping_add(token_value(token).wrapping_mul(*power))
            });
            sum.wrapping_mul(POWERS[3].wrapping_mul(ROLL_BASE)).wrapping_add(own)
        });
        rest.iter()
            .fold(sum, |sum, &token| sum.wrapping_mul(ROLL_BASE).wrapping_add(token_value(token)))
    }

    /// Moves a window of one page by one token.
    #[must_use]
    pub fn slide(&self, sum: u64, out: u32, into: u32) -> u64 {
        sum.wrapping_sub(token_value(out).wrapping_mul(self.roll_out))
            .wrapping_mul(ROLL_BASE)
            .wrapping_add(token_value(into))
    }

    /// The table key of a rolling hash within one namespace and regime.
    #[must_use]
    pub fn roll_key(&self, sum: u64, domain: Digest) -> u64 {
        let mixed = (sum ^ domain.low()).wrapping_mul(TOKEN_MIX);
        let key = mixed ^ (mixed >> 32);
        match self.kind {
            HashKind::Truncated { bits } => key & mask(bits) as u64,
            _ => key.wrapping_mul(ROLL_BASE),
        }
    }
}

/// The powers 0..4 of the rolling base.
const fn powers() -> [u64; 4] {
    let square = ROLL_BASE.wrapping_mul(ROLL_BASE);
    [1, ROLL_BASE, square, square.wrapping_mul(ROLL_BASE)]
}

fn token_value(token: u32) -> u64 {
    (u64::from(token) + 1).wrapping_mul(TOKEN_MIX)
}

fn mask(bits: u8) -> u128 {
    if bits >= 128 { u128::MAX } else { (1 << bits) - 1 }
}

fn xxh3(parent: Digest, bytes: &[u8]) -> Digest {
    let own = xxh3_128_with_seed(bytes, parent.low());
    Digest(own ^ u128::from(parent.high()).wrapping_mul(SPREAD))
}

/// SHA-256 of a digest and a block's tokens, or of any text, cut to 128 bits.
///
/// A message of at most two compression blocks, as a block of 16 tokens makes, is padded here:
/// the incremental interface costs as much again as the compression itself.
fn sha256(parent: &[u8], bytes: &[u8]) -> Digest {
    let len = parent.len() + bytes.len();
    let mut half = [0u8; 16];
    if len > 2 * 64 - 9 {
        let full = Sha256::new().chain_update(parent).chain_update(bytes).finalize();
        half.copy_from_slice(&full[..16]);
        return Digest(u128::from_le_bytes(half));
    }
    let mut message = [[0u8; 64]; 2];
    let flat = message.as_flattened_mut();
    flat[..parent.len()].copy_from_slice(parent);
    flat[parent.len()..len].copy_from_slice(bytes);
    flat[len] = 0x80;
    let blocks = (len + 9).div_ceil(64);
    flat[blocks * 64 - 8..blocks * 64].copy_from_slice(&(8 * len as u64).to_be_bytes());
    let mut state = SHA256_START;
    compress256(&mut state, &message[..blocks]);
    for (bytes, word) in half.chunks_exact_mut(4).zip(state) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    Digest(u128::from_le_bytes(half))
}

/// A seed from whatever must separate two caches.
#[must_use]
pub fn seed_of(parts: &[u32]) -> u64 {
    xxh3_64_with_seed(bytemuck::cast_slice(parts), parts.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [HashKind; 3] =
        [HashKind::Xxh3_128, HashKind::Sha256, HashKind::Truncated { bits: 120 }];

    #[test]
    fn everything_that_separates_enters_the_root() {
        for kind in KINDS {
            let hasher = BlockHasher::new(kind, 1, 4);
            let base = hasher.root("a", 0, "m");
            let others = [
                hasher.root("b", 0, "m"),
                hasher.root("a", 1, "m"),
                hasher.root("a", 0, "n"),
                hasher.root("", 0, "am"),
                BlockHasher::new(kind, 2, 4).root("a", 0, "m"),
            ];
            assert!(others.iter().all(|other| *other != base));
            assert_ne!(hasher.chain(base, &[1, 2]), hasher.chain(others[0], &[1, 2]));
            assert_ne!(hasher.chain(base, &[1, 2]), hasher.chain(base, &[2, 1]));
        }
    }

    #[test]
    fn sha256_is_the_known_function() {
        let empty = sha256(&[], &[]).0.to_le_bytes();
        assert_eq!(empty[..4], [0xe3, 0xb0, 0xc4, 0x42]);
        assert_eq!(sha256(b"ab", b"c").0.to_le_bytes()[..4], [0xba, 0x78, 0x16, 0xbf]);
    }

    proptest! {
        #[test]
        fn short_and_long_messages_are_padded_alike(
            parent in proptest::collection::vec(any::<u8>(), 0..40),
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let full = Sha256::new().chain_update(&parent).chain_update(&bytes).finalize();
            prop_assert_eq!(&sha256(&parent, &bytes).0.to_le_bytes()[..], &full[..16]);
        }

        #[test]
        fn sliding_equals_hashing_afresh(
            tokens in proptest::collection::vec(any::<u32>(), 20..60), page in 1usize..20,
        ) {
            let hasher = BlockHasher::new(HashKind::Xxh3_128, 0, page);
            let mut sum = hasher.roll(&tokens[..page]);
            for at in 1..=tokens.len() - page {
                sum = hasher.slide(sum, tokens[at - 1], tokens[at + page - 1]);
                prop_assert_eq!(sum, hasher.roll(&tokens[at..at + page]));
            }
        }
    }
}
