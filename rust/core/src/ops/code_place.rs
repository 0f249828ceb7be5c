//! Where a code lies in a packed page.

/// Where a code lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodePlace {
    /// Byte of the page.
    pub byte: usize,
    /// First bit of that byte.
    pub shift: u32,
}
