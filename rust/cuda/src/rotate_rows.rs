//! Launch of `rotate_rows.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::Pairing;

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceRows, blocks_of, bytes_of, long, name_of, narrow};
use crate::params::{RotateRowsParams, RotatedVectorsParams};

const THREADS: usize = 256;
/// Heads that a thread rotates: `kHeads` of the kernel.
const THREAD_HEADS: usize = 2;

/// Queries and keys of rows rotated: `kvweave_core::ops::RotateRows` of both, whose checks are the
/// caller's.
#[derive(Clone, Copy, Debug)]
pub struct RotateRowsLaunch {
    /// [R, H, D].
    pub q: RotatedVectors,
    /// [R, G, D].
    pub k: Option<RotatedVectors>,
    /// Elements of all tensors.
    pub dtype: KvDtype,
    /// R.
    pub rows: usize,
    /// D.
    pub head_dim: usize,
    /// [R, 1, W].
    pub cos: DeviceRows,
    /// [R, 1, W].
    pub sin: DeviceRows,
    /// W, at most D.
    pub rotary_dim: usize,
    /// Which elements are pairs.
    pub pairing: Pairing,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// Vectors that are rotated.
#[derive(Clone, Copy, Debug)]
pub struct RotatedVectors {
    /// Where they are written.
    pub target: DeviceRows,
    /// Where they are read; none: where they are written.
    pub source: Option<DeviceRows>,
    /// Of a row.
    pub heads: usize,
}

impl CudaBackend {
    /// Puts the rotation on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, and no element that is written is
    /// written twice, or read but where it is written.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn rotate_rows(&self, call: &RotateRowsLaunch) -> Result<(), CudaError> {
        check(call)?;
        let vector = vector_of(call);
        let params = params_of(call, vector)?;
        let slots = params.q.slots as usize + params.k.slots as usize;
        let units = call.rows.saturating_mul(slots).saturating_mul(params.columns as usize);
        if units == 0 {
            return Ok(());
        }
        narrow("rows", units)?;
        let grid = Grid {
            blocks: [blocks_of("rows", units.div_ceil(THREADS))?, 1, 1],
            threads: THREADS as u32,
            shared_bytes: 0,
        };
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe {
            self.launch(("rotate_rows", &kernel_of(call, vector)), grid, call.stream, &params)
        }
    }
}

impl RotateRowsLaunch {
    fn each(&self) -> impl Iterator<Item = RotatedVectors> {
        [Some(self.q), self.k].into_iter().flatten()
    }

    /// Whether nothing but pairs is touched.
    fn in_place(&self) -> bool {
        self.each().all(|vectors| vectors.source.is_none())
    }
}

fn check(call: &RotateRowsLaunch) -> Result<(), CudaError> {
    let RotateRowsLaunch { rows, head_dim, rotary_dim, .. } = *call;
    if !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
        let expected = format!("an even number of at most {head_dim}");
        return Err(CudaError::invalid("rotary_dim", expected, rotary_dim));
    }
    for vectors in call.each() {
        let shape = (rows, vectors.heads, head_dim);
        vectors.target.expect("q and k", shape)?;
        vectors.source.map_or(Ok(()), |source| source.expect("q and k", shape))?;
    }
    call.cos.expect("cos", (rows, 1, rotary_dim))?;
    call.sin.expect("sin", (rows, 1, rotary_dim))
}

/// Elements moved at once: 16 bytes where every pack starts on such a boundary.
fn vector_of(call: &RotateRowsLaunch) -> usize {
    let vector = 16 / bytes_of(call.dtype);
    let vectors = call.each().flat_map(|of| [Some(of.target), of.source]).flatten();
    let aligned = |rows: DeviceRows| {
        let strides = [rows.row_stride, rows.head_stride];
        rows.tensor.address.is_multiple_of(16) && strides.iter().all(|s| s.is_multiple_of(vector))
    };
    let passed = if call.in_place() { 0 } else { call.head_dim - call.rotary_dim };
    let packed = (call.rotary_dim / 2).is_multiple_of(vector) && passed.is_multiple_of(vector);
    let wide = packed && vectors.chain([call.cos, call.sin]).all(aligned);
    if wide { vector } else { 1 }
}

fn kernel_of(call: &RotateRowsLaunch, vector: usize) -> String {
    let pairing = match call.pairing {
        Pairing::Half => "half",
        Pairing::Interleaved => "interleaved",
    };
    let width = if vector > 1 { "wide" } else { "narrow" };
    format!("rotate_rows_{}_{pairing}_{width}", name_of(call.dtype))
}

