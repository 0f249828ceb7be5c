//! CUDA tensors as arguments: dtype, shape, strides, device, alignment and overlap.
//!
//! Their owners are held for the call; that memory lives until the stream has passed is torch's
//! own promise for tensors that are used on the current stream.

use kvweave_core::KvDtype;
use kvweave_core::ops::{HeadRows, Reach};
use kvweave_cuda::{DeviceRows, DeviceTensor};
use pyo3::prelude::*;

use crate::arguments::{Table, rows_of};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::{DType, PAGES, ROWS};
use crate::failure::Failure;
use crate::tensor::{Device, TensorRef};

/// A table as Python hands it over: on the device, and on the host too where it came from there.
pub type TablePair<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// Where a call runs, and on what elements: the cache says it.
#[derive(Clone, Copy)]
pub struct Place {
    pub device: Device,
    /// The device's number.
    pub ordinal: u32,
    pub dtype: KvDtype,
    /// Elements of rows beside it.
    pub row_dtype: KvDtype,
}

impl Place {
    /// The place of a tensor whose elements a KV cache may hold.
    pub fn of(what: &str, tensor: &TensorRef) -> Result<Self, Failure> {
        let ordinal = ordinal_of(what, tensor)?;
        let dtype = kv_dtype_of(what, tensor.dtype, PAGES)?;
        tensor.expect_aligned(what, tensor.dtype.bytes())?;
        Ok(Self { device: tensor.device, ordinal, dtype, row_dtype: dtype })
    }

    /// The place of a call that reads no elements of a cache.
    pub fn of_numbers(what: &str, tensor: &TensorRef) -> Result<Self, Failure> {
        let ordinal = ordinal_of(what, tensor)?;
        let dtype = KvDtype::F32;
        Ok(Self { device: tensor.device, ordinal, dtype, row_dtype: dtype })
    }

    /// The same with the rows' elements: over fp8 those that `tensor` has.
    pub fn with_rows(self, what: &str, tensor: &TensorRef) -> Result<Self, Failure> {
        let quantised = self.dtype.is_quantised();
        let row_dtype = if quantised { row_dtype(what, tensor)? } else { self.dtype };
        Ok(Self { row_dtype, ..self })
    }

    /// The place of a tensor of rows, for a call whose pages are bytes.
    pub fn of_rows(what: &str, tensor: &TensorRef) -> Result<Self, Failure> {
        let row_dtype = row_dtype(what, tensor)?;
        Ok(Self { dtype: row_dtype, row_dtype, ..Self::of(what, tensor)? })
    }

    /// Refuses a tensor of another dtype, on another device, or between two elements.
    pub fn expect(&self, what: &str, tensor: &TensorRef, dtype: DType) -> Result<(), Failure> {
        tensor.expect_dtype(what, dtype)?;
        tensor.expect_device(what, self.device)?;
        tensor.expect_aligned(what, dtype.bytes())
    }

    /// A tensor [R, heads, D], by strides; and the same without elements, for the core's checks.
    pub fn rows(
        &self,
        what: &str,
        tensor: &TensorRef,
    ) -> Result<(DeviceRows, HeadRows<'static, ()>), Failure> {
        self.expect(what, tensor, self.row_dtype.into())?;
        let rows = rows_of(what, tensor, nothing(tensor.extent(what)?))?;
        let (row_stride, head_stride) = (rows.row_stride, rows.head_stride);
        Ok((DeviceRows { tensor: extent_of(what, tensor)?, row_stride, head_stride }, rows))
    }

    /// A contiguous tensor to write results to, apart from everything that is read.
    pub fn output(
        &self,
        what: &str,
        tensor: &TensorRef,
        (dtype, shape): (DType, &[(&str, Option<usize>)]),
        read: &[(&str, &TensorRef)],
    ) -> Result<DeviceTensor, Failure> {
        self.expect(what, tensor, dtype)?;
        tensor.expect_shape(what, shape)?;
        tensor.expect_contiguous(what)?;
        tensor.expect_writable(what)?;
        read.iter().try_for_each(|(name, other)| tensor.expect_apart(what, other, name))?;
        extent_of(what, tensor)
    }
}

/// A table of i32 on the device, and on the host too where it came from there.
pub struct DeviceTable<'py> {
    pub on_device: Borrowed<'py>,
    on_host: Option<Table<'py>>,
}

impl<'py> DeviceTable<'py> {
    pub fn of(what: &str, (on_device, on_host): &TablePair<'py>) -> PyResult<Self> {
        let on_host = on_host.as_ref().map(|table| Table::of(what, table)).transpose()?;
        Ok(Self { on_device: borrow(what, on_device)?, on_host })
    }

