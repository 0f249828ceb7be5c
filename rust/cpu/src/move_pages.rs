//! Pages from one arena to another, a page a task.

use kvweave_core::ops::{MovePages, OpError};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::grain::least_tasks;

/// Bytes that are copied in the time of one unit of work.
const BYTES_OF_WORK: usize = 64;

/// See [`MovePages`].
///
/// # Errors
/// What [`MovePages::validate`] refuses.
pub fn move_pages(params: MovePages<'_>) -> Result<(), OpError> {
    params.validate()?;
    let MovePages { moves, page_bytes, source, target } = params;
    let ends: Vec<(usize, usize)> = moves.iter().collect();
    let target = Disjoint::new(target);
    let least = least_tasks(ends.len(), ends.len() * (1 + page_bytes / BYTES_OF_WORK));
    ends.par_iter().with_min_len(least).for_each(|&(from, to)| {
        let page = &source[from * page_bytes..][..page_bytes];
        // SAFETY: no page is written twice, as `validate` proved.
        unsafe { target.piece(to * page_bytes, page_bytes) }.copy_from_slice(page);
    });
    Ok(())
}
