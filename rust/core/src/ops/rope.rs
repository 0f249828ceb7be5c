//! Rotary position embedding, as far as moving a cached key needs it.

use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;

/// Which two elements of a vector form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// `(x[i], x[i + rotary_dim/2])`: Llama, Qwen, Mistral, Gemma.
    Half,
    /// `(x[2i], x[2i + 1])`: GPT-J, original RoFormer.
    Interleaved,
}

impl Pairing {
    /// The two elements of pair `i` when `pairs` pairs are rotated.
    #[must_use]
    pub fn elements(self, i: usize, pairs: usize) -> (usize, usize) {
        match self {
            Self::Half => (i, i + pairs),
            Self::Interleaved => (2 * i, 2 * i + 1),
        }
    }
}

/// Inverse frequencies of every layer: [L, rotary_dim/2].
///
/// Moving a key by `delta` positions multiplies pair i by the rotation of angle
/// `delta · inv_freq[i]`, whatever the RoPE kind (linear, NTK, YaRN, Llama-3, LongRoPE, partial,
/// per-layer θ): the kinds differ in `inv_freq`, and the attention scaling some apply cancels.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    inv_freq: Vec<f32>,
    pairs: usize,
    pairing: Pairing,
    first_alike: Vec<usize>,
}

impl RopeTable {
    /// A table of `layers` equal-length rows; `inv_freq` is row-major.
    ///
    /// # Errors
    /// `Shape` when the length is no multiple of `layers` or `layers` is 0, `InvalidArgument` for
    /// a frequency that is not finite.
    pub fn new(inv_freq: Vec<f32>, layers: usize, pairing: Pairing) -> Result<Self, OpError> {
        let len = inv_freq.len();
        let whole = layers > 0 && len.is_multiple_of(layers);
        ensure(whole, OpErrorKind::Shape, "inv_freq", || {
            (format!("a multiple of {} (layers) elements", layers.max(1)), len)
        })?;
        if let Some(bad) = inv_freq.iter().find(|f| !f.is_finite()) {
            return Err(OpError::new(OpErrorKind::InvalidArgument, "inv_freq", "finite", bad));
        }
        let pairs = len / layers;
        let row = |layer: usize| &inv_freq[layer * pairs..(layer + 1) * pairs];
        let first_alike = (0..layers)
            .map(|layer| (0..layer).find(|&other| row(other) == row(layer)).unwrap_or(layer))
            .collect();
        Ok(Self { inv_freq, pairs, pairing, first_alike })
    }

    /// L.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.first_alike.len()
    }

    /// Rotated pairs of a vector: rotary_dim / 2. Elements from `2 · pairs` on are not rotated.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// How elements are paired.
    #[must_use]
    pub fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// Inverse frequencies of a layer, [rotary_dim/2].
    ///
    /// # Panics
    /// If the layer is out of range.
    #[must_use]
    pub fn inv_freq(&self, layer: usize) -> &[f32] {
        &self.inv_freq[layer * self.pairs..(layer + 1) * self.pairs]
    }

    /// The first layer with the same frequencies: layers alike may share cosines and sines.
    ///
    /// # Panics
    /// If the layer is out of range.
    #[must_use]
    pub fn first_alike(&self, layer: usize) -> usize {
        self.first_alike[layer]
    }

    pub(crate) fn check_fits(&self, geometry: &PageGeometry) -> Result<(), OpError> {
        ensure(self.layers() == geometry.layers, OpErrorKind::Shape, "layers of rope", || {
            (geometry.layers, self.layers())
        })?;
        ensure(2 * self.pairs <= geometry.head_dim, OpErrorKind::Shape, "rotary_dim", || {
            (format!("at most the head dim {}", geometry.head_dim), 2 * self.pairs)
        })
    }
}