    /// The table [N, `COLUMNS`] on the device, and N.
    pub fn rows<const COLUMNS: usize>(
        &self,
        what: &str,
        place: &Place,
    ) -> Result<(DeviceTensor, usize), Failure> {
        self.shaped(what, place, &[("N", None), ("columns", Some(COLUMNS))])
    }

    /// The table [N, columns] on the device, and N.
    pub fn wide(
        &self,
        what: &str,
        place: &Place,
        columns: usize,
    ) -> Result<(DeviceTensor, usize), Failure> {
        self.shaped(what, place, &[("N", None), ("columns", Some(columns))])
    }

    /// The slots of one table [R, 2], or of those of a reach [tables, R, 2], and how many they are.
    pub fn slots(
        &self,
        what: &str,
        place: &Place,
        reach: Option<Reach<'_>>,
    ) -> Result<(DeviceTensor, usize), Failure> {
        let Some(Reach { tables, .. }) = reach else { return self.rows::<2>(what, place) };
        let shape = [("tables", Some(tables)), ("R", None), ("columns", Some(2))];
        let (slots, _) = self.shaped(what, place, &shape)?;
        Ok((slots, tables.saturating_mul(self.on_device.tensor.shape()[1])))
    }

    /// The list [N] on the device, and N.
    pub fn list(&self, what: &str, place: &Place) -> Result<(DeviceTensor, usize), Failure> {
        self.shaped(what, place, &[("N", None)])
    }

    fn shaped(
        &self,
        what: &str,
        place: &Place,
        shape: &[(&str, Option<usize>)],
    ) -> Result<(DeviceTensor, usize), Failure> {
        let tensor = &self.on_device.tensor;
        place.expect(what, tensor, DType::I32)?;
        tensor.expect_shape(what, shape)?;
        tensor.expect_contiguous(what)?;
        Ok((extent_of(what, tensor)?, tensor.shape()[0]))
    }

    /// The same table on the host, where it can be checked without waiting.
    pub fn rows_on_host<const COLUMNS: usize>(
        &self,
        what: &str,
    ) -> Result<Option<&[[i32; COLUMNS]]>, Failure> {
        self.on_host.as_ref().map(|table| table.rows(what)).transpose()
    }

    /// The same rows on the host, one after the other.
    pub fn wide_on_host(&self, what: &str, columns: usize) -> Result<Option<&[i32]>, Failure> {
        self.on_host.as_ref().map(|table| table.wide(what, columns)).transpose()
    }

    /// The same slots on the host.
    pub fn slots_on_host(
        &self,
        what: &str,
        reach: Option<Reach<'_>>,
    ) -> Result<Option<&[[i32; 2]]>, Failure> {
        self.on_host.as_ref().map(|table| table.slots(what, reach)).transpose()
    }

    /// The same list on the host.
    pub fn list_on_host(&self, what: &str) -> Result<Option<&[i32]>, Failure> {
        self.on_host.as_ref().map(|table| table.list(what)).transpose()
    }
}

/// The number of the device that a tensor lies on.
pub fn ordinal_of(what: &str, tensor: &TensorRef) -> Result<u32, Failure> {
    let Device::Cuda(ordinal) = tensor.device else {
        return Err(Failure::invalid(what, "a CUDA tensor", tensor.device.name()));
    };
    u32::try_from(ordinal).map_err(|_| Failure::invalid(what, "a device of at least 0", ordinal))
}

/// The dtype of rows.
pub fn row_dtype(what: &str, tensor: &TensorRef) -> Result<KvDtype, Failure> {
    match kv_dtype_of(what, tensor.dtype, ROWS)? {
        KvDtype::Fp8E4m3 => Err(Failure::invalid(what, ROWS, tensor.dtype.name())),
        dtype => Ok(dtype),
    }
}

fn kv_dtype_of(what: &str, dtype: DType, expected: &str) -> Result<KvDtype, Failure> {
    match dtype {
        DType::F32 => Ok(KvDtype::F32),
        DType::Bf16 => Ok(KvDtype::Bf16),
        DType::F16 => Ok(KvDtype::F16),
        DType::Fp8E4m3 => Ok(KvDtype::Fp8E4m3),
        other => Err(Failure::invalid(what, expected, other.name())),
    }
}

/// The elements of a tensor from its first to one past its last.
pub fn extent_of(what: &str, tensor: &TensorRef) -> Result<DeviceTensor, Failure> {
    Ok(DeviceTensor { address: tensor.ptr as u64, len: tensor.extent(what)? })
}

/// A slice of some length without memory: what the core's checks take for memory elsewhere.
pub fn nothing(len: usize) -> &'static [()] {
    Vec::leak(vec![(); len])
}
