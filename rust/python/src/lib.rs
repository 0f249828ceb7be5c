//! `kvweave._native`: the crates as Python sees them. Convert, release the lock, call, convert.

mod arena;
mod arguments;
mod background;
mod cache;
mod choices;
mod cost_order;
mod decode_rows;
mod dlpack;
mod drawn;
mod dtype;
mod failure;
mod freed;
mod frozen_segment;
mod ops;
mod packed;
mod plan;
mod reach;
mod request;
mod request_numbers;
mod rope;
mod rows;
mod scalars;
mod scheduler;
mod shape;
mod shard;
mod shard_head;
mod stand_back;
mod stats;
mod store;
mod store_order;
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
    use super::cache::KvCache;
    #[pymodule_export]
    use super::cost_order::CostOrder;
    #[pymodule_export]
    use super::decode_rows::{DecodeRows, DecodeStep};
    #[pymodule_export]
    use super::frozen_segment::FrozenSegment;
    #[pymodule_export]
    use super::ops::cpu::attend_decode::attend_decode;
    #[pymodule_export]
    use super::ops::cpu::attend_packed::attend_packed;
    #[pymodule_export]
    use super::ops::cpu::attend_prefill::attend_prefill;
    #[pymodule_export]
    use super::ops::cpu::copy_rerotate::copy_rerotate;
    #[pymodule_export]
    use super::ops::cpu::estimate_pages::estimate_pages;
    #[pymodule_export]
    use super::ops::cpu::gather_entries::gather_entries;
    #[pymodule_export]
    use super::ops::cpu::merge_states::merge_states;
    #[pymodule_export]
    use super::ops::cpu::moments::Moments;
    #[pymodule_export]
    use super::ops::cpu::move_fp8_pages::move_fp8_pages;
    #[pymodule_export]
    use super::ops::cpu::move_pages::move_pages;
    #[pymodule_export]
    use super::ops::cpu::pack_losses::pack_losses;
    #[pymodule_export]
    use super::ops::cpu::pack_pages::{pack_pages, unpack_pages};
    #[pymodule_export]
    use super::ops::cpu::recycle_pages::recycle_pages;
    #[pymodule_export]
    use super::ops::cpu::rotate_rows::rotate_rows;
    #[pymodule_export]
    use super::ops::cpu::score_pages::score_pages;
    #[pymodule_export]
    use super::ops::cpu::score_tokens::score_tokens;
    #[pymodule_export]
    use super::ops::cpu::select_pages::select_pages;
    #[pymodule_export]
    use super::ops::cpu::step_tables::step_tables;
    #[pymodule_export]
    use super::ops::cpu::write_pages::write_pages;
    #[pymodule_export]
    use super::ops::cuda::attend_decode::attend_decode_cuda;
    #[pymodule_export]
    use super::ops::cuda::attend_packed::attend_packed_cuda;
    #[pymodule_export]
    use super::ops::cuda::attend_prefill::attend_prefill_cuda;
    #[pymodule_export]
    use super::ops::cuda::copy_rerotate::copy_rerotate_cuda;
    #[pymodule_export]
    use super::ops::cuda::device::cuda_status;
    #[pymodule_export]
    use super::ops::cuda::estimate_pages::estimate_pages_cuda;
    #[pymodule_export]
    use super::ops::cuda::gather_entries::gather_entries_cuda;
    #[pymodule_export]
    use super::ops::cuda::merge_states::merge_states_cuda;
    #[pymodule_export]
    use super::ops::cuda::move_fp8_pages::move_fp8_pages_cuda;
    #[pymodule_export]
    use super::ops::cuda::move_pages::{copy_pages_cuda, move_pages_cuda};
    #[pymodule_export]
    use super::ops::cuda::pack_pages::{pack_pages_cuda, unpack_pages_cuda};
    #[pymodule_export]
    use super::ops::cuda::recycle_pages::recycle_pages_cuda;
    #[pymodule_export]
    use super::ops::cuda::recycle_seats::recycle_seats_cuda;
    #[pymodule_export]
    use super::ops::cuda::rotate_rows::rotate_rows_cuda;
    #[pymodule_export]
    use super::ops::cuda::score_pages::score_pages_cuda;
    #[pymodule_export]
    use super::ops::cuda::score_tokens::score_tokens_cuda;
    #[pymodule_export]
    use super::ops::cuda::select_pages::select_pages_cuda;
    #[pymodule_export]
    use super::ops::cuda::step_tables::step_tables_cuda;
    #[pymodule_export]
    use super::ops::cuda::write_pages::write_pages_cuda;
    #[pymodule_export]
    use super::packed::PackedFormat;
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
    use super::shard::{Provenance, Shard};
    #[pymodule_export]
    use super::shard_head::ShardHead;
    #[pymodule_export]
    use super::stand_back::stand_back;
    #[pymodule_export]
    use super::store::{Store, StoredShard};
    #[pymodule_export]
    use super::virtual_pages::VirtualPages;

    #[pymodule_init]
    fn version(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
