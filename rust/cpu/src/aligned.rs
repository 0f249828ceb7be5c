//! Floats that start on a cache line: a 64-byte load then touches one line, not two.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line, and of the widest vector.
const LINE_BYTES: usize = 64;

/// A zeroed buffer of fixed length.
pub(crate) struct Aligned {
    buffer: Vec<f32>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn zeroed(len: usize) -> Self {
        let spare = LINE_BYTES / size_of::<f32>();
        let buffer = vec![0.0f32; len + spare];
        let start = buffer.as_ptr().align_offset(LINE_BYTES).min(spare);
        Self { buffer, start, len }
    }
}

impl Deref for Aligned {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer[self.start..self.start + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::{Aligned, LINE_BYTES};

    #[test]
    fn starts_on_a_line() {
        for len in 0..40 {
            let buffer = Aligned::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr().addr() % LINE_BYTES, 0);
        }
    }
}
