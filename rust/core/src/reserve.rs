//! Memory for books, asked for and not assumed: how large they are follows from a caller's numbers.
//!
//! A cache says how many blocks it has, and its books have an entry a block. An allocation that
//! cannot fail ends the process where there is no room; these return `OutOfMemory`.

use bytemuck::Zeroable;
use bytemuck::allocation::try_zeroed_slice_box;

use crate::error::{Error, ErrorKind};

/// `len` copies of a value.
pub(crate) fn filled<T: Clone>(what: &str, value: T, len: usize) -> Result<Vec<T>, Error> {
    let mut made = Vec::new();
    made.try_reserve_exact(len).map_err(|_| refused::<T>(what, len))?;
    made.resize(len, value);
    Ok(made)
}

/// `len` zeros, which the system provides when they are first touched.
pub(crate) fn zeroed<T: Zeroable>(what: &str, len: usize) -> Result<Vec<T>, Error> {
    try_zeroed_slice_box(len).map(Vec::from).map_err(|()| refused::<T>(what, len))
}

/// What is said where `len` entries find no room.
pub(crate) fn refused<T>(what: &str, len: usize) -> Error {
    let expected = format!("{} bytes", len as u128 * size_of::<T>() as u128);
    Error::new(ErrorKind::OutOfMemory, what, expected, "fewer on this machine")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_nowhere_is_refused_and_says_its_bytes() {
        for len in [usize::MAX, usize::MAX / 4, 1 << 60] {
            let expected = format!("{} bytes", len as u128 * 4);
            let (copies, zeros) = (filled("books", 1u32, len), zeroed::<u32>("books", len));
            for error in [copies.unwrap_err(), zeros.unwrap_err()] {
                assert_eq!(error.kind(), ErrorKind::OutOfMemory);
                assert_eq!((error.what(), error.expected()), ("books", expected.as_str()));
            }
        }
    }

    #[test]
    fn what_fits_is_there() {
        assert_eq!(filled("books", 7u16, 3).unwrap(), [7; 3]);
        assert_eq!(zeroed::<u64>("books", 3).unwrap(), [0; 3]);
        assert!(zeroed::<u64>("books", 0).unwrap().is_empty());
        assert!(filled("books", (), usize::MAX).unwrap().len() == usize::MAX);
    }
}
