//! The pages as Hopper's copy engine sees them.

use crate::attend_call::AttendLaunch;
use crate::error::CudaError;
use crate::operands::{Tiled, bytes_of, narrow};
use crate::params::{AttendParams, TiledAttendParams};
use crate::tensor_map::TensorMap;

/// Bytes of columns that a copy takes side by side.
const BLOCK_BYTES: usize = 128;

/// The cache as the copy engine sees it, [page, 8-token group, block of columns, 8, columns] with
/// up to 128 bytes of columns, and the elements between its pages: whatever divides all distances
/// between pages' keys and values. A copy takes all columns of 16 tokens, or a `tall` one a block
/// of columns of all tokens.
pub(crate) fn tiled(
    call: &AttendLaunch<'_>,
    attend: AttendParams,
    tall: bool,
) -> Result<TiledAttendParams, CudaError> {
    let geometry = &call.kv.geometry;
    let unit = [geometry.head_stride, geometry.value_offset]
        .into_iter()
        .fold(geometry.block_stride, greatest_common_divisor)
        .max(1);
    let bytes = bytes_of(call.kv.dtype) as u64;
    let number = |count: usize| count as u64;
    let columns = geometry.head_dim.min(BLOCK_BYTES / bytes_of(call.kv.dtype));
    let (groups, blocks) = (geometry.page_tokens / 8, geometry.head_dim / columns);
    let narrow_of = |count: usize| narrow("head_dim", count);
    let token_bytes = number(geometry.token_stride) * bytes;
    let copied = if tall { (1, groups) } else { (blocks, 2) };
    let pages = TensorMap::tiled(&Tiled {
        address: call.kv.cache.address,
        dtype: call.kv.dtype,
        dims: &[
            number(columns),
            8,
            number(blocks),
            number(groups),
            number(call.kv.cache.len.div_ceil(unit)),
        ],
        strides_bytes: &[
            token_bytes,
            number(columns) * bytes,
            8 * token_bytes,
            number(unit) * bytes,
        ],
        copied: &[narrow_of(columns)?, 8, narrow_of(copied.0)?, narrow_of(copied.1)?, 1],
    })?;
    Ok(TiledAttendParams {
        pages,
        attend,
        block_units: narrow("page", geometry.block_stride / unit)?,
        head_units: narrow("page", geometry.head_stride / unit)?,
        value_units: narrow("page", geometry.value_offset / unit)?,
    })
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
