//! DLPack both ways: tensors of torch, numpy and others come in, the arena goes out.
//!
//! Coming in, the cheapest protocol that the owner speaks is used:
//! 1. numpy arrays are read through numpy's own structure (read-only ones too);
//! 2. a type with `__dlpack_c_exchange_api__` (torch) fills a `DLTensor` with one C call, which
//!    costs tens of nanoseconds where `__dlpack__` costs microseconds;
//! 3. otherwise `__dlpack__` is asked for a versioned capsule, then for a legacy one.
//!
//! Every `unsafe` block rests on one of three contracts: the C API's for capsules, DLPack's for
//! the structures inside them, numpy's for arrays. Who owns what is written at each.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::slice;

use dlpack_rs::ffi::{
    DLDataType, DLDevice, DLDeviceType, DLManagedTensor, DLManagedTensorVersioned,
    DLPACK_FLAG_BITMASK_READ_ONLY, DLPACK_MAJOR_VERSION, DLPackExchangeAPI, DLTensor,
};
use dlpack_rs::safe::{TensorInfo, pack, pack_versioned};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::dtype::DType;
use crate::failure::Failure;
use crate::tensor::{Device, TensorRef};

const LEGACY: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED_LEGACY: &CStr = c"used_dltensor";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// A tensor of a Python object, and what keeps its memory alive while this is held.
pub struct Borrowed<'py> {
    pub tensor: TensorRef,
    _owner: Owner<'py>,
}

enum Owner<'py> {
    Object(#[expect(dead_code, reason = "held, never read")] Bound<'py, PyAny>),
    Managed(#[expect(dead_code, reason = "held, never read")] Managed<'py>),
}

/// Reads the tensor of `object`; nothing is copied.
///
/// # Errors
/// `InvalidArgument` when it is no tensor, or one with a dtype, device or rank that nothing here
/// accepts; whatever the owner's own `__dlpack__` raises.
pub fn borrow<'py>(what: &str, object: &Bound<'py, PyAny>) -> PyResult<Borrowed<'py>> {
    let py = object.py();
    let refuse = |got: String| Failure::invalid(what, "a tensor", got).raise(py);
    if let Ok(array) = object.cast::<PyUntypedArray>() {
        let tensor = from_numpy(array).map_err(refuse)?;
        return Ok(Borrowed { tensor, _owner: Owner::Object(object.clone()) });
    }
    let shared = through_exchange_api(object).map_err(|error| unshared(what, py, &error))?;
    if let Some(view) = shared {
        // SAFETY: the producer filled shape and strides, valid until control returns to it; they
        // are copied here and now. The object itself is held below and keeps the memory.
        let tensor = unsafe { from_dl_tensor(&view, false) }.map_err(refuse)?;
        return Ok(Borrowed { tensor, _owner: Owner::Object(object.clone()) });
    }
    let managed = Managed::of(what, object, &refuse)?;
    let tensor = managed.tensor().map_err(refuse)?;
    Ok(Borrowed { tensor, _owner: Owner::Managed(managed) })
}

/// The producer's own refusal (a device or layout that DLPack does not know), under our class.
fn unshared(what: &str, py: Python<'_>, error: &PyErr) -> PyErr {
    let text = error.value(py).to_string();
    let first = text.lines().next().unwrap_or("no reason");
    Failure::invalid(what, "a tensor whose memory can be shared", format!("{first:?}")).raise(py)
}

fn from_numpy(array: &Bound<'_, PyUntypedArray>) -> Result<TensorRef, String> {
    let descr = array.dtype();
    if descr.is_native_byteorder() == Some(false) {
        return Err("a numpy array of foreign byte order".into());
    }
    let bytes = descr.itemsize();
    let dtype = DType::from_numpy(descr.kind(), bytes)?;
    let bytes = bytes.cast_signed();
    let strides: Vec<isize> = array.strides().iter().map(|stride| stride / bytes).collect();
    if array.strides().iter().any(|stride| stride % bytes != 0) {
        return Err(format!("a numpy array with byte strides {:?}", array.strides()));
    }
    let raw = array.as_array_ptr();
    // SAFETY: `raw` is the array's own structure, alive while `array` is borrowed; both fields are
    // plain data that only the interpreter lock guards, and it is held.
    let (ptr, flags) = unsafe { ((*raw).fields.data, (*raw).fields.flags) };
    let read_only = flags & numpy::npyffi::NPY_ARRAY_WRITEABLE == 0;
    let place = (ptr.cast(), dtype, Device::Cpu, read_only);
    TensorRef::new(place, array.shape(), Some(&strides))
}

