//! Launches of `write_pages.cu`: the scatter, and the bounds of pages after it.

use kvweave_core::KvDtype;
use kvweave_core::ops::{KvScales, PageGeometry, PageScore};

use crate::backend::CudaBackend;
use crate::bounds::BoundNumbers;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{
    DeviceRows, DeviceTensor, blocks_of, blocks_within, bytes_of, last_page, long, name_of,
    names_of, narrow,
};
use crate::paged::DeviceReach;
use crate::params::{PageBoundsParams, WritePagesParams};

const THREADS: usize = 256;
/// Words of keys, and of values, that a thread moves: `kWords` of the kernel.
const THREAD_WORDS: usize = 2;

/// New keys and values of one layer scattered into pages: `kvweave_core::ops::WritePages`, whose
/// checks are the caller's where the tables are on the host. The kernels skip what points outside
/// the cache or at the null block.
#[derive(Clone, Copy, Debug)]
pub struct WritePagesLaunch<'a> {
    /// The whole paged tensor.
    pub cache: DeviceTensor,
    /// Its elements.
    pub dtype: KvDtype,
    /// Its strides.
    pub geometry: PageGeometry,
    /// The layer written.
    pub layer: usize,
    /// What they are multiplied by.
    pub scales: KvScales,
    /// [R, G, D].
    pub keys: DeviceRows,
    /// [R, G, D].
    pub values: DeviceRows,
    /// Elements of rows: the cache's, or any others over fp8.
    pub row_dtype: KvDtype,
    /// i32 [R, 2] or, with a reach, [tables, R, 2], contiguous.
    pub slots: DeviceTensor,
    /// R.
    pub rows: usize,
    /// Table and page of each head, where they differ.
    pub reach: Option<DeviceReach<'a>>,
    /// Pages whose bounds are computed anew.
    pub bounds: Option<BoundsLaunch>,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// `kvweave_core::ops::PageBounds` on the device.
#[derive(Clone, Copy, Debug)]
pub struct BoundsLaunch {
    /// [pages, vectors, D], contiguous.
    pub values: DeviceTensor,
    /// What they are: `Keys` have the cache's elements.
    pub numbers: BoundNumbers,
    /// i32 [N, 3], contiguous.
    pub held: DeviceTensor,
    /// i32 [N]: the row that stands for each block's number; None: the number itself.
    pub rows: Option<DeviceTensor>,
    /// N.
    pub held_count: usize,
}

impl BoundsLaunch {
    /// How many pages have a row of bounds.
    #[must_use]
    pub fn pages(&self, head_dim: usize) -> usize {
        self.values.len / (self.numbers.vectors() * head_dim).max(1)
    }
}

impl CudaBackend {
    /// Puts the scatter on the stream, and after it the bounds. Nothing is waited for, nothing
    /// allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernels, `stream` is a stream of this device, and no slot is written twice.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when a launch fails.
    pub unsafe fn write_pages(&self, call: &WritePagesLaunch<'_>) -> Result<(), CudaError> {
        if call.layer >= call.geometry.layers {
            let expected = format!("a layer below {}", call.geometry.layers);
            return Err(CudaError::invalid("layer", expected, call.layer));
        }
        if call.rows > 0 {
            let (kernel, vector) = kernel_of(call);
            let params = params_of(call, vector)?;
            let words = call.rows * call.geometry.kv_heads * params.columns as usize;
            narrow("rows", words)?;
            let grid = Grid {
                blocks: [blocks_of("rows", words.div_ceil(THREADS * THREAD_WORDS))?, 1, 1],
                threads: THREADS as u32,
                shared_bytes: 0,
            };
            // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
            unsafe { self.launch(("write_pages", &kernel), grid, call.stream, &params)? };
        }
        let Some(bounds) = call.bounds.filter(|bounds| bounds.held_count > 0) else {
            return Ok(());
        };
        let params = bounds_params_of(call, &bounds)?;
        let pages = bounds.held_count * call.geometry.kv_heads;
        let threads = call.geometry.head_dim.next_multiple_of(32).min(THREADS);
        let blocks = [blocks_of("held", pages)?, 1, 1];
        let grid = Grid { blocks, threads: narrow("head_dim", threads)?, shared_bytes: 0 };
        let dim = call.geometry.head_dim;
        let kernel = bounds_kernel_of(call.dtype, bounds.numbers, dim)?;
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("write_pages", &kernel), grid, call.stream, &params) }
    }
}

