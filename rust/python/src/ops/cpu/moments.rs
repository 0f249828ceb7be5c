//! `Moments` as Python sees it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvweave_core::ops::Packs;
use numpy::{PyArray1, PyArray3, PyArray4, PyArrayMethods};
use pyo3::prelude::*;

use super::element::with_element;
use crate::arguments::{Table, count, page_tokens_of, raised};
use crate::dlpack::borrow;
use crate::dtype::ROWS;
use crate::failure::{Failure, call_core};
use crate::packed::PackedFormat;
use crate::rope::RopeTable;
use crate::scalars::Number;

/// Mean and covariance of a text's keys and values, as its tokens come, and the basis made of them
/// (MosaicKV, sections 4.2 and 5.5).
///
/// `format` a top-r format or one of planes, `pages` those of a block: each has sums of its own in
/// f64, 3·(D + 1)·D of them, 4 GiB at most. Methods may be called from any thread.
#[pyclass(frozen, module = "kvweave._native")]
pub struct Moments(Mutex<kvweave_cpu::Moments>);

impl Moments {
    fn lock(&self) -> MutexGuard<'_, kvweave_cpu::Moments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pages that sums are kept of at most, and their bytes.
const MOST_PAGES: usize = 1 << 16;
const MOST_BYTES: usize = 1 << 32;

#[pymethods]
impl Moments {
    #[new]
    fn new(py: Python<'_>, format: &Bound<'_, PackedFormat>, pages: Number) -> PyResult<Self> {
        let format = format.get().format;
        let made = call_core(py, || {
            let pages = count("pages", pages)?;
            let of_page = 3 * size_of::<f64>() * format.head_dim() * (format.head_dim() + 1);
            let most = MOST_PAGES.min(MOST_BYTES / of_page);
            if pages == 0 || pages > most {
                return Err(Failure::invalid("pages", format!("1 to {most}"), pages));
            }
            kvweave_cpu::Moments::new(format, pages)
                .ok_or_else(|| Failure::invalid("format", "top-r pages or planes", format))
        })?;
        Ok(Self(Mutex::new(made)))
    }

    /// Takes in tokens of exact pages: those that rows of `packs` name, as for `pack_pages`, whose
    /// packed blocks count for nothing here. A vector with a number that is NaN or infinite is left
    /// out. Nothing is taken in where anything is refused.
    fn add(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, PyAny>,
        packs: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (cache, rows) = (borrow("cache", cache)?, Table::of("packs", packs)?);
        with_element!(py, ("cache", ROWS), cache.tensor.dtype, C => {
            let (format, pages) = {
                let moments = self.lock();
                (*moments.format(), moments.pages())
            };
            let checks = || {
                let page_tokens = page_tokens_of(&cache.tensor, &format)?;
                let mut packs = Packs { format, page_tokens, pages, bases: None, rows: &[] };
                packs.rows = rows.wide("packs", packs.width())?;
                // SAFETY: the owner is held by `cache`; writers are excluded as `arguments` says.
                Ok((unsafe { cache.tensor.slice::<C>("cache")? }, packs))
            };
            let (cache, packs) = raised(py, checks())?;
            call_core(py, || self.lock().add(cache, &packs))
        })
    }

    /// Takes in queries [R, H, D] f32, bf16 or f16 of one layer, rotated to their positions, which
    /// read the keys of `kv_heads` pages from `first` on: the bases of planes spend their bits on
    /// what these make of keys. Queries that are not finite are left out.
    #[pyo3(signature = (queries, *, first, kv_heads))]
    fn add_queries(
        &self,
        py: Python<'_>,
        queries: &Bound<'_, PyAny>,
        first: Number,
        kv_heads: Number,
    ) -> PyResult<()> {
        let queries = borrow("queries", queries)?;
        with_element!(py, ("queries", ROWS), queries.tensor.dtype, T => {
            let (dim, pages) = {
                let moments = self.lock();
                (moments.format().head_dim(), moments.pages())
            };
            let checks = || {
                let (first, kv_heads) = (count("first", first)?, count("kv_heads", kv_heads)?);
                let last = first.checked_add(kv_heads);
                if kv_heads == 0 || last.is_none_or(|last| last > pages) {
                    let got = format!("{kv_heads} from {first} on");
                    return Err(Failure::invalid("kv_heads", format!("pages within {pages}"), got));
                }
                let shape = [("rows", None), ("heads", None), ("D", Some(dim))];
                queries.tensor.expect_shape("queries", &shape)?;
                queries.tensor.expect_contiguous("queries")?;
                let heads = queries.tensor.shape()[1];
                if heads == 0 || !heads.is_multiple_of(kv_heads) {
                    let expected = format!("a multiple of {kv_heads} heads");
                    return Err(Failure::invalid("queries", expected, heads));
                }
                // SAFETY: the owner is held by `queries`; writers are excluded as `arguments` says.
                Ok((unsafe { queries.tensor.slice::<T>("queries")? }, heads, (first, kv_heads)))
            };
            let (queries, heads, pages) = raised(py, checks())?;
            call_core(py, || {
                self.lock().add_queries(queries, heads, pages);
                Ok::<_, Failure>(())
            })
        })
    }

