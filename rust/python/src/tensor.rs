//! A tensor of somebody else: where its elements are, and checks that say what was wrong.

use std::slice;

use half::{bf16, f16};
use kvweave_core::ops::{Element, Fp8E4m3};

use crate::dtype::DType;
use crate::failure::Failure;

/// Axes of the largest tensor that an argument accepts.
pub const MAX_AXES: usize = 6;

/// Memory that holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda(i32),
}

impl Device {
    pub fn name(self) -> String {
        match self {
            Self::Cpu => "cpu".into(),
            Self::Cuda(ordinal) => format!("cuda:{ordinal}"),
        }
    }
}

/// Location and layout of a tensor; it says nothing about how long that stays valid: whoever reads
/// or writes through it holds the `Borrowed` it came from.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef {
    /// First element, byte offset applied. May be anything when there are no elements.
    pub ptr: *mut u8,
    pub dtype: DType,
    pub device: Device,
    pub read_only: bool,
    pub axes: usize,
    shape: [usize; MAX_AXES],
    /// In elements.
    strides: [isize; MAX_AXES],
}

impl TensorRef {
    /// Copies shape and strides (in elements; none means C-contiguous) out of their owner.
    pub fn new(
        (ptr, dtype, device, read_only): (*mut u8, DType, Device, bool),
        shape: &[usize],
        strides: Option<&[isize]>,
    ) -> Result<Self, String> {
        if shape.len() > MAX_AXES {
            return Err(format!("{} axes", shape.len()));
        }
        let mut tensor = Self {
            ptr,
            dtype,
            device,
            read_only,
            axes: shape.len(),
            shape: [1; MAX_AXES],
            strides: [1; MAX_AXES],
        };
        tensor.shape[..shape.len()].copy_from_slice(shape);
        match strides {
            Some(strides) => tensor.strides[..strides.len()].copy_from_slice(strides),
            None => tensor.strides[..shape.len()].copy_from_slice(&compact(shape)[..shape.len()]),
        }
        Ok(tensor)
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.axes]
    }

    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.axes]
    }

    /// Whether there is no element at all; their number may be beyond any where strides are 0.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Refuses another number of axes, or an axis whose size differs; `None` accepts any size.
    pub fn expect_shape(
        &self,
        what: &str,
        wanted: &[(&str, Option<usize>)],
    ) -> Result<(), Failure> {
        let fits = self.axes == wanted.len()
            && self
                .shape()
                .iter()
                .zip(wanted)
                .all(|(got, (_, size))| size.is_none_or(|s| s == *got));
        if fits {
            return Ok(());
        }
        let pattern: Vec<String> = wanted
            .iter()
            .map(|(name, size)| size.map_or((*name).to_string(), |size| format!("{name}={size}")))
            .collect();
        let expected = format!("shape [{}]", pattern.join(", "));
        Err(Failure::invalid(what, expected, format!("{:?}", self.shape())))
    }

    pub fn expect_dtype(&self, what: &str, wanted: DType) -> Result<(), Failure> {
        if self.dtype == wanted {
            return Ok(());
        }
        Err(Failure::invalid(what, wanted.name(), self.dtype.name()))
    }

    pub fn expect_device(&self, what: &str, wanted: Device) -> Result<(), Failure> {
        if self.device == wanted {
            return Ok(());
        }
        let expected = format!("a tensor on {}", wanted.name());
        Err(Failure::invalid(what, expected, self.device.name()))
    }

    pub fn expect_writable(&self, what: &str) -> Result<(), Failure> {
        if !self.read_only {
            return Ok(());
        }
        Err(Failure::invalid(what, "a writable tensor", "a read-only one"))
    }

    /// Whether elements lie without gaps, last axis fastest. Axes of size 1 may stride anyhow.
    pub fn is_contiguous(&self) -> bool {
        let wanted = compact(self.shape());
        self.is_empty()
            || (0..self.axes)
                .all(|axis| self.shape[axis] == 1 || self.strides[axis] == wanted[axis])
    }

    pub fn expect_contiguous(&self, what: &str) -> Result<(), Failure> {
        if self.is_contiguous() {
            return Ok(());
        }
        let expected = format!("C-contiguous strides {:?}", &compact(self.shape())[..self.axes]);
        Err(Failure::invalid(what, expected, format!("strides {:?}", self.strides())))
    }

    /// Refuses a first element that is not on a boundary of `bytes`.
    pub fn expect_aligned(&self, what: &str, bytes: usize) -> Result<(), Failure> {
        let off = self.ptr as usize % bytes;
        if off == 0 || self.is_empty() {
            return Ok(());
        }
        let got = format!("an address {off} bytes past one");
        Err(Failure::invalid(what, format!("{bytes}-byte alignment"), got))
    }

    /// Elements from the first to one past the last that the strides reach. Strides must not be
    /// negative: no argument of ours reads backwards. All of them end within the address space, and
    /// are no more bytes than a slice may have.
    pub fn extent(&self, what: &str) -> Result<usize, Failure> {
        self.addresses(what).map(|(start, end)| (end - start) / self.dtype.bytes())
    }

    /// The bytes that the elements lie in, as addresses.
    fn addresses(&self, what: &str) -> Result<(usize, usize), Failure> {
        let start = self.ptr as usize;
        if self.is_empty() {
            return Ok((start, start));
        }
        let mut steps = self.shape().iter().zip(self.strides());
        let last = steps.try_fold(0usize, |last, (&size, &stride)| {
            last.checked_add(usize::try_from(stride).ok()?.checked_mul(size - 1)?)
        });
        let bytes = last.and_then(|last| last.checked_add(1)?.checked_mul(self.dtype.bytes()));
        let end = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let end = end.and_then(|bytes| start.checked_add(bytes)).ok_or_else(|| {
            let got = format!("{:?} of shape {:?}", self.strides(), self.shape());
            Failure::invalid(what, "strides of at least 0 that stay within memory", got)
        })?;
        Ok((start, end))
    }

    /// Refuses two arguments that share memory when one of them is written.
    pub fn expect_apart(&self, what: &str, other: &Self, named: &str) -> Result<(), Failure> {
        let (a, b) = (self.addresses(what)?, other.addresses(named)?);
        if a.1 <= b.0 || b.1 <= a.0 || a.0 == a.1 || b.0 == b.1 {
            return Ok(());
        }
        let expected = format!("memory of its own, apart from {named}");
        Err(Failure::invalid(what, expected, "memory that overlaps it"))
    }

    /// The elements as a slice, from the first on.
    ///
    /// # Safety
    /// The owner keeps the memory alive for `'a`, and nobody writes to it meanwhile.
    pub unsafe fn slice<'a, T: Stored>(&self, what: &str) -> Result<&'a [T], Failure> {
        let (ptr, len) = self.typed::<T>(what)?;
        // SAFETY: dtype, CPU memory and alignment were checked by `typed`, the extent comes from
        // the owner's own shape and strides; lifetime and exclusion are the caller's promise.
        Ok(if len == 0 { &[] } else { unsafe { slice::from_raw_parts(ptr, len) } })
    }

    /// The elements as a slice to write to.
    ///
    /// # Safety
    /// The owner keeps the memory alive for `'a`, and nobody else reads or writes it meanwhile.
    pub unsafe fn slice_mut<'a, T: Stored>(&self, what: &str) -> Result<&'a mut [T], Failure> {
        self.expect_writable(what)?;
        let (ptr, len) = self.typed::<T>(what)?;
        // SAFETY: as in `slice`, and the tensor is writable.
        Ok(if len == 0 { &mut [] } else { unsafe { slice::from_raw_parts_mut(ptr, len) } })
    }

    /// The bytes of a contiguous tensor on the host, whatever its elements are.
    ///
    /// # Safety
    /// As for [`Self::slice`].
    pub unsafe fn bytes<'a>(&self, what: &str) -> Result<&'a [u8], Failure> {
        let length = self.byte_length(what)?;
        // SAFETY: so many bytes lie from the first element on, as just checked; lifetime and
        // exclusion are the caller's promise. Any bits are bytes.
        Ok(if length == 0 { &[] } else { unsafe { slice::from_raw_parts(self.ptr, length) } })
    }

    /// The same, to write to.
    ///
    /// # Safety
    /// As for [`Self::slice_mut`]; whatever the bytes are then is a value of the elements' type.
    pub unsafe fn bytes_mut<'a>(&self, what: &str) -> Result<&'a mut [u8], Failure> {
        self.expect_writable(what)?;
        let length = self.byte_length(what)?;
        if length == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as in `bytes`, and the tensor is writable.
        Ok(unsafe { slice::from_raw_parts_mut(self.ptr, length) })
    }

    fn byte_length(&self, what: &str) -> Result<usize, Failure> {
        self.expect_device(what, Device::Cpu)?;
        self.expect_contiguous(what)?;
        Ok(self.extent(what)? * self.dtype.bytes())
    }

    fn typed<T: Stored>(&self, what: &str) -> Result<(*mut T, usize), Failure> {
        self.expect_dtype(what, T::DTYPE)?;
        self.expect_device(what, Device::Cpu)?;
        self.expect_aligned(what, align_of::<T>())?;
        Ok((self.ptr.cast(), self.extent(what)?))
    }
}

fn compact(shape: &[usize]) -> [isize; MAX_AXES] {
    let mut strides = [1; MAX_AXES];
    let mut next = 1usize;
    for (stride, &size) in strides[..shape.len()].iter_mut().zip(shape).rev() {
        *stride = next.cast_signed();
        next = next.saturating_mul(size.max(1));
    }
    strides
}

/// A Rust type that a tensor's memory may be viewed as: any bits are a value of it.
pub trait Stored: Copy + Send + Sync {
    const DTYPE: DType;
}

macro_rules! stored {
    ($($type:ty => $dtype:ident),*) => {
        $(impl Stored for $type { const DTYPE: DType = DType::$dtype; })*
    };
}

stored!(f32 => F32, bf16 => Bf16, f16 => F16, Fp8E4m3 => Fp8E4m3);
stored!(i32 => I32, i64 => I64, u32 => U32, u8 => U8, f64 => F64);

/// An element type that a KV cache may hold.
pub trait KvElement: Element + Stored {}

impl KvElement for f32 {}
impl KvElement for bf16 {}
impl KvElement for f16 {}
impl KvElement for Fp8E4m3 {}