/// The scatter's kernel, and the elements that it moves at once: 16 bytes of a row where every
/// vector starts on a boundary of as many elements, else one.
fn kernel_of(call: &WritePagesLaunch<'_>) -> (String, usize) {
    let geometry = &call.geometry;
    let strides = [
        geometry.block_stride,
        geometry.layer_stride,
        geometry.head_stride,
        geometry.token_stride,
        geometry.value_offset,
        geometry.head_dim,
        call.keys.row_stride,
        call.keys.head_stride,
        call.values.row_stride,
        call.values.head_stride,
    ];
    let bytes = bytes_of(call.row_dtype);
    let vector = 16 / bytes;
    let of_cache = (vector * bytes_of(call.dtype)) as u64;
    let wide = strides.iter().all(|stride| stride.is_multiple_of(vector))
        && call.cache.address.is_multiple_of(of_cache)
        && [call.keys, call.values].iter().all(|rows| rows.tensor.address.is_multiple_of(16));
    let vector = if wide { vector } else { 1 };
    let words = if call.dtype == call.row_dtype {
        (vector * bytes).to_string()
    } else {
        format!("{}_{vector}", names_of(call.row_dtype, call.dtype))
    };
    (format!("write_pages_{words}"), vector)
}

/// The kernel of bounds: of a cache's elements, and what bounds are.
fn bounds_kernel_of(
    dtype: KvDtype,
    numbers: BoundNumbers,
    head_dim: usize,
) -> Result<String, CudaError> {
    let kind = match numbers {
        BoundNumbers::Keys if bytes_of(dtype) != 2 => {
            let expected = "f32, beside a cache whose elements are not of 16 bits";
            return Err(CudaError::unsupported(
                "bounds",
                expected,
                "least and greatest keys alone",
            ));
        }
        BoundNumbers::Fp8 { .. } if head_dim > THREADS => {
            let expected = format!("at most {THREADS}, beside bounds in fp8");
            return Err(CudaError::unsupported("head_dim", expected, head_dim));
        }
        BoundNumbers::F32 => "",
        BoundNumbers::Keys => "_keys",
        BoundNumbers::Fp8 { score: PageScore::MinMax, .. } => "_to_fp8",
        BoundNumbers::Fp8 { score: PageScore::Mean, .. } => "_to_fp8_mean",
    };
    Ok(format!("page_bounds_{}{kind}", name_of(dtype)))
}

/// Elements from a block's start to the last page of the layer.
fn last_of_layer(call: &WritePagesLaunch<'_>) -> usize {
    let PageGeometry { kv_heads, layer_stride, head_stride, .. } = call.geometry;
    call.layer * layer_stride + kv_heads.saturating_sub(1) * head_stride
}

/// The params in words of `vector` elements.
fn params_of(call: &WritePagesLaunch<'_>, vector: usize) -> Result<WritePagesParams, CudaError> {
    let geometry = &call.geometry;
    let shape = (call.rows, geometry.kv_heads, geometry.head_dim);
    call.keys.expect("k", shape)?;
    call.values.expect("v", shape)?;
    let tables = call.reach.map_or(1, |reach| reach.tables);
    call.slots.expect("slots", (2 * call.rows).saturating_mul(tables))?;
    let words = |what: &'static str, elements: usize| long(what, elements / vector);
    Ok(WritePagesParams {
        cache: call.cache.address,
        k: call.keys.tensor.address,
        v: call.values.tensor.address,
        slots: call.slots.address,
        heads: call.reach.map_or(0, |reach| reach.heads.address()),
        last_page: last_page(geometry, call.cache.len).div_euclid(long("word", vector)?),
        block_stride: words("block_stride", geometry.block_stride)?,
        layer_offset: words("layer_stride", call.layer * geometry.layer_stride)?,
        head_stride: words("head_stride", geometry.head_stride)?,
        token_stride: words("token_stride", geometry.token_stride)?,
        value_offset: words("value_offset", geometry.value_offset)?,
        k_row_stride: words("k", call.keys.row_stride)?,
        k_head_stride: words("k", call.keys.head_stride)?,
        v_row_stride: words("v", call.values.row_stride)?,
        v_head_stride: words("v", call.values.head_stride)?,
        rows: narrow("rows", call.rows)?,
        kv_heads: narrow("kv_heads", geometry.kv_heads)?,
        page_tokens: narrow("page_tokens", geometry.page_tokens)?,
        columns: narrow("head_dim", geometry.head_dim / vector)?,
        key_scale: call.scales.key,
        value_scale: call.scales.value,
    })
}

