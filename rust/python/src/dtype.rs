//! Element types of tensors that cross the border, under the names their owners use.

use dlpack_rs::ffi::{DLDataType, DLDataTypeCode};
use kvweave_core::KvDtype;
use pyo3::prelude::*;

use crate::failure::Failure;

/// An element type that some argument accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    F32,
    Bf16,
    F16,
    Fp8E4m3,
    I32,
    I64,
    U32,
    F64,
    U8,
}

const NAMES: [(DType, &str); 9] = [
    (DType::F32, "float32"),
    (DType::Bf16, "bfloat16"),
    (DType::F16, "float16"),
    (DType::Fp8E4m3, "float8_e4m3fn"),
    (DType::I32, "int32"),
    (DType::I64, "int64"),
    (DType::U32, "uint32"),
    (DType::F64, "float64"),
    (DType::U8, "uint8"),
];

impl DType {
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(dtype, _)| *dtype == self).map_or("unknown", |(_, name)| name)
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::Fp8E4m3 | Self::U8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The DLPack code, or what it is called when no argument accepts it.
    pub fn from_dlpack(dtype: DLDataType) -> Result<Self, String> {
        let code = u32::from(dtype.code);
        match (code, dtype.bits, dtype.lanes) {
            (DLDataTypeCode::kDLFloat, 64, 1) => Ok(Self::F64),
            (DLDataTypeCode::kDLFloat, 32, 1) => Ok(Self::F32),
            (DLDataTypeCode::kDLFloat, 16, 1) => Ok(Self::F16),
            (DLDataTypeCode::kDLBfloat, 16, 1) => Ok(Self::Bf16),
            (DLDataTypeCode::kDLFloat8_e4m3fn, 8, 1) => Ok(Self::Fp8E4m3),
            (DLDataTypeCode::kDLInt, 32, 1) => Ok(Self::I32),
            (DLDataTypeCode::kDLInt, 64, 1) => Ok(Self::I64),
            (DLDataTypeCode::kDLUInt, 32, 1) => Ok(Self::U32),
            (DLDataTypeCode::kDLUInt, 8, 1) => Ok(Self::U8),
            (code, bits, lanes) => Err(format!("{} of {bits} bits × {lanes}", kind(code))),
        }
    }

    pub fn to_dlpack(self) -> DLDataType {
        let code = match self {
            Self::F32 | Self::F16 | Self::F64 => DLDataTypeCode::kDLFloat,
            Self::Bf16 => DLDataTypeCode::kDLBfloat,
            Self::Fp8E4m3 => DLDataTypeCode::kDLFloat8_e4m3fn,
            Self::I32 | Self::I64 => DLDataTypeCode::kDLInt,
            Self::U32 | Self::U8 => DLDataTypeCode::kDLUInt,
        };
        DLDataType { code: code as u8, bits: 8 * self.bytes() as u8, lanes: 1 }
    }

    /// From numpy's `kind` and item size.
    pub fn from_numpy(kind: u8, bytes: usize) -> Result<Self, String> {
        match (kind, bytes) {
            (b'f', 8) => Ok(Self::F64),
            (b'f', 4) => Ok(Self::F32),
            (b'f', 2) => Ok(Self::F16),
            (b'i', 4) => Ok(Self::I32),
            (b'i', 8) => Ok(Self::I64),
            (b'u', 4) => Ok(Self::U32),
            (b'u', 1) => Ok(Self::U8),
            _ => Err(format!("numpy kind {:?} of {} bits", kind as char, 8 * bytes)),
        }
    }
}

fn kind(code: u32) -> String {
    let name = match code {
        DLDataTypeCode::kDLInt => "int",
        DLDataTypeCode::kDLUInt => "uint",
        DLDataTypeCode::kDLFloat => "float",
        DLDataTypeCode::kDLBfloat => "bfloat",
        DLDataTypeCode::kDLComplex => "complex",
        DLDataTypeCode::kDLBool => "bool",
        other => return format!("DLPack type code {other}"),
    };
    name.into()
}

/// What rows of keys, values and queries may be.
pub const ROWS: &str = "float32, bfloat16 or float16";
/// What a cache may hold.
pub const PAGES: &str = "float32, bfloat16, float16 or float8_e4m3fn";

impl From<KvDtype> for DType {
    fn from(dtype: KvDtype) -> Self {
        match dtype {
            KvDtype::F32 => Self::F32,
            KvDtype::Bf16 => Self::Bf16,
            KvDtype::F16 => Self::F16,
            KvDtype::Fp8E4m3 => Self::Fp8E4m3,
        }
    }
}

/// Reads "f32", "bf16", "f16", "fp8_e4m3", or torch's and numpy's spelling of the same.
pub fn kv_dtype(name: &Bound<'_, PyAny>) -> PyResult<KvDtype> {
    let text = name.str()?.to_string();
    match text.strip_prefix("torch.").unwrap_or(&text) {
        "f32" | "float32" => Ok(KvDtype::F32),
        "bf16" | "bfloat16" => Ok(KvDtype::Bf16),
        "f16" | "float16" => Ok(KvDtype::F16),
        "fp8_e4m3" | "float8_e4m3fn" => Ok(KvDtype::Fp8E4m3),
        _ => {
            let (expected, got) = ("f32, bf16, f16 or fp8_e4m3", format!("{text:?}"));
            Err(Failure::invalid("dtype", expected, got).raise(name.py()))
        }
    }
}

pub fn kv_dtype_name(dtype: KvDtype) -> &'static str {
    match dtype {
        KvDtype::F32 => "f32",
        KvDtype::Bf16 => "bf16",
        KvDtype::F16 => "f16",
        KvDtype::Fp8E4m3 => "fp8_e4m3",
    }
}
