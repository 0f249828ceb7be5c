//! What `move_pages` takes of an arena from Python, wherever it lies.

use kvweave_core::ops::Way;

use crate::dtype::DType;
use crate::failure::Failure;
use crate::tensor::TensorRef;

/// Pages [pages, …] of an arena without gaps: how many, and the bytes of each.
pub fn pages_of_arena(what: &str, arena: &TensorRef) -> Result<(usize, usize), Failure> {
    arena.expect_contiguous(what)?;
    let Some((&pages, of_page)) = arena.shape().split_first() else {
        return Err(Failure::invalid(what, "pages along a first axis", "a tensor without axes"));
    };
    let size = of_page.iter().try_fold(arena.dtype.bytes(), |size, &axis| size.checked_mul(axis));
    match size {
        Some(bytes) if bytes > 0 => Ok((pages, bytes)),
        _ => Err(Failure::invalid(what, "pages of at least a byte", format!("{of_page:?}"))),
    }
}

/// Two arenas of pages of as many bytes: which is read, which is written, and their names.
pub struct PageArenas<'a> {
    pub slot_pages: usize,
    pub home_pages: usize,
    pub page_bytes: usize,
    pub source: (&'static str, &'a TensorRef),
    pub target: (&'static str, &'a TensorRef),
}

impl<'a> PageArenas<'a> {
    /// Refuses arenas of unlike pages, and ones that lie in each other.
    pub fn of(slots: &'a TensorRef, home: &'a TensorRef, way: Way) -> Result<Self, Failure> {
        let (slot_pages, slot_bytes) = pages_of_arena("slots", slots)?;
        let (home_pages, home_bytes) = pages_of_arena("home", home)?;
        let page_bytes = equal_pages(slot_bytes, home_bytes)?;
        let (slots, home) = (("slots", slots), ("home", home));
        let (source, target) = match way {
            Way::Fetch => (home, slots),
            Way::Spill => (slots, home),
        };
        target.1.expect_apart(target.0, source.1, source.0)?;
        Ok(Self { slot_pages, home_pages, page_bytes, source, target })
    }
}

/// Refuses arenas whose pages are not as many bytes.
pub fn equal_pages(slots: usize, home: usize) -> Result<usize, Failure> {
    if slots == home {
        return Ok(slots);
    }
    let expected = format!("pages of {slots} bytes, as slots have them");
    Err(Failure::invalid("home", expected, format!("{home} bytes")))
}

/// Pages of an arena of e4m3 numbers with two scales each: how many. Refuses others than of `page`
/// numbers.
pub fn fp8_pages(home: &TensorRef, scales: &TensorRef, page: usize) -> Result<usize, Failure> {
    home.expect_dtype("home", DType::Fp8E4m3)?;
    scales.expect_dtype("scales", DType::U8)?;
    let (pages, numbers) = pages_of_arena("home", home)?;
    if numbers != page {
        let expected = format!("pages of {page} numbers, as slots have them");
        return Err(Failure::invalid("home", expected, format!("{numbers} numbers")));
    }
    scales.expect_shape("scales", &[("pages of home", Some(pages)), ("2", Some(2))])?;
    scales.expect_contiguous("scales")?;
    Ok(pages)
}
