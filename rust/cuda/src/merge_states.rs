//! Launch of `merge_states.cu`.

use kvweave_core::KvDtype;

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, bytes_of, long, name_of, narrow};
use crate::params::MergeStatesParams;

const THREADS: usize = 256;

/// Partial attentions of the same rows combined: `kvweave_core::ops::MergeStates`.
#[derive(Clone, Copy, Debug)]
pub struct MergeStatesLaunch {
    /// [splits, states, head_dim], contiguous.
    pub outs: DeviceTensor,
    /// f32 [splits, states], natural logarithm.
    pub lses: DeviceTensor,
    /// Elements of `outs` and `out`.
    pub dtype: KvDtype,
    /// S, at least 1.
    pub splits: usize,
    /// Rows times query heads.
    pub states: usize,
    /// D, at least 1.
    pub head_dim: usize,
    /// [states, head_dim], contiguous.
    pub out: DeviceTensor,
    /// f32 [states].
    pub lse: DeviceTensor,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the merge on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, and `stream` is a stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn merge_states(&self, call: &MergeStatesLaunch) -> Result<(), CudaError> {
        if call.splits == 0 || call.head_dim == 0 {
            let got = format!("{} and {}", call.splits, call.head_dim);
            return Err(CudaError::invalid("splits and head_dim", "at least 1", got));
        }
        if call.states == 0 {
            return Ok(());
        }
        let vector = vector_of(call);
        let states_per_block = (THREADS * vector / call.head_dim).clamp(1, THREADS);
        let params = params_of(call, states_per_block)?;
        let grid = Grid {
            blocks: [blocks_of("states", call.states.div_ceil(states_per_block))?, 1, 1],
            threads: THREADS as u32,
            shared_bytes: 0,
        };
        let width = if vector > 1 { "wide" } else { "narrow" };
        let name = format!("merge_states_{}_{width}", name_of(call.dtype));
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("merge_states", &name), grid, call.stream, &params) }
    }
}

/// Elements moved at once: 16 bytes where every vector starts on such a boundary.
fn vector_of(call: &MergeStatesLaunch) -> usize {
    let vector = 16 / bytes_of(call.dtype);
    let aligned = [call.outs.address, call.out.address].iter().all(|at| at.is_multiple_of(16));
    if aligned && call.head_dim.is_multiple_of(vector) { vector } else { 1 }
}

fn params_of(
    call: &MergeStatesLaunch,
    states_per_block: usize,
) -> Result<MergeStatesParams, CudaError> {
    call.outs.expect_size("outs", &[call.splits, call.states, call.head_dim])?;
    call.lses.expect_size("lses", &[call.splits, call.states])?;
    call.out.expect_size("out", &[call.states, call.head_dim])?;
    call.lse.expect("lse", call.states)?;
    Ok(MergeStatesParams {
        outs: call.outs.address,
        lses: call.lses.address,
        out: call.out.address,
        lse: call.lse.address,
        states: long("states", call.states)?,
        splits: narrow("splits", call.splits)?,
        head_dim: narrow("head_dim", call.head_dim)?,
        states_per_block: narrow("states", states_per_block)?,
    })
}