/// The C function table of the object's type, where it has one.
fn through_exchange_api(object: &Bound<'_, PyAny>) -> PyResult<Option<DLTensor>> {
    let kind = object.get_type();
    let Some(capsule) = kind.getattr_opt(intern!(object.py(), "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    let Ok(table) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else { return Ok(None) };
    // SAFETY: a capsule of this name holds a DLPackExchangeAPI that lives as long as the process;
    // its header comes first in every version.
    let api = unsafe { table.cast::<DLPackExchangeAPI>().as_ref() };
    if api.header.version.major != DLPACK_MAJOR_VERSION {
        return Ok(None);
    }
    let Some(fill) = api.dltensor_from_py_object_no_sync else { return Ok(None) };
    let mut view = empty_dl_tensor();
    // SAFETY: the table was found on the object's own type, which is what this function demands;
    // `view` is a DLTensor to be filled, and the interpreter lock is held.
    let status = unsafe { fill(object.as_ptr().cast(), &raw mut view) };
    if status == 0 { Ok(Some(view)) } else { Err(PyErr::fetch(object.py())) }
}

fn empty_dl_tensor() -> DLTensor {
    DLTensor {
        data: ptr::null_mut(),
        device: DLDevice { device_type: 0, device_id: 0 },
        ndim: 0,
        dtype: DLDataType { code: 0, bits: 0, lanes: 0 },
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

/// Copies a tensor's description.
///
/// # Safety
/// `shape`, and `strides` unless null, point to `ndim` numbers.
unsafe fn from_dl_tensor(view: &DLTensor, read_only: bool) -> Result<TensorRef, String> {
    let axes = usize::try_from(view.ndim).map_err(|_| format!("{} axes", view.ndim))?;
    let dtype = DType::from_dlpack(view.dtype)?;
    let device = match view.device.device_type {
        // Pinned host memory is read and written like any other.
        DLDeviceType::kDLCPU | DLDeviceType::kDLCUDAHost => Device::Cpu,
        DLDeviceType::kDLCUDA | DLDeviceType::kDLCUDAManaged => Device::Cuda(view.device.device_id),
        other => return Err(format!("a tensor on DLPack device type {other}")),
    };
    let numbers = |from: *mut i64| {
        if axes == 0 || from.is_null() {
            return Vec::new();
        }
        // SAFETY: the caller promises `axes` numbers here.
        unsafe { slice::from_raw_parts(from, axes) }.to_vec()
    };
    let sizes: Result<Vec<usize>, _> =
        numbers(view.shape).into_iter().map(usize::try_from).collect();
    let sizes = sizes.map_err(|_| "a negative size".to_string())?;
    if sizes.len() != axes {
        return Err(format!("{axes} axes without a shape"));
    }
    let strides =
        numbers(view.strides).into_iter().map(isize::try_from).collect::<Result<Vec<_>, _>>();
    let strides = strides.map_err(|_| "a stride beyond the address space".to_string())?;
    let strides = (strides.len() == axes).then_some(strides.as_slice());
    let offset = usize::try_from(view.byte_offset).map_err(|_| "a huge offset".to_string())?;
    let first = view.data.cast::<u8>().wrapping_add(offset);
    TensorRef::new((first, dtype, device, read_only), &sizes, strides)
}

/// A managed tensor taken out of its capsule; the producer's deleter runs on drop.
struct Managed<'py> {
    of: Kind,
    // The deleter may run Python code, so this type never leaves the interpreter lock.
    _py: Python<'py>,
}

#[derive(Clone, Copy)]
enum Kind {
    Legacy(NonNull<DLManagedTensor>),
    Versioned(NonNull<DLManagedTensorVersioned>),
}

impl<'py> Managed<'py> {
    fn of(
        what: &str,
        object: &Bound<'py, PyAny>,
        refuse: &dyn Fn(String) -> PyErr,
    ) -> PyResult<Self> {
        let py = object.py();
        let Some(method) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
            return Err(refuse(format!("an object of type {}", object.get_type().name()?)));
        };
        let wanted = PyDict::new(py);
        wanted.set_item(intern!(py, "max_version"), (DLPACK_MAJOR_VERSION, 0))?;
        let capsule = match method.call((), Some(&wanted)) {
            // Producers older than DLPack 1.0 do not know the argument.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call0(),
            other => other,
        };
        let capsule = capsule.map_err(|error| unshared(what, py, &error))?;
        let Ok(capsule) = capsule.cast_into::<PyCapsule>() else {
            return Err(refuse("a __dlpack__ that returns no capsule".into()));
        };
        let (of, used) = if let Ok(tensor) = capsule.pointer_checked(Some(VERSIONED)) {
            (Kind::Versioned(tensor.cast()), USED_VERSIONED)
        } else if let Ok(tensor) = capsule.pointer_checked(Some(LEGACY)) {
            (Kind::Legacy(tensor.cast()), USED_LEGACY)
        } else {
            return Err(refuse("a capsule that was already used".into()));
        };
        // SAFETY: a live capsule and a static name; the name tells its destructor that the tensor
        // is ours now, and `Managed` is the one that frees it.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(Self { of, _py: py })
    }

    fn tensor(&self) -> Result<TensorRef, String> {
        // SAFETY: both pointers came out of a capsule of the matching name and are owned by self.
        // The version is read first: nothing else may be when the major one differs. DLPack
        // promises `ndim` sizes and, unless null, strides.
        unsafe {
            match self.of {
                Kind::Legacy(tensor) => from_dl_tensor(&tensor.as_ref().dl_tensor, false),
                Kind::Versioned(tensor) => {
                    let tensor = tensor.as_ref();
                    if tensor.version.major != DLPACK_MAJOR_VERSION {
                        return Err(format!("DLPack version {}", tensor.version.major));
                    }
                    let read_only = tensor.flags & DLPACK_FLAG_BITMASK_READ_ONLY != 0;
                    from_dl_tensor(&tensor.dl_tensor, read_only)
                }
            }
        }
    }
}

impl Drop for Managed<'_> {
    fn drop(&mut self) {
        // SAFETY: the capsule was renamed, so its destructor does nothing and this call of the
        // deleter is the only one; the lock is held, as `_py` proves.
        unsafe { self.of.delete() }
    }
}

impl Kind {
    /// # Safety
    /// The tensor is alive, owned by the caller, and not used again.
    unsafe fn delete(self) {
        // SAFETY: the caller's promise; deleter and its place are the same in every version.
        unsafe {
            match self {
                Self::Legacy(tensor) => {
                    if let Some(delete) = tensor.as_ref().deleter {
                        delete(tensor.as_ptr());
                    }
                }
                Self::Versioned(tensor) => {
                    if let Some(delete) = tensor.as_ref().deleter {
                        delete(tensor.as_ptr());
                    }
                }
            }
        }
    }
}

/// A capsule over memory that `keepalive` owns: versioned when the consumer knows DLPack 1.
///
/// # Errors
/// Python's own, when no capsule can be made.
pub fn export<'py, K: Send + 'static>(
    py: Python<'py>,
    keepalive: K,
    info: TensorInfo,
    versioned: bool,
    flags: u64,
) -> PyResult<Bound<'py, PyCapsule>> {
    let (tensor, name): (*mut c_void, _) = if versioned {
        (pack_versioned(keepalive, info, flags).cast(), VERSIONED)
    } else {
        (pack(keepalive, info).cast(), LEGACY)
    };
    let tensor = NonNull::new(tensor).ok_or_else(|| PyBufferError::new_err("no memory"))?;
    // SAFETY: the tensor is a fresh managed tensor of the kind that `name` says, which is all that
    // the destructor relies on; the name is static.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, tensor, name, Some(free_unconsumed)) }
}

/// Frees the tensor of a capsule that nobody consumed: a consumer renames it first.
unsafe extern "C" fn free_unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter, lock held, with the capsule that dies. A pointer is had
    // only under the name that says what it points to, and then nobody else owns it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
            let tensor = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            if let Some(tensor) = NonNull::new(tensor.cast()) {
                Kind::Versioned(tensor).delete();
            }
        } else if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) != 0 {
            let tensor = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr());
            if let Some(tensor) = NonNull::new(tensor.cast()) {
                Kind::Legacy(tensor).delete();
            }
        }
    }
}
