//! The ops: the contract between decisions and arithmetic.
//!
//! Each op is one params struct here, one definition in `kvweave-reference` (plain loops, f64) and
//! one fast version per backend, all of the same name. Params are borrowed slices plus explicit
//! element strides, so the same code reads our arena and an engine's tensors.
//!
//! `validate()` of a params struct proves every index in range before any arithmetic: a backend
//! calls it first and may rely on it afterwards, also in unsafe code.
//!
//! Words: R rows (query tokens), H query heads, G KV heads, D head dim, P tokens a page, B batch,
//! L layers. Positions are absolute, ranges half-open, strides in elements.

mod attend_decode;
mod attend_packed;
mod attend_prefill;
mod bases;
mod code_place;
mod copy_rerotate;
mod element;
mod entries;
mod error;
mod estimate_pages;
mod fixed_point;
mod fp8;
mod fp8_bounds;
mod gather_entries;
mod geometry;
mod merge_states;
mod move_fp8_pages;
mod move_pages;
mod pack_losses;
mod pack_pages;
mod packed_format;
mod page_bounds;
mod page_scale;
mod page_score;
mod page_spans;
mod planes;
mod queries;
mod reach;
mod recycle_pages;
mod rope;
mod rotate_rows;
mod scales;
mod score_pages;
mod score_tokens;
mod scoring;
mod select_pages;
mod step;
mod step_tables;
mod top_r;
mod write_pages;
mod write_slots;

pub use attend_decode::AttendDecode;
pub use attend_packed::{AttendPacked, PackedKv};
pub use attend_prefill::AttendPrefill;
pub use bases::{Bases, Basis, PlanesBasis};
pub use code_place::CodePlace;
pub use copy_rerotate::{
    BlockPage, CopyRerotate, CopyRun, CopySource, validate_copies, validate_layers,
};
pub use element::Element;
pub use entries::{Entry, KvView, check_offsets};
pub use error::{OpError, OpErrorKind};
pub use estimate_pages::{EstimatePages, ReadEntries, validate_estimated};
pub use fixed_point::{ROW_BITS, VECTOR_BITS, basis_number, fixed_point};
pub use fp8::Fp8E4m3;
pub use fp8_bounds::{Fp8Bounds, fp8_vectors, round_bounds};
pub use gather_entries::{GatherEntries, NO_ENTRY, validate_gathered};
pub use geometry::PageGeometry;
pub use merge_states::MergeStates;
pub use move_fp8_pages::{Fp8Arenas, MoveFp8Pages};
pub use move_pages::{MovePages, Moves, RowPages, Way};
pub use pack_losses::PackLosses;
pub use pack_pages::{Pack, PackPages, Packs, UnpackPages};
pub use packed_format::{PackedFormat, PackedKind};
pub use page_bounds::{BoundValues, PageBounds, validate_bounds};
pub use page_scale::PageScale;
pub use page_score::PageScore;
pub use page_spans::{PageSpan, page_spans};
pub use planes::{
    CHANNELS_TOGETHER, PLANE_BITS, PlaneWidths, PlanesPage, PlanesSide, largest_code, plane_code,
    plane_steps,
};
pub use queries::{HeadRows, HeadRowsMut, Queries};
pub use reach::{HeadReach, Reach, Visible};
pub use recycle_pages::{NO_PAGE, RecyclePages};
pub use rope::{Pairing, RopeTable};
pub use rotate_rows::{RotateRows, validate_turns};
pub use scales::{Cached, KvScales};
pub use score_pages::{Bounds, ScorePages, SharedScore, validate_scored};
pub use score_tokens::{EdgeMass, ScoreTokens};
pub use scoring::Scoring;
pub use select_pages::SelectPages;
pub use step::{ScaleDtype, Step, WideStep};
pub use step_tables::{Listed, MOST_TABLES, StepShape, StepTables, TableSpan};
pub use top_r::{KeptNumbers, Side, TopR, TopRPage, VectorPlace};
pub use write_pages::{WritePages, refuse_bounds, validate_rows};
pub use write_slots::WriteSlots;
