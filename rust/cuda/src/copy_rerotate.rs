//! Launch of `copy_rerotate.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::{PageGeometry, Pairing};

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{self, DeviceBuffer, Function, Module};
use crate::params::CopyRerotateParams;

/// Threads of the largest block, as the kernel's launch bounds say.
const MAX_THREADS: usize = 256;
/// Thread blocks that keep the largest devices busy to the end.
const ENOUGH_BLOCKS: usize = 8192;

/// A tensor on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensor {
    /// First element.
    pub address: u64,
    /// Elements from the first to one past the last.
    pub len: usize,
}

/// Tokens of all layers and heads copied between blocks, keys rotated: see
/// `kvweave_core::ops::CopyRerotate`, whose checks are the caller's where the table is on the host.
/// The kernel itself skips rows that point outside the cache.
#[derive(Clone, Copy, Debug)]
pub struct CopyRerotateLaunch<'a> {
    /// The whole paged tensor.
    pub cache: DeviceTensor,
    /// Its elements.
    pub dtype: KvDtype,
    /// Its strides.
    pub geometry: PageGeometry,
    /// i32 [copy_count, 6], contiguous.
    pub copies: DeviceTensor,
    /// Rows of `copies`.
    pub copy_count: usize,
    /// f32 [layers, pairs].
    pub inv_freq: &'a DeviceBuffer,
    /// rotary_dim / 2.
    pub pairs: usize,
    /// How elements pair up.
    pub pairing: Pairing,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// The entry points, by (dtype, pairing, wide).
#[derive(Debug)]
pub(crate) struct Kernels {
    functions: [Function; 12],
    _module: Module,
}

const DTYPES: [(KvDtype, &str); 3] =
    [(KvDtype::F32, "f32"), (KvDtype::Bf16, "bf16"), (KvDtype::F16, "f16")];
const PAIRINGS: [(Pairing, &str); 2] =
    [(Pairing::Half, "half"), (Pairing::Interleaved, "interleaved")];

impl Kernels {
    pub(crate) fn of(module: Module) -> Result<Self, CudaError> {
        let mut functions = Vec::with_capacity(12);
        for (_, dtype) in DTYPES {
            for (_, pairing) in PAIRINGS {
                for width in ["narrow", "wide"] {
                    let name = format!("copy_rerotate_{dtype}_{pairing}_{width}");
                    functions.push(module.function(&name)?);
                }
            }
        }
        let functions = functions
            .try_into()
            .map_err(|_| CudaError::invalid("kernels", "12 entry points", "fewer"))?;
        Ok(Self { functions, _module: module })
    }

    fn get(&self, dtype: KvDtype, pairing: Pairing, wide: bool) -> Function {
        let dtype = DTYPES.iter().position(|(of, _)| *of == dtype).unwrap_or(0);
        let pairing = PAIRINGS.iter().position(|(of, _)| *of == pairing).unwrap_or(0);
        self.functions[dtype * 4 + pairing * 2 + usize::from(wide)]
    }
}

impl CudaBackend {
    /// Puts the copy on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, and no block is both read and written
    /// in one call.
    ///
    /// # Errors
    /// `InvalidArgument` for a geometry the kernel cannot take, `Driver` when the launch fails.
    pub unsafe fn copy_rerotate(&self, call: &CopyRerotateLaunch<'_>) -> Result<(), CudaError> {
        if call.copy_count == 0 {
            return Ok(());
        }
        let shape = Shape::of(call)?;
        let params = params_of(call, &shape)?;
        let function = self.copy_rerotate.get(call.dtype, call.pairing, shape.wide);
        let launch = (shape.grid, shape.threads, shape.shared_bytes);
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { ffi::launch(&self.context, function, launch, call.stream, &params) }
    }
}

/// How the work is cut.
struct Shape {
    wide: bool,
    threads: u32,
    heads_per_block: usize,
    grid: u32,
    shared_bytes: u32,
}

