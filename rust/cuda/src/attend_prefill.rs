//! Launch of `attend_prefill_sm90.cu` or `attend_prefill.cu`, and of the merge of split keys.

use crate::attend_call::AttendLaunch;
use crate::attend_plan::{PrefillPlan, is_tall, warps};
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::operands::name_of;
use crate::params::AttendParams;
use crate::tiled_pages::tiled;

impl CudaBackend {
    /// # Safety
    /// As for [`CudaBackend::attend`].
    pub(crate) unsafe fn attend_prefill(
        &self,
        call: &AttendLaunch<'_>,
        mut params: AttendParams,
        &PrefillPlan { ref kernel, grid, hopper }: &PrefillPlan,
    ) -> Result<(), CudaError> {
        params.splits = grid.blocks[2];
        // SAFETY: the caller's promise.
        unsafe {
            if hopper {
                let params = tiled(call, params, is_tall(&call.kv.geometry))?;
                self.launch(("attend_prefill_sm90", kernel), grid, call.stream, &params)?;
            } else {
                self.launch(("attend_prefill", kernel), grid, call.stream, &params)?;
            }
            if params.splits == 1 {
                return Ok(());
            }
            let merge = format!("attend_merge_{}", name_of(call.dtype));
            self.launch(("attend_prefill", &merge), warps(call)?, call.stream, &params)
        }
    }
}
