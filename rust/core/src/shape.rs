//! The geometry of a model's KV cache, and its bytes.

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The element type of stored K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// FP8 E4M3 ([`Fp8E4m3`](crate::ops::Fp8E4m3)), times a scale that its reader knows.
    #[serde(rename = "fp8_e4m3")]
    Fp8E4m3,
}

impl KvDtype {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 | KvDtype::F16 => 2,
            KvDtype::Fp8E4m3 => 1,
        }
    }

    /// Whether what is stored is meant times a scale.
    #[must_use]
    pub fn is_quantised(self) -> bool {
        self == KvDtype::Fp8E4m3
    }
}

/// L layers, G KV heads, head dim D, P tokens a page, element type.
///
/// A page is P tokens of one KV head of one layer: K `[P, D]`, then V `[P, D]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    page_tokens: u32,
    dtype: KvDtype,
}

impl KvShape {
    /// The largest P: slots of a block fit a byte, and a smaller P only costs index entries.
    pub const MAX_PAGE_TOKENS: u32 = 256;

    /// The largest L·G: a cache has a table of its heads, and no model comes near a million.
    pub const MAX_HEADS: u64 = 1 << 20;

    /// Checks and builds a shape.
    ///
    /// # Errors
    /// `InvalidArgument` if a size is zero, P is above [`Self::MAX_PAGE_TOKENS`], or L·G above
    /// [`Self::MAX_HEADS`].
    pub fn new(
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        page_tokens: u32,
        dtype: KvDtype,
    ) -> Result<KvShape, Error> {
        let named = [("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)];
        for (name, value) in named {
            if value == 0 || value > 1 << 20 {
                return Err(Error::invalid(name, "1 <= size <= 1048576", value));
            }
        }
        if page_tokens == 0 || page_tokens > Self::MAX_PAGE_TOKENS {
            let bound = format!("1 <= tokens <= {}", Self::MAX_PAGE_TOKENS);
            return Err(Error::invalid("page_tokens", bound, page_tokens));
        }
        let heads = u64::from(layers) * u64::from(kv_heads);
        if heads > Self::MAX_HEADS {
            let expected = format!("at most {} heads", Self::MAX_HEADS);
            return Err(Error::invalid("layers * kv_heads", expected, heads));
        }
        Ok(KvShape { layers, kv_heads, head_dim, page_tokens, dtype })
    }

    /// L, the number of layers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// G, the number of KV heads of a layer.
    #[must_use]
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// D, the elements of one K or V vector.
    #[must_use]
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// P, the tokens of a page.
    #[must_use]
    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> KvDtype {
        self.dtype
    }

    /// L·G: the pages of one block that holds every head.
    #[must_use]
    pub fn pages_per_token_span(&self) -> u32 {
        self.layers * self.kv_heads
    }

    /// Elements of one page: 2·P·D.
    #[must_use]
    pub fn page_elems(&self) -> u64 {
        2 * u64::from(self.page_tokens) * u64::from(self.head_dim)
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_elems() * self.dtype.bytes()
    }

    /// Bytes of K and V of one token over all layers and heads.
    #[must_use]
    pub fn token_bytes(&self) -> u64 {
        let vectors = 2 * u64::from(self.pages_per_token_span());
        vectors * u64::from(self.head_dim) * self.dtype.bytes()
    }

    /// Bytes of an arena of `pages` pages.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes do not fit 63 bits.
    pub fn arena_bytes(&self, pages: u64) -> Result<u64, Error> {
        pages
            .checked_mul(self.page_bytes())
            .filter(|&bytes| i64::try_from(bytes).is_ok())
            .ok_or_else(|| {
                let got = format!("{pages} pages of {} bytes", self.page_bytes());
                Error::invalid("arena", "bytes that fit 63 bits", got)
            })
    }

    /// Blocks that `tokens` tokens occupy.
    #[must_use]
    pub fn blocks_for_tokens(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.page_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn bytes_follow_from_the_shape() {
        let shape = KvShape::new(30, 3, 64, 16, KvDtype::F32).unwrap();
        assert_eq!(shape.page_elems(), 2048);
        assert_eq!(shape.page_bytes(), 8192);
        assert_eq!(shape.token_bytes(), 30 * 3 * 64 * 2 * 4);
        assert_eq!(shape.blocks_for_tokens(17), 2);
        let small = KvShape::new(30, 3, 64, 16, KvDtype::Fp8E4m3).unwrap();
        assert_eq!(4 * small.page_bytes(), shape.page_bytes());
        assert_eq!(4 * small.token_bytes(), shape.token_bytes());
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for bad in [
            KvShape::new(0, 3, 64, 16, KvDtype::F32),
            KvShape::new(30, 0, 64, 16, KvDtype::F32),
            KvShape::new(30, 3, 0, 16, KvDtype::F32),
            KvShape::new(30, 3, 64, 0, KvDtype::F32),
            KvShape::new(30, 3, 64, 257, KvDtype::F32),
            KvShape::new(1 << 20, 1 << 20, 64, 16, KvDtype::F32),
            KvShape::new(1 << 20, 2, 64, 16, KvDtype::F32),
        ] {
            assert_eq!(bad.unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        let shape = KvShape::new(32, 8, 128, 16, KvDtype::Bf16).unwrap();
        assert!(shape.arena_bytes(u64::MAX).is_err());
    }
}
