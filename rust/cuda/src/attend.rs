//! Launch of attention over pages: which kernel does a call, and how its work is cut.

use crate::attend_call::AttendLaunch;
use crate::attend_plan::{AttendPlan, Plan, warps};
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::operands::{long, narrow};
use crate::params::AttendParams;

impl CudaBackend {
    /// Which kernel does a call, whose own workspace is not looked at, and how its work is cut.
    #[must_use]
    pub fn plan_attend(&self, call: &AttendLaunch<'_>) -> AttendPlan {
        AttendPlan::of(call, &self.context.device)
    }

    /// Puts the attention on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, offsets split their tables, `plan` is that of the call, and `stream` is a
    /// stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Unsupported` for a head dim that
    /// no kernel takes, `Driver` when the launch fails.
    pub unsafe fn attend(
        &self,
        call: &AttendLaunch<'_>,
        plan: &AttendPlan,
    ) -> Result<(), CudaError> {
        if call.rows == 0 || call.query_heads == 0 {
            return Ok(());
        }
        let params = params_of(call)?;
        let needs = plan.workspace();
        call.floats.expect("floats of workspace", needs.floats)?;
        call.counters.expect("counters of workspace", needs.counters)?;
        // SAFETY: the params mirror the kernels' struct; addresses are the caller's promise.
        unsafe {
            match plan.plan() {
                Plan::Decode(how) => self.attend_decode(call, params, how),
                Plan::Prefill(how) => self.attend_prefill(call, params, how),
                Plan::Plain { kernel } => {
                    self.launch(("attend_plain", kernel), warps(call)?, call.stream, &params)
                }
            }
        }
    }
}

/// The kernels' params, without what the plan says.
pub(crate) fn params_of(call: &AttendLaunch<'_>) -> Result<AttendParams, CudaError> {
    let geometry = &call.kv.geometry;
    let (rows, heads) = (call.rows, call.query_heads);
    if geometry.kv_heads == 0 || !heads.is_multiple_of(geometry.kv_heads) {
        let expected = format!("a multiple of {} KV heads", geometry.kv_heads);
        return Err(CudaError::invalid("query heads", expected, heads));
    }
    let cap = call.softcap.unwrap_or(1.0);
    let scale = call.scale * call.kv.scales.key;
    if !(scale.is_finite() && cap.is_finite() && cap > 0.0) {
        let got = format!("{scale} and {cap}");
        return Err(CudaError::invalid(
            "scale and softcap",
            "finite numbers, softcap above 0",
            got,
        ));
    }
    call.q.expect("q", (rows, heads, geometry.head_dim))?;
    call.positions.expect("positions", rows)?;
    call.out.expect_size("out", &[rows, heads, geometry.head_dim])?;
    call.lse.expect_size("lse", &[rows, heads])?;
    match &call.row_offsets {
        Some(offsets) => offsets.expect("row_offsets", call.requests + 1)?,
        None if rows == call.requests => {}
        None => return Err(CudaError::invalid("rows", call.requests, rows)),
    }
    Ok(AttendParams {
        kv: call.kv.params(call.requests)?,
        q: call.q.tensor.address,
        positions: call.positions.address,
        row_offsets: call.row_offsets.map_or(0, |offsets| offsets.address),
        out: call.out.address,
        lse: call.lse.address,
        partial: call.floats.address,
        counters: call.counters.address,
        q_row_stride: long("q", call.q.row_stride)?,
        q_head_stride: long("q", call.q.head_stride)?,
        scale,
        softcap: call.softcap.unwrap_or(0.0),
        value_scale: call.kv.scales.value,
        rows: narrow("rows", rows)?,
        requests: narrow("requests", call.requests)?,
        query_heads: narrow("query heads", heads)?,
        splits: 1,
        run_factor: 0,
        head_factor: 0,
        chunk_factor: 0,
        block_factor: 0,
    })
}
