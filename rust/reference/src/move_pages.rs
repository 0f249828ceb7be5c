//! Pages from one arena to another.

use kvweave_core::ops::{MovePages, OpError};

/// See [`MovePages`].
///
/// # Errors
/// What [`MovePages::validate`] refuses.
pub fn move_pages(params: MovePages<'_>) -> Result<(), OpError> {
    params.validate()?;
    let MovePages { moves, page_bytes, source, target } = params;
    for (from, to) in moves.iter() {
        let page = &source[from * page_bytes..][..page_bytes];
        target[to * page_bytes..][..page_bytes].copy_from_slice(page);
    }
    Ok(())
}
