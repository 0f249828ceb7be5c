//! The bases of top-r pages and planes on CUDA.

use kvweave_core::ops::{Bases, PackedFormat};
use kvweave_cuda::DeviceBases;
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of, nothing};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::packed::shape_of_bases;
use crate::tensor::TensorRef;

/// The bases on a device, and which of them each packed page has: there, and on the host too where
/// it came from there.
pub type GivenBases<'py> = Option<(Bound<'py, PyAny>, TablePair<'py>)>;

/// What is named where it is of the wrong shape.
const TABLE: &str = "basis of each packed page";

/// The bases of packed pages as they came from Python, borrowed.
pub struct BasesThere<'py> {
    data: Borrowed<'py>,
    of: DeviceTable<'py>,
}

impl<'py> BasesThere<'py> {
    pub fn of(given: &GivenBases<'py>) -> PyResult<Option<Self>> {
        let Some((data, of)) = given else { return Ok(None) };
        Ok(Some(Self { data: borrow("bases", data)?, of: DeviceTable::of(TABLE, of)? }))
    }

    /// Refuses a tensor that is written and shares memory with them.
    pub fn expect_apart(&self, what: &str, written: &TensorRef) -> Result<(), Failure> {
        written.expect_apart(what, &self.data.tensor, "bases")?;
        written.expect_apart(what, &self.of.on_device.tensor, TABLE)
    }

    fn placed(
        &self,
        place: &Place,
        format: &PackedFormat,
        packed_pages: usize,
    ) -> Result<(DeviceBases, Option<Bases<'_, ()>>), Failure> {
        let tensor = &self.data.tensor;
        place.expect("bases", tensor, DType::F32)?;
        tensor.expect_shape("bases", &shape_of_bases(format))?;
        tensor.expect_contiguous("bases")?;
        let (data, pages) = (extent_of("bases", tensor)?, tensor.shape()[1]);
        let (of, count) = self.of.list(TABLE, place)?;
        if count != packed_pages {
            return Err(Failure::invalid(TABLE, format!("{packed_pages} elements"), count));
        }
        let on_host = self.of.list_on_host(TABLE)?;
        let checked = on_host.map(|of| Bases { data: nothing(data.len), pages, of });
        Ok((DeviceBases { data, of, pages }, checked))
    }
}

/// The bases of pages that need them, as kernels take them; and as the core's checks do, where the
/// table is on the host.
pub fn placed<'a>(
    given: Option<&'a BasesThere<'_>>,
    place: &Place,
    format: &PackedFormat,
    packed_pages: usize,
) -> Result<(Option<DeviceBases>, Option<Bases<'a, ()>>), Failure> {
    format.expect_bases(given.is_some())?;
    let Some(given) = given else { return Ok((None, None)) };
    let (bases, checked) = given.placed(place, format, packed_pages)?;
    Ok((Some(bases), checked))
}
