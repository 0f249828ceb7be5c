//! What launches are given: tensors on the device, and numbers as kernels take them.

use kvweave_core::KvDtype;
use kvweave_core::ops::PageGeometry;

use crate::error::CudaError;

/// A tensor on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensor {
    /// First element.
    pub address: u64,
    /// Elements from the first to one past the last.
    pub len: usize,
}

impl DeviceTensor {
    /// Refuses a tensor of fewer elements.
    pub(crate) fn expect(&self, what: &'static str, len: usize) -> Result<(), CudaError> {
        if self.len >= len {
            return Ok(());
        }
        Err(CudaError::invalid(what, format!("at least {len} elements"), self.len))
    }

    /// Refuses a tensor of fewer elements than the product of `sizes`, whatever they are.
    pub(crate) fn expect_size(&self, what: &'static str, sizes: &[usize]) -> Result<(), CudaError> {
        let size = sizes.iter().try_fold(1usize, |size, &axis| size.checked_mul(axis));
        self.expect(what, size.unwrap_or(usize::MAX))
    }
}

/// A tensor [rows, heads, D] on the device whose last axis is contiguous.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows {
    /// Elements.
    pub tensor: DeviceTensor,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
}

impl DeviceRows {
    /// Refuses strides that leave the tensor.
    pub(crate) fn expect(
        &self,
        what: &'static str,
        (rows, heads, head_dim): (usize, usize, usize),
    ) -> Result<(), CudaError> {
        if rows == 0 || heads == 0 {
            return Ok(());
        }
        let last_row = (rows - 1).saturating_mul(self.row_stride);
        let last_head = (heads - 1).saturating_mul(self.head_stride);
        let last = last_row.saturating_add(last_head);
        self.tensor.expect(what, last.saturating_add(head_dim))
    }
}

/// What a [`TensorMap`](crate::TensorMap) describes. Axes run from the one that is contiguous to
/// the slowest.
#[derive(Clone, Copy, Debug)]
pub struct Tiled<'a> {
    /// First element, on a 16-byte boundary.
    pub address: u64,
    /// Elements: bf16, f16 or fp8.
    pub dtype: KvDtype,
    /// Elements of each axis.
    pub dims: &'a [u64],
    /// Bytes from one index to the next of each axis but the first; multiples of 16.
    pub strides_bytes: &'a [u64],
    /// Elements of each axis that one copy takes; at most 128 bytes of the first.
    pub copied: &'a [u32],
}

/// How a dtype is called in the names of kernels.
pub(crate) fn name_of(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => "f32",
        KvDtype::Bf16 => "bf16",
        KvDtype::F16 => "f16",
        KvDtype::Fp8E4m3 => "fp8",
    }
}

/// How kernels of rows over a cache are called: by one dtype where both have it.
pub(crate) fn names_of(rows: KvDtype, cache: KvDtype) -> String {
    if rows == cache {
        return name_of(rows).into();
    }
    format!("{}_{}", name_of(rows), name_of(cache))
}

/// Bytes of an element.
pub(crate) fn bytes_of(dtype: KvDtype) -> usize {
    match dtype {
        KvDtype::F32 => 4,
        KvDtype::Bf16 | KvDtype::F16 => 2,
        KvDtype::Fp8E4m3 => 1,
    }
}

/// Block numbers whose page `last_page` elements after the block's start, and with it every page
/// before that, lies in a tensor of `len` elements.
pub(crate) fn blocks_within(geometry: &PageGeometry, last_page: usize, len: usize) -> i64 {
    let first_block = last_page
        + (geometry.page_tokens.saturating_sub(1)) * geometry.token_stride
        + geometry.value_offset
        + geometry.head_dim;
    let further = len.checked_sub(first_block).map(|rest| rest / geometry.block_stride.max(1));
    further.map_or(0, |further| i64::try_from(further + 1).unwrap_or(i64::MAX))
}

/// The latest element of a tensor of `len` elements at which a page may begin, −1 when none fits.
pub(crate) fn last_page(geometry: &PageGeometry, len: usize) -> i64 {
    let page = geometry.page_tokens.saturating_sub(1) * geometry.token_stride
        + geometry.value_offset
        + geometry.head_dim;
    last_start(page, len)
}

/// The same of pages of so many elements.
pub(crate) fn last_start(page: usize, len: usize) -> i64 {
    len.checked_sub(page).map_or(-1, |last| i64::try_from(last).unwrap_or(i64::MAX))
}

/// A count as kernels take it.
pub(crate) fn narrow(what: &'static str, value: usize) -> Result<u32, CudaError> {
    u32::try_from(value).map_err(|_| CudaError::invalid(what, "a 32-bit number", value))
}

/// A stride as kernels take it.
pub(crate) fn long(what: &'static str, value: usize) -> Result<i64, CudaError> {
    i64::try_from(value).map_err(|_| CudaError::invalid(what, "a 63-bit number", value))
}

/// What kernels multiply by to divide by `divisor`: 2^32 / divisor rounded up, 0 for 1.
pub(crate) fn factor_of(what: &'static str, divisor: usize) -> Result<u32, CudaError> {
    if divisor == 1 { Ok(0) } else { narrow(what, (1_usize << 32).div_ceil(divisor.max(1))) }
}

/// Thread blocks of a launch's first axis, which takes the most.
pub(crate) fn blocks_of(what: &'static str, count: usize) -> Result<u32, CudaError> {
    let limit = i32::MAX.cast_unsigned();
    match u32::try_from(count) {
        Ok(count) if count <= limit => Ok(count),
        _ => Err(CudaError::invalid(what, format!("at most {limit} thread blocks"), count)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_any_number_are_refused() {
        let tensor = DeviceTensor { address: 0, len: 24 };
        assert!(tensor.expect_size("out", &[2, 3, 4]).is_ok());
        assert!(tensor.expect_size("out", &[5, 5]).is_err());
        assert!(tensor.expect_size("out", &[1 << 32, 1 << 32]).is_err());
        let rows = DeviceRows { tensor, row_stride: 1 << 40, head_stride: 8 };
        assert!(rows.expect("q", (1, 3, 8)).is_ok());
        assert!(rows.expect("q", (1 << 24, 1, 8)).is_err());
    }

    #[test]
    fn blocks_within_counts_the_last_block_that_fits() {
        let geometry = PageGeometry::arena(2, 3, 4, 8);
        let page = 2 * 4 * 8;
        assert_eq!(blocks_within(&geometry, 5 * page, 6 * page), 1);
        assert_eq!(blocks_within(&geometry, 5 * page, 6 * page - 1), 0);
        assert_eq!(blocks_within(&geometry, 5 * page, 18 * page), 13);
        assert_eq!(blocks_within(&geometry, 5 * page, 0), 0);
    }

    #[test]
    fn last_page_is_that_of_any_rank() {
        let geometry = PageGeometry::arena(2, 3, 4, 8);
        let page = 2 * 4 * 8;
        assert_eq!(last_page(&geometry, 18 * page), 17 * page as i64);
        assert_eq!(last_page(&geometry, page), 0);
        assert_eq!(last_page(&geometry, page - 1), -1);
    }

    #[test]
    fn factors_divide() {
        for divisor in [1, 2, 3, 7, 8, 132, 1024] {
            let factor = u64::from(factor_of("divisor", divisor).unwrap());
            for x in (0..3_000_000_u64).step_by(997).chain([divisor as u64 - 1, divisor as u64]) {
                let quotient = if factor == 0 { x } else { (x * factor) >> 32 };
                assert_eq!(quotient, x / divisor as u64, "{x} / {divisor}");
            }
        }
    }
}