fn params_of(call: &RotateRowsLaunch, vector: usize) -> Result<RotateRowsParams, CudaError> {
    let passed = if call.in_place() { 0 } else { call.head_dim - call.rotary_dim };
    let pairs = call.rotary_dim / 2;
    Ok(RotateRowsParams {
        q: vectors_of(&call.q)?,
        k: call.k.as_ref().map_or(Ok(RotatedVectorsParams::default()), vectors_of)?,
        cos: call.cos.tensor.address,
        sin: call.sin.tensor.address,
        cos_row_stride: long("cos", call.cos.row_stride)?,
        sin_row_stride: long("sin", call.sin.row_stride)?,
        rows: narrow("rows", call.rows)?,
        pairs: narrow("rotary_dim", pairs)?,
        columns: narrow("head_dim", (pairs + passed) / vector)?,
    })
}

fn vectors_of(vectors: &RotatedVectors) -> Result<RotatedVectorsParams, CudaError> {
    let RotatedVectors { target, source, heads } = *vectors;
    let source = source.unwrap_or(target);
    Ok(RotatedVectorsParams {
        target: target.tensor.address,
        source: source.tensor.address,
        row_stride: long("row stride", target.row_stride)?,
        head_stride: long("head stride", target.head_stride)?,
        source_row_stride: long("row stride", source.row_stride)?,
        source_head_stride: long("head stride", source.head_stride)?,
        heads: narrow("heads", heads)?,
        slots: narrow("heads", heads.div_ceil(THREAD_HEADS))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operands::DeviceTensor;

    fn rows(address: u64, row_stride: usize, head_stride: usize) -> DeviceRows {
        DeviceRows { tensor: DeviceTensor { address, len: 1 << 30 }, row_stride, head_stride }
    }

    /// Five rows of three query heads and one KV head, 128 elements each, half of them rotated.
    fn call(dtype: KvDtype) -> RotateRowsLaunch {
        let vectors = |heads: usize| RotatedVectors {
            target: rows(1 << 20, heads * 128, 128),
            source: None,
            heads,
        };
        RotateRowsLaunch {
            q: vectors(3),
            k: Some(vectors(1)),
            dtype,
            rows: 5,
            head_dim: 128,
            cos: rows(1 << 10, 64, 64),
            sin: rows(1 << 11, 64, 64),
            rotary_dim: 64,
            pairing: Pairing::Half,
            stream: 0,
        }
    }

    #[test]
    fn accesses_are_wide_where_all_packs_are_aligned() {
        let (bf16, f32) = (call(KvDtype::Bf16), call(KvDtype::F32));
        assert_eq!([vector_of(&bf16), vector_of(&f32)], [8, 4]);
        assert_eq!(kernel_of(&bf16, 8), "rotate_rows_bf16_half_wide");
        let q = |target| RotateRowsLaunch { q: RotatedVectors { target, ..bf16.q }, ..bf16 };
        let narrow = [
            q(rows(1 << 20, 3 * 128 + 4, 128)),
            q(rows((1 << 20) + 8, 3 * 128, 128)),
            RotateRowsLaunch { cos: rows(1 << 10, 60, 64), ..bf16 },
            RotateRowsLaunch { sin: rows(2, 64, 64), ..bf16 },
            RotateRowsLaunch { rotary_dim: 40, ..bf16 },
        ];
        assert_eq!(narrow.map(|call| vector_of(&call)), [1; 5]);
        let pairing = Pairing::Interleaved;
        let name = kernel_of(&RotateRowsLaunch { pairing, ..f32 }, 1);
        assert_eq!(name, "rotate_rows_f32_interleaved_narrow");
    }

    #[test]
    fn only_elements_that_are_moved_have_threads() {
        let place = call(KvDtype::Bf16);
        let apart = RotatedVectors { source: Some(rows(1 << 25, 512, 128)), ..place.q };
        let columns = |call: &RotateRowsLaunch, vector| params_of(call, vector).unwrap().columns;
        assert_eq!([8, 1].map(|vector| columns(&place, vector)), [4, 32]);
        let apart = RotateRowsLaunch { q: apart, ..place };
        assert_eq!([8, 1].map(|vector| columns(&apart, vector)), [12, 96]);
        assert_eq!(columns(&RotateRowsLaunch { rotary_dim: 0, ..place }, 8), 0);
        let params = params_of(&place, 8).unwrap();
        assert_eq!((params.q.slots, params.k.slots), (2, 1));
        assert_eq!(params_of(&RotateRowsLaunch { k: None, ..place }, 8).unwrap().k.slots, 0);
    }

    #[test]
    fn widths_that_do_not_fit_are_refused() {
        let place = call(KvDtype::F16);
        for rotary_dim in [63, 130] {
            assert!(check(&RotateRowsLaunch { rotary_dim, ..place }).is_err());
        }
        assert!(check(&place).is_ok());
        assert!(check(&RotateRowsLaunch { rows: 1 << 30, ..place }).is_err());
    }
}
