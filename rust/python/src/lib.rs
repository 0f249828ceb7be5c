//! `kvweave._native`: the crates as Python sees them. Convert, release the lock, call, convert.

mod arena;
mod arguments;
mod attention;
mod cache;
mod choices;
mod cuda;
mod decode_rows;
mod dlpack;
mod dtype;
mod failure;
mod ops;
mod plan;
mod reach;
mod request;
mod rope;
mod scalars;
mod scheduler;
mod shape;
mod stats;
mod step_tables;
mod tensor;
mod tokens;
mod virtual_pages;

use pyo3::prelude::*;

/// The native module of kvweave; `kvweave.cache` and `kvweave.ops` are its documented face.
#[pymodule]
mod _native {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use super::arena::Arena;
    #[pymodule_export]
    use super::attention::{attend_decode, attend_prefill, score_tokens};
    #[pymodule_export]
    use super::cache::{FrozenSegment, KvCache};
    #[pymodule_export]
    use super::cuda::{attend_cuda, copy_rerotate_cuda, cuda_status};
    #[pymodule_export]
    use super::cuda::{merge_states_cuda, score_tokens_cuda, step_tables_cuda, write_pages_cuda};
    #[pymodule_export]
    use super::decode_rows::{DecodeRows, DecodeStep};
    #[pymodule_export]
    use super::ops::{copy_rerotate, merge_states, write_pages};
    #[pymodule_export]
    use super::plan::{PlanSpan, ReusePlan};
    #[pymodule_export]
    use super::reach::Reach;
    #[pymodule_export]
    use super::request::KvRequest;
    #[pymodule_export]
    use super::rope::RopeTable;
    #[pymodule_export]
    use super::scheduler::{Scheduler, StepPlan};
    #[pymodule_export]
    use super::shape::{HeadClassMap, HeadGroup, KvShape};
    #[pymodule_export]
    use super::step_tables::step_tables;
    #[pymodule_export]
    use super::virtual_pages::VirtualPages;

    #[pymodule_init]
    fn version(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
