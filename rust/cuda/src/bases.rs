//! The bases of top-r pages on the device.

use kvweave_core::ops::{KeptNumbers, PackedFormat, TopR};

use crate::error::CudaError;
use crate::operands::{DeviceTensor, narrow};
use crate::params::TopRParams;

/// Bytes that a basis begins on a boundary of.
const ALIGNMENT: u64 = 16;

/// Rotated bases on the device: `kvweave_core::ops::Bases`, whose checks are the caller's where the
/// table is on the host. A block with a number that is none has no tokens, and is not packed.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBases {
    /// f32 [bases, pages, 2, C + 1, D], contiguous.
    pub data: DeviceTensor,
    /// i32 [packed pages].
    pub of: DeviceTensor,
    /// Pages of a block.
    pub pages: usize,
}

/// What kernels are told of top-r pages; of others nothing.
pub(crate) fn top_r_params(
    format: &PackedFormat,
    bases: Option<&DeviceBases>,
    packed_pages: usize,
) -> Result<TopRParams, CudaError> {
    let Some(page) = format.top_r() else { return Ok(TopRParams::default()) };
    let Some(bases) = bases else {
        return Err(CudaError::invalid("bases", "some", "none"));
    };
    let TopR { kept, group, channels, numbers } = page.of();
    let half = (channels + 1).saturating_mul(format.head_dim());
    let one = bases.pages.saturating_mul(2).saturating_mul(half);
    if one == 0 || !bases.data.len.is_multiple_of(one) {
        let expected = format!("a multiple of {one} numbers");
        return Err(CudaError::invalid("bases", expected, bases.data.len));
    }
    if !bases.data.address.is_multiple_of(ALIGNMENT) {
        let got = format!("an address {} bytes past one", bases.data.address % ALIGNMENT);
        let expected = format!("a boundary of {ALIGNMENT} bytes");
        return Err(CudaError::unsupported("bases", expected, got));
    }
    bases.of.expect("basis of each packed page", packed_pages)?;
    Ok(TopRParams {
        bases: bases.data.address,
        basis_of: bases.of.address,
        count: narrow("bases", bases.data.len / one)?,
        pages: narrow("pages of a basis", bases.pages)?,
        kept: narrow("kept", kept)?,
        group: narrow("group", group)?,
        channels: narrow("channels", channels)?,
        bits: bits_of(numbers),
    })
}

fn bits_of(numbers: KeptNumbers) -> u32 {
    match numbers {
        KeptNumbers::Bf16 => 16,
        KeptNumbers::Fp8 => 8,
        KeptNumbers::Int4 => 4,
    }
}
