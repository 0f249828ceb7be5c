//! Memory that a caller keeps for what a call on CUDA puts down between its kernels.

use kvweave_cuda::DeviceTensor;
use pyo3::prelude::*;

use super::arguments::Place;
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::tensor::TensorRef;

/// Tensors of f32 and i32 on the cache's device, the second one all 0.
pub type Workspace<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);
/// What a call needs of workspace: numbers of f32 and i32.
pub type Needs = (usize, usize);

/// The parts of a workspace that are as large as a call needs, or None where it was given none
/// or one that is too small. A call that needs none looks at nothing.
///
/// # Errors
/// A workspace that lies elsewhere or is of other dtypes.
pub fn room(
    space: Option<&Space<'_>>,
    place: &Place,
    (floats, counters): Needs,
) -> Result<Option<(DeviceTensor, DeviceTensor)>, Failure> {
    let nothing = DeviceTensor { address: 0, len: 0 };
    if floats == 0 && counters == 0 {
        return Ok(Some((nothing, nothing)));
    }
    let parts = space.map(|space| space.parts(place)).transpose()?.unwrap_or((nothing, nothing));
    Ok((parts.0.len >= floats && parts.1.len >= counters).then_some(parts))
}

/// A workspace, borrowed.
pub struct Space<'py> {
    floats: Borrowed<'py>,
    counters: Borrowed<'py>,
}

impl<'py> Space<'py> {
    /// # Errors
    /// Tensors that cannot be borrowed.
    pub fn of((floats, counters): Workspace<'py>) -> PyResult<Self> {
        let (floats, counters) = (borrow("workspace", &floats)?, borrow("counters", &counters)?);
        Ok(Self { floats, counters })
    }

    fn parts(&self, place: &Place) -> Result<(DeviceTensor, DeviceTensor), Failure> {
        let part = |what, tensor: &TensorRef, dtype| {
            place.output(what, tensor, (dtype, &[("numbers", None)]), &[])
        };
        let floats = part("workspace", &self.floats.tensor, DType::F32)?;
        Ok((floats, part("counters", &self.counters.tensor, DType::I32)?))
    }
}
