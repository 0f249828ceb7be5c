//! Descriptions of tensors that Hopper's copy engine reads by itself.

use kvweave_core::KvDtype;

use crate::error::CudaError;
use crate::ffi;
use crate::operands::Tiled;

/// A tensor as the copy engine (TMA) sees it: `CUtensorMap` of the CUDA headers, part of a
/// kernel's params.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == 128);

impl TensorMap {
    /// A map whose copies lie in shared memory in the 128-byte swizzle: 16-byte words of row r
    /// xor r mod 8. What lies outside `dims` is read as 0.
    ///
    /// # Errors
    /// `InvalidArgument` for axes that do not belong together or a dtype of another size, `Driver`
    /// for what the driver refuses. A driver must be there.
    pub fn tiled(tensor: &Tiled<'_>) -> Result<Self, CudaError> {
        let axes = tensor.dims.len();
        if !(1..=5).contains(&axes) {
            return Err(CudaError::invalid("axes of a tensor map", "1 to 5", axes));
        }
        if tensor.strides_bytes.len() != axes - 1 || tensor.copied.len() != axes {
            let got = (tensor.strides_bytes.len(), tensor.copied.len());
            let expected = format!("{:?}", (axes - 1, axes));
            let what = "strides and box of a tensor map";
            return Err(CudaError::invalid(what, expected, format!("{got:?}")));
        }
        if tensor.dtype == KvDtype::F32 {
            return Err(CudaError::invalid("dtype of a tensor map", "bf16, f16 or fp8", "f32"));
        }
        ffi::encode_tiled(tensor).map(Self)
    }
}
