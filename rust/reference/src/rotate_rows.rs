//! Vectors of rows turned by cosines and sines that are given.

use kvweave_core::ops::{Element, OpError, RotateRows};

/// See [`RotateRows`].
///
/// # Errors
/// What [`RotateRows::validate`] refuses.
pub fn rotate_rows<T: Element>(params: RotateRows<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let pairs = params.pairs();
    let RotateRows { mut vectors, source, cos, sin, pairing, .. } = params;
    for row in 0..vectors.rows {
        for head in 0..vectors.heads {
            let vector = vectors.vector(row, head);
            if let Some(source) = source {
                vector.copy_from_slice(source.vector(row, head));
            }
            for i in 0..pairs {
                let (cos, sin) = (cos.vector(row, 0)[i].to_f64(), sin.vector(row, 0)[i].to_f64());
                let (first, second) = pairing.elements(i, pairs);
                let (x, y) = (vector[first].to_f64(), vector[second].to_f64());
                vector[first] = T::from_f64(x * cos - y * sin);
                vector[second] = T::from_f64(x * sin + y * cos);
            }
        }
    }
    Ok(())
}
