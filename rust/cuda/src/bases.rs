//! The bases of top-r pages and planes on the device.

use kvweave_core::ops::{KeptNumbers, PackedFormat, TopR};

use crate::error::CudaError;
use crate::operands::{DeviceTensor, narrow};
use crate::params::{BasesParams, TopRParams};

/// Bytes that a basis begins on a boundary of.
const ALIGNMENT: u64 = 16;

/// Rotated bases on the device: `kvweave_core::ops::Bases`, whose checks are the caller's where the
/// table is on the host. A block with a number that is none has no tokens, and is not packed; nor
/// is a page whose basis has bits that are no planes.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBases {
    /// f32 [bases, pages, 2, rows, D], contiguous.
    pub data: DeviceTensor,
    /// i32 [packed pages].
    pub of: DeviceTensor,
    /// Pages of a block.
    pub pages: usize,
}

/// What kernels are told of the bases of a format's pages; of kinds without bases nothing.
pub(crate) fn bases_params(
    format: &PackedFormat,
    bases: Option<&DeviceBases>,
    packed_pages: usize,
) -> Result<BasesParams, CudaError> {
    let Some(rows) = format.basis_rows() else { return Ok(BasesParams::default()) };
    let Some(bases) = bases else {
        return Err(CudaError::invalid("bases", "some", "none"));
    };
    let half = rows.saturating_mul(format.head_dim());
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
    let token_bytes = format.planes().map_or(0, |page| page.token_bytes());
    Ok(BasesParams {
        bases: bases.data.address,
        basis_of: bases.of.address,
        count: narrow("bases", bases.data.len / one)?,
        pages: narrow("pages of a basis", bases.pages)?,
        rows: narrow("rows of a basis", rows)?,
        token_bytes: narrow("token_bytes", token_bytes)?,
    })
}

/// What kernels are told of top-r pages; of others nothing.
pub(crate) fn top_r_params(format: &PackedFormat) -> Result<TopRParams, CudaError> {
    let Some(page) = format.top_r() else { return Ok(TopRParams::default()) };
    let TopR { kept, group, channels, numbers } = page.of();
    Ok(TopRParams {
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
