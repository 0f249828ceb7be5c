//! One slice handed out to threads in pieces that do not overlap.

use std::marker::PhantomData;

/// A mutable slice whose pieces several threads may hold at once.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a piece behaves as `&mut [T]`, which may go to another thread where T may; that pieces do
// not overlap is the duty of the callers of `piece` and `shared`.
unsafe impl<T: Send + Sync> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    fn check(&self, start: usize, len: usize) {
        assert!(
            start <= self.len && len <= self.len - start,
            "piece [{start}, +{len}) of {} elements",
            self.len
        );
    }

    /// The elements `[start, start + len)`, to write.
    ///
    /// # Panics
    /// If they are out of range.
    ///
    /// # Safety
    /// - No other piece or shared part that is alive may overlap them.
    #[expect(clippy::mut_from_ref, reason = "pieces are disjoint by the contract")]
    pub(crate) unsafe fn piece(&self, start: usize, len: usize) -> &mut [T] {
        self.check(start, len);
        // SAFETY: in range of the borrowed slice as checked; not aliased by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    /// The elements `[start, start + len)`, to read.
    ///
    /// # Panics
    /// If they are out of range.
    ///
    /// # Safety
    /// - No piece that is alive may overlap them.
    pub(crate) unsafe fn shared(&self, start: usize, len: usize) -> &[T] {
        self.check(start, len);
        // SAFETY: in range of the borrowed slice as checked; nobody writes it by the contract.
        unsafe { std::slice::from_raw_parts(self.start.add(start), len) }
    }
}