    /// The same of texts that stand at other positions too, a `Moments` of its own: the mean over
    /// `deltas`, i32 [n], of the sums of keys and queries that have moved by so many positions, as
    /// `rope` has them move. The pages are those of `kv_heads` heads a layer, of the layers from
    /// `first_layer` on. Values have no position.
    #[pyo3(signature = (rope, deltas, *, kv_heads, first_layer))]
    fn moved(
        &self,
        py: Python<'_>,
        rope: &Bound<'_, RopeTable>,
        deltas: &Bound<'_, PyAny>,
        kv_heads: Number,
        first_layer: Number,
    ) -> PyResult<Self> {
        let deltas = Table::of("deltas", deltas)?;
        let moves = raised(py, deltas.numbers("deltas"))?;
        let table = &rope.get().table;
        call_core(py, || {
            let moments = self.lock();
            let (pages, dim) = (moments.pages(), moments.format().head_dim());
            let kv_heads = count("kv_heads", kv_heads)?;
            let first = count("first_layer", first_layer)?;
            if kv_heads == 0 || !pages.is_multiple_of(kv_heads) {
                let expected = format!("a divisor of {pages} pages");
                return Err(Failure::invalid("kv_heads", expected, kv_heads));
            }
            let layers = pages / kv_heads;
            if first.checked_add(layers).is_none_or(|last| last > table.layers()) {
                let expected = format!("{layers} layers within {}", table.layers());
                return Err(Failure::invalid("first_layer", expected, first));
            }
            if 2 * table.pairs() > dim {
                let expected = format!("at most {dim} turned channels");
                return Err(Failure::invalid("rope", expected, 2 * table.pairs()));
            }
            if moves.is_empty() {
                return Err(Failure::invalid("deltas", "one at least", 0));
            }
            Ok(Self(Mutex::new(moments.moved(table, (first, kv_heads), moves))))
        })
    }

    /// Tokens that were taken in.
    #[getter]
    fn tokens(&self) -> u64 {
        self.lock().tokens()
    }

    /// Vectors that were left out.
    #[getter]
    fn left_out(&self) -> u64 {
        self.lock().left_out()
    }

    /// What the bases of planes count errors of keys by, f64 [pages, D, D]: E[q qᵀ], and a
    /// hundredth of the queries' mean square in every direction. None unless every page had some.
    #[getter]
    fn metric<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray3<f64>>>> {
        let made = py.detach(|| {
            let moments = self.lock();
            moments.metric().map(|metric| (metric, moments.format().head_dim()))
        });
        let Some((metric, dim)) = made else { return Ok(None) };
        let pages = metric.len() / (dim * dim);
        PyArray1::from_vec(py, metric).reshape([pages, dim, dim]).map(Some)
    }

    /// A basis of keys and of values. For top-r pages f32 [pages, 2, C + 1, D]: their mean, or
    /// zeros unless `centred`, then C orthonormal directions, those of the largest spread around it
    /// first. For planes f32 [pages, 2, 2D + 2, D]: the mean, the bits of each channel, what a step
    /// along each adds to a vector, and what steps are measured by. Unless `rotated` directions are
    /// the axes, in the order of their spread, which fewer tokens are enough for.
    #[pyo3(signature = (*, centred = true, rotated = true))]
    fn basis<'py>(
        &self,
        py: Python<'py>,
        centred: bool,
        rotated: bool,
    ) -> PyResult<Bound<'py, PyArray4<f32>>> {
        let (numbers, shape) = call_core(py, || {
            let moments = self.lock();
            let numbers = moments.basis(centred, rotated).map_err(|error| {
                Failure::invalid("moments", "covariances whose eigenvectors are found", error)
            })?;
            let (pages, dim) = (moments.pages(), moments.format().head_dim());
            Ok::<_, Failure>((numbers, [pages, 2, dim]))
        })?;
        let [pages, sides, dim] = shape;
        let rows = numbers.len() / (pages * sides * dim);
        PyArray1::from_vec(py, numbers).reshape([pages, sides, rows, dim])
    }
}