fn bounds_params_of(
    call: &WritePagesLaunch<'_>,
    bounds: &BoundsLaunch,
) -> Result<PageBoundsParams, CudaError> {
    let geometry = &call.geometry;
    bounds.held.expect("held", 3 * bounds.held_count)?;
    bounds.rows.map_or(Ok(()), |rows| rows.expect("rows", bounds.held_count))?;
    let first_page = call.layer * geometry.kv_heads;
    let rows = bounds.pages(geometry.head_dim);
    let described = rows.saturating_sub(first_page + geometry.kv_heads - 1);
    let within = blocks_within(geometry, last_of_layer(call), call.cache.len);
    Ok(PageBoundsParams {
        cache: call.cache.address,
        held: bounds.held.address,
        rows: bounds.rows.map_or(0, |rows| rows.address),
        bounds: bounds.values.address,
        scales: bounds.numbers.scales(rows)?,
        blocks: within,
        described: long("bounds", described)?,
        block_stride: long("block_stride", geometry.block_stride)?,
        layer_offset: long("layer_stride", call.layer * geometry.layer_stride)?,
        head_stride: long("head_stride", geometry.head_stride)?,
        token_stride: long("token_stride", geometry.token_stride)?,
        kv_heads: narrow("kv_heads", geometry.kv_heads)?,
        page_tokens: narrow("page_tokens", geometry.page_tokens)?,
        head_dim: narrow("head_dim", geometry.head_dim)?,
        first_page: narrow("layer", first_page)?,
        key_scale: call.scales.key,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(dtype: KvDtype, address: u64, row_stride: usize) -> WritePagesLaunch<'static> {
        let tensor = DeviceTensor { address, len: 1 << 20 };
        let rows = DeviceRows { tensor, row_stride, head_stride: 64 };
        WritePagesLaunch {
            cache: DeviceTensor { address: 256, len: 40 * 2 * 16 * 64 },
            dtype,
            scales: KvScales::ONE,
            geometry: PageGeometry::arena(2, 2, 16, 64),
            layer: 1,
            keys: rows,
            values: rows,
            row_dtype: dtype,
            slots: tensor,
            rows: 4,
            reach: None,
            bounds: None,
            stream: 0,
        }
    }

    #[test]
    fn words_are_wide_where_all_vectors_are_aligned() {
        let kernel = |dtype, address, row_stride| kernel_of(&call(dtype, address, row_stride));
        assert_eq!(kernel(KvDtype::Bf16, 512, 128), ("write_pages_16".into(), 8));
        assert_eq!(kernel(KvDtype::Bf16, 514, 128), ("write_pages_2".into(), 1));
        assert_eq!(kernel(KvDtype::F32, 512, 130), ("write_pages_4".into(), 1));
        assert_eq!(kernel(KvDtype::F32, 512, 132), ("write_pages_16".into(), 4));
        let fp8 = |address| {
            let call = call(KvDtype::Bf16, address, 128);
            kernel_of(&WritePagesLaunch { dtype: KvDtype::Fp8E4m3, ..call })
        };
        assert_eq!(fp8(512), ("write_pages_bf16_fp8_8".into(), 8));
        assert_eq!(fp8(514), ("write_pages_bf16_fp8_1".into(), 1));
    }

    #[test]
    fn pages_end_with_cache_and_bounds() {
        let (call, page) = (call(KvDtype::F32, 512, 128), 2 * 16 * 64);
        let last = |len: usize| {
            let call = WritePagesLaunch { cache: DeviceTensor { len, ..call.cache }, ..call };
            params_of(&call, 4).map(|params| params.last_page)
        };
        assert_eq!([40, 1].map(|pages| last(pages * page)), [Ok(39 * page as i64 / 4), Ok(0)]);
        assert_eq!([last(page - 1), last(page + 3)], [Ok(-1), Ok(0)]);
        let bounds = |pages: usize| {
            let values = DeviceTensor { address: 0, len: pages * 3 * 64 };
            let held = DeviceTensor { address: 0, len: 3 };
            let of = |numbers| BoundsLaunch { values, numbers, held, rows: None, held_count: 1 };
            let of = |numbers| bounds_params_of(&call, &of(numbers));
            let blocks = |numbers| of(numbers).map(|params| params.blocks.min(params.described));
            (blocks(BoundNumbers::F32), blocks(BoundNumbers::Keys))
        };
        assert_eq!([40, 50, 10, 3, 0].map(|pages| bounds(pages).0), [37, 37, 7, 0, 0].map(Ok));
        assert_eq!([40, 10, 8, 2].map(|pages| bounds(pages).1), [37, 12, 9, 0].map(Ok));
    }

    #[test]
    fn bounds_are_keys_alone_in_16_bits_only() {
        let kernel = |dtype, numbers| bounds_kernel_of(dtype, numbers, 128).ok();
        let keys = |dtype| kernel(dtype, BoundNumbers::Keys);
        assert_eq!(keys(KvDtype::Bf16).as_deref(), Some("page_bounds_bf16_keys"));
        let exact = kernel(KvDtype::Fp8E4m3, BoundNumbers::F32);
        assert_eq!(exact.as_deref(), Some("page_bounds_fp8"));
        assert_eq!([KvDtype::F32, KvDtype::Fp8E4m3].map(keys), [None, None]);
    }

    #[test]
    fn bounds_in_fp8_are_a_thread_blocks() {
        let scales = DeviceTensor { address: 0, len: 0 };
        let kernel = |score, dim| {
            bounds_kernel_of(KvDtype::F32, BoundNumbers::Fp8 { score, scales }, dim).ok()
        };
        assert_eq!(kernel(PageScore::MinMax, 256).as_deref(), Some("page_bounds_f32_to_fp8"));
        assert_eq!(kernel(PageScore::Mean, 8).as_deref(), Some("page_bounds_f32_to_fp8_mean"));
        assert_eq!(kernel(PageScore::MinMax, 264), None);
    }
}
