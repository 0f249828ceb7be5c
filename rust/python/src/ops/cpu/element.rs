//! The Rust types behind the dtypes of a call, and which crate runs it.
//!
//! A macro names what it needs by its whole path, since it is expanded in the files of the ops.

/// Runs `$body` with `$T` as the Rust type of a dtype that rows have.
macro_rules! with_element {
    ($py:expr, ($what:expr, $expected:expr), $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::DType::Bf16 => {
                type $T = half::bf16;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => {
                Err($crate::failure::Failure::invalid($what, $expected, other.name()).raise($py))
            }
        }
    };
}

/// Runs `$body` with `$C` as the Rust type of a cache's dtype.
macro_rules! with_pages {
    ($py:expr, $dtype:expr, $C:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::Fp8E4m3 => {
                type $C = kvweave_core::ops::Fp8E4m3;
                $body
            }
            other => $crate::ops::cpu::element::with_element!(
                $py, ("cache", $crate::dtype::PAGES), other, $C => $body
            ),
        }
    };
}

/// Runs `$body` with `$T` and `$C` as the Rust types of rows and of the cache they belong to: the
/// same, or any over fp8.
macro_rules! with_rows {
    ($py:expr, $cache:expr, ($what:expr, $rows:expr), ($T:ident, $C:ident) => $body:expr) => {
        match $cache {
            $crate::dtype::DType::Fp8E4m3 => $crate::ops::cpu::element::with_element!(
                $py, ($what, $crate::dtype::ROWS), $rows, $T => {
                    type $C = kvweave_core::ops::Fp8E4m3;
                    $body
                }
            ),
            other => $crate::ops::cpu::element::with_element!(
                $py, ("cache", $crate::dtype::PAGES), other, $T => {
                    type $C = $T;
                    $body
                }
            ),
        }
    };
}

/// A function of the fast crate, or of the definition when `$reference`.
macro_rules! run {
    ($py:expr, $reference:expr, $op:ident, $params:expr) => {{
        let params = $params;
        $crate::failure::call_core($py, move || {
            if $reference { kvweave_reference::$op(params) } else { kvweave_cpu::$op(params) }
        })
    }};
}

pub(super) use {run, with_element, with_pages, with_rows};
