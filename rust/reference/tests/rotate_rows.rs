//! The definition of `rotate_rows` against arithmetic done by hand.

use kvweave_core::ops::{HeadRows, HeadRowsMut, Pairing, RotateRows};
use kvweave_reference::rotate_rows;

/// Two rows of one head, six elements of which four turn; the source stays where there is one.
#[test]
fn rows_turn_by_their_own_angles() {
    let (cos, sin) =
        ([0.0f32, 0.6, 9.0, 9.0, -1.0, 1.0, 9.0, 9.0], [1.0f32, 0.8, 9.0, 9.0, 0.0, 0.0, 9.0, 9.0]);
    let given = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let half = [-3.0, 1.2 - 3.2, 1.0, 1.6 + 2.4, 5.0, 6.0, -1.0, 2.0, -3.0, 4.0, 5.0, 6.0];
    let neighbours = [-2.0, 1.0, 1.8 - 3.2, 2.4 + 2.4, 5.0, 6.0, -1.0, -2.0, 3.0, 4.0, 5.0, 6.0];
    for (pairing, wanted) in [(Pairing::Half, half), (Pairing::Interleaved, neighbours)] {
        for is_apart in [false, true] {
            let mut values = if is_apart { [f32::NAN; 12] } else { given };
            let source = is_apart.then(|| HeadRows::contiguous(&given, 2, 1, 6));
            rotate_rows(RotateRows {
                name: "q",
                vectors: HeadRowsMut {
                    values: &mut values,
                    rows: 2,
                    heads: 1,
                    head_dim: 6,
                    row_stride: 6,
                    head_stride: 6,
                },
                source,
                cos: HeadRows::contiguous(&cos, 2, 1, 4),
                sin: HeadRows::contiguous(&sin, 2, 1, 4),
                pairing,
            })
            .expect("valid params");
            for (got, wanted) in values.iter().zip(wanted) {
                assert!((got - wanted).abs() < 1e-6, "{values:?}");
            }
        }
    }
}