impl Shape {
    fn of(call: &CopyRerotateLaunch<'_>) -> Result<Self, CudaError> {
        let geometry = &call.geometry;
        let bytes = usize::try_from(call.dtype.bytes()).unwrap_or(usize::MAX);
        let vector = 16 / bytes;
        let strides = [
            geometry.block_stride,
            geometry.layer_stride,
            geometry.head_stride,
            geometry.token_stride,
            geometry.value_offset,
            geometry.head_dim,
            call.pairs,
        ];
        let wide = call.cache.address.is_multiple_of(16)
            && strides.iter().all(|stride| stride.is_multiple_of(vector));
        let vector = if wide { vector } else { 1 };
        let columns = geometry.head_dim / vector;
        if columns > MAX_THREADS {
            let expected = format!("at most {MAX_THREADS} vectors of {vector} elements");
            return Err(CudaError::invalid("head_dim", expected, geometry.head_dim));
        }
        let key_columns = columns - call.pairs / vector;
        let wanted = (key_columns * geometry.page_tokens).max(columns).next_multiple_of(32);
        let pages = call.copy_count * geometry.layers * geometry.kv_heads;
        let heads_per_block = (pages / ENOUGH_BLOCKS).clamp(1, geometry.kv_heads);
        let chunks = geometry.kv_heads.div_ceil(heads_per_block);
        let grid = call.copy_count * geometry.layers * chunks;
        let wide_bytes = if call.dtype == KvDtype::F32 { 8 } else { 4 };
        Ok(Self {
            wide,
            threads: narrow("threads", wanted.min(MAX_THREADS))?,
            heads_per_block,
            grid: narrow("copies", grid).and_then(|grid| {
                let limit = i32::MAX.cast_unsigned();
                let refuse = || CudaError::invalid("thread blocks", format!("≤ {limit}"), grid);
                if grid <= limit { Ok(grid) } else { Err(refuse()) }
            })?,
            shared_bytes: narrow("rotary_dim", 2 * call.pairs * wide_bytes)?,
        })
    }
}

fn params_of(
    call: &CopyRerotateLaunch<'_>,
    shape: &Shape,
) -> Result<CopyRerotateParams, CudaError> {
    let geometry = &call.geometry;
    if 2 * call.pairs > geometry.head_dim {
        return Err(CudaError::invalid("rotary_dim", geometry.head_dim, 2 * call.pairs));
    }
    if call.copies.len < 6 * call.copy_count {
        return Err(CudaError::invalid("copies", 6 * call.copy_count, call.copies.len));
    }
    Ok(CopyRerotateParams {
        cache: call.cache.address,
        copies: call.copies.address,
        inv_freq: call.inv_freq.address(),
        blocks: blocks_within(geometry, call.cache.len),
        block_stride: long("block_stride", geometry.block_stride)?,
        layer_stride: long("layer_stride", geometry.layer_stride)?,
        head_stride: long("head_stride", geometry.head_stride)?,
        token_stride: long("token_stride", geometry.token_stride)?,
        value_offset: long("value_offset", geometry.value_offset)?,
        copy_count: narrow("copies", call.copy_count)?,
        layers: narrow("layers", geometry.layers)?,
        kv_heads: narrow("kv_heads", geometry.kv_heads)?,
        page_tokens: narrow("page_tokens", geometry.page_tokens)?,
        head_dim: narrow("head_dim", geometry.head_dim)?,
        pairs: narrow("rotary_dim", call.pairs)?,
        heads_per_block: narrow("kv_heads", shape.heads_per_block)?,
        head_chunks: narrow("kv_heads", geometry.kv_heads.div_ceil(shape.heads_per_block))?,
    })
}

/// Block numbers whose every (layer, head, slot) lies in a tensor of `len` elements.
fn blocks_within(geometry: &PageGeometry, len: usize) -> i64 {
    let first_block = (geometry.layers.saturating_sub(1)) * geometry.layer_stride
        + (geometry.kv_heads.saturating_sub(1)) * geometry.head_stride
        + (geometry.page_tokens.saturating_sub(1)) * geometry.token_stride
        + geometry.value_offset
        + geometry.head_dim;
    let further = len.checked_sub(first_block).map(|rest| rest / geometry.block_stride.max(1));
    further.map_or(0, |further| i64::try_from(further + 1).unwrap_or(i64::MAX))
}

fn narrow(what: &'static str, value: usize) -> Result<u32, CudaError> {
    u32::try_from(value).map_err(|_| CudaError::invalid(what, "a 32-bit number", value))
}

fn long(what: &'static str, value: usize) -> Result<i64, CudaError> {
    i64::try_from(value).map_err(|_| CudaError::invalid(what, "a 63-bit number", value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_within_counts_the_last_block_that_fits() {
        let geometry = PageGeometry::arena(2, 3, 4, 8);
        let page = 2 * 4 * 8;
        assert_eq!(blocks_within(&geometry, 6 * page), 1);
        assert_eq!(blocks_within(&geometry, 6 * page - 1), 0);
        assert_eq!(blocks_within(&geometry, 18 * page), 13);
        assert_eq!(blocks_within(&geometry, 0), 0);
    }
}
