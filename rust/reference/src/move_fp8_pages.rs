//! Pages that are e4m3 where they all lie, into slots and back.

use kvweave_core::ops::{Cached, Element, Fp8Arenas, Fp8E4m3, MoveFp8Pages, OpError, PageScale};

/// See [`MoveFp8Pages`].
///
/// # Errors
/// What [`MoveFp8Pages::validate`] refuses.
pub fn move_fp8_pages<T: Element>(params: MoveFp8Pages<'_, T>) -> Result<(), OpError>
where
    Fp8E4m3: Cached<T>,
{
    params.validate()?;
    let MoveFp8Pages { moves, page, mut arenas } = params;
    let side = page / 2;
    for (from, to) in moves.iter() {
        for half in 0..2 {
            let (read, written) = (from * page + half * side, to * page + half * side);
            match &mut arenas {
                Fp8Arenas::Fetch { home, scales, slots } => {
                    let scale = PageScale::from_bits(scales[from][half]);
                    scale.widen(&home[read..][..side], &mut slots[written..][..side]);
                }
                Fp8Arenas::Spill { slots, home, scales } => {
                    let numbers = &slots[read..][..side];
                    let scale = PageScale::of(numbers);
                    scale.round(numbers, &mut home[written..][..side]);
                    scales[to][half] = scale.to_bits();
                }
            }
        }
    }
    Ok(())
}
