//! One vector trait, one implementation per instruction set, one place that chooses.
//!
//! Kernels are written once over [`Vector`] and marked `inline(always)` all the way down, so that
//! each entry point below compiles its own copy for its instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;
mod portable;
mod vector;

pub(crate) use math::{exp2, tanh};
pub(crate) use vector::{Kernel, Vector};

/// Runs a kernel on the widest instruction set this machine has.
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::is_available() {
            // SAFETY: avx512f and what it implies were detected on this machine.
            return unsafe { avx512::run(kernel) };
        }
        if avx2::is_available() {
            // SAFETY: avx2 and fma were detected on this machine.
            return unsafe { avx2::run(kernel) };
        }
    }
    kernel.run::<portable::Portable, 2>()
}

/// Runs a kernel on every instruction set this machine has, for tests.
#[cfg(test)]
pub(crate) fn on_every_set<K: Kernel + Clone>(kernel: &K) -> Vec<K::Output> {
    let mut outputs = vec![kernel.clone().run::<portable::Portable, 2>()];
    #[cfg(target_arch = "x86_64")]
    {
        if avx2::is_available() {
            // SAFETY: avx2 and fma were detected on this machine.
            outputs.push(unsafe { avx2::run(kernel.clone()) });
        }
        if avx512::is_available() {
            // SAFETY: avx512f and what it implies were detected on this machine.
            outputs.push(unsafe { avx512::run(kernel.clone()) });
        }
    }
    outputs
}
