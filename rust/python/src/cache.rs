//! `KvCache`: pools, indexes and the arena.

use std::sync::Arc;

use kvweave_core::{self as core, Admission, CacheConfig, MarkedSegment};
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySequence};

use crate::arena::Arena;
use crate::arguments::{count, raised};
use crate::choices::{
    advice, eviction_kind, hash_kind, mode_kind, percent, quota_blocks, reuse_kind,
};
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::freed::FreedPages;
use crate::frozen_segment::FrozenSegment;
use crate::request::{KvRequest, group_id, saturating_u32, with_all};
use crate::rows::{Rows, rows};
use crate::scalars::{Number, Regime, Text};
use crate::shape::{HeadClassMap, HeadGroup, KvShape, pages_for_blocks};
use crate::tokens::Tokens;

/// A cache of KV blocks over one arena of pages. Use it from any thread.
#[pyclass(frozen, module = "kvweave._native")]
pub struct KvCache {
    pub cache: core::KvCache,
    shape: Py<KvShape>,
    /// None for a cache without memory.
    arena: Option<Py<PyAny>>,
    /// For all that takes blocks of the cache.
    pub freed: Arc<FreedPages>,
}

impl KvCache {
    pub fn core(&self) -> &core::KvCache {
        &self.cache
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (
        shape, *, arena_bytes=None, blocks=None, heads=None, hash=Text("xxh3-128"),
        frozen_share=0.5, watermark=0.9, eviction=Text("lru"), external=None,
        fingerprint=Text(""), memory=true
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn new(
        py: Python<'_>,
        shape: Py<KvShape>,
        arena_bytes: Option<Number>,
        blocks: Option<Number>,
        heads: Option<&Bound<'_, HeadClassMap>>,
        hash: Text<'_>,
        frozen_share: f64,
        watermark: f64,
        eviction: Text<'_>,
        external: Option<&Bound<'_, PyAny>>,
        fingerprint: Text<'_>,
        memory: bool,
    ) -> PyResult<Self> {
        if external.is_some() && !memory {
            let got = Failure::invalid("memory", "True with an external tensor", "False");
            return Err(got.raise(py));
        }
        let geometry = shape.get().0;
        let heads = heads.map(|map| map.get().0.clone());
        let settings = || {
            Ok((
                hash_kind(hash.0)?,
                percent("frozen_share", frozen_share)?,
                percent("watermark", watermark)?,
                eviction_kind(eviction.0)?,
            ))
        };
        let (hash, frozen_share, watermark, eviction) = raised(py, settings())?;
        let arena_pages = match external {
            Some(tensor) => external_pages(py, &geometry, tensor)?,
            None => raised(py, pages(&geometry, heads.as_ref(), arena_bytes, blocks))?,
        };
        let heads = raised(py, head_map(heads, &geometry, fingerprint.0))?;
        // Before the books, which are written to when they are made: an arena that this machine has
        // no room for is refused while nothing is in use yet.
        let arena = match external {
            Some(tensor) => Some(tensor.clone().unbind()),
            None if memory => arena_of(py, &geometry, arena_pages)?,
            None => None,
        };
        let cache = call_core(py, || {
            core::KvCache::new(CacheConfig {
                heads,
                hash,
                frozen_share,
                watermark,
                eviction,
                ..CacheConfig::new(geometry, arena_pages)
            })
        })?;
        let freed = FreedPages::of(&cache);
        Ok(Self { cache, shape, arena, freed })
    }

    /// The geometry that the cache was made for.
    #[getter]
    fn shape(&self, py: Python<'_>) -> Py<KvShape> {
        self.shape.clone_ref(py)
    }

    /// The pages [pages, 2, P, D]: the caller's tensor where one was given.
    #[getter]
    fn arena(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let arena = self.arena.as_ref().map(|arena| arena.clone_ref(py));
        let none = || Failure::invalid("arena", "a cache with memory", "one made without");
        arena.ok_or_else(|| none().raise(py))
    }

    /// The head groups, in the order of a request's tables.
    #[getter]
    fn groups(&self) -> Vec<HeadGroup> {
        HeadGroup::all(self.cache.groups())
    }

    /// What the KV heads of a layer read: i32 [G, 4] of table, rank, window, sink.
    fn head_rows<'py>(&self, py: Python<'py>, layer: Number) -> PyResult<Rows<'py>> {
        let layer = raised(py, saturating_u32("layer", layer))?;
        rows(py, call_core(py, || self.cache.groups().head_rows(layer))?)
    }

    /// The layer of each page of a block of a head group: i32 [pages].
    fn page_layers<'py>(
        &self,
        py: Python<'py>,
        group: Number,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = raised(py, group_id(group))?;
        Ok(call_core(py, || self.cache.groups().page_layers(group))?.to_pyarray(py))
    }

    /// The model's fingerprint, part of every key; empty if none was given.
    #[getter]
    fn fingerprint(&self) -> &str {
        let heads = self.cache.config().heads.as_ref();
        heads.map_or("", |map| map.model_fingerprint.as_str())
    }

    /// Bytes of one block of every head group.
    #[getter]
    fn block_bytes(&self) -> u64 {
        let pages: u64 = self.cache.groups().pages().iter().map(|&pages| u64::from(pages)).sum();
        pages * self.cache.config().shape.page_bytes()
    }

    /// Plans a prompt, holds what it reuses and allocates the rest: all or nothing.
    #[pyo3(signature = (
        tokens, *, namespace=Text(""), segments=None, discover=false, reuse=Text("segments"),
        mode=Text("materialise"), reserve_tokens=Number::from(0), regime=Regime::default(),
        chunk_tokens=Number::from(0), publish=true
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn admit(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Text<'_>,
        segments: Option<&Bound<'_, PyAny>>,
        discover: bool,
        reuse: Text<'_>,
        mode: Text<'_>,
        reserve_tokens: Number,
        regime: Regime,
        chunk_tokens: Number,
        publish: bool,
    ) -> PyResult<KvRequest> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        let segments = raised(py, segments.map_or(Ok(Vec::new()), marks))?;
        let settings = || {
            let reserve = count("reserve_tokens", reserve_tokens)?;
            let chunk = count("chunk_tokens", chunk_tokens)?;
            Ok((reuse_kind(reuse.0)?, mode_kind(mode.0)?, marked(&segments)?, (reserve, chunk)))
        };
        let (reuse, mode, marked, rooms) = raised(py, settings())?;
        let (marked, (reserve_tokens, chunk_tokens)) = (&marked, rooms);
        let request = call_core(py, || {
            let tokens = &ids;
            self.cache.admit(&Admission {
                tokens,
                namespace: namespace.0,
                marked,
                discover,
                reuse,
                mode,
                reserve_tokens,
                regime: regime.0,
                chunk_tokens,
                publish,
            })
        })?;
        let request = KvRequest::new(request, self.freed.clone());
        self.freed.zero(py)?;
        Ok(request)
    }

    /// Appends one generated token (i32 [B]) to each request and makes room for its KV: all of them
    /// or none.
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn append_step(
        &self,
        py: Python<'_>,
        requests: Vec<Py<KvRequest>>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        call_core(py, || {
            with_all(&requests, |requests| {
                self.cache.append_step(requests, &ids).map_err(Failure::from)
            })
        })?;
        self.freed.zero(py)
    }

    /// From now on has `fill(pages)` overwrite the pages of freed blocks, i32 [N, 2] of a first one
    /// and how many they are: before any call that takes blocks returns, and in `zero_freed`.
    fn zero_freed_by(&self, py: Python<'_>, fill: Py<PyAny>) -> PyResult<()> {
        self.freed.set_fill(py, fill)
    }

    /// Has pages overwritten that were freed by now, if `zero_freed_by` has said how. For the
    /// thread that writes to pages.
    fn zero_freed(&self, py: Python<'_>) -> PyResult<()> {
        self.freed.zero(py)
    }

    /// Evicts all that is cached of a namespace, or of all; returns the blocks. What live requests
    /// and documents hold stays.
    #[pyo3(signature = (namespace=Some(Text(""))))]
    fn forget(&self, py: Python<'_>, namespace: Option<Text<'_>>) -> PyResult<usize> {
        call_core(py, || Ok::<_, Failure>(self.cache.forget(namespace.map(|name| name.0))))
    }

    /// Tokens of the longest exact prefix that is cached in a namespace.
    #[pyo3(signature = (tokens, namespace=Text(""), *, regime=Regime::default()))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Text<'_>,
        regime: Regime,
    ) -> PyResult<usize> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        call_core(py, || Ok::<_, Failure>(self.cache.lookup_prefix_in(&ids, namespace.0, regime.0)))
    }

    /// Tokens of a segment that are cached in a namespace, whatever stood before it.
    #[pyo3(signature = (tokens, namespace=Text(""), *, regime=Regime::default()))]
    fn match_segment(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Text<'_>,
        regime: Regime,
    ) -> PyResult<usize> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        call_core(py, || Ok::<_, Failure>(self.cache.lookup_segment(&ids, namespace.0, regime.0)))
    }

    /// Blocks by state (all head groups together, and each under "groups"), hits and misses.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = call_core(py, || Ok::<_, Failure>(self.cache.stats()))?;
        crate::stats::to_dict(py, &stats)
    }

    /// Checks the books: free + held + cached = total, and that all indexes agree.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        call_core(py, || self.cache.check())
    }

    /// Knowledge-base entries of one namespace, or of all.
    #[pyo3(signature = (namespace=None))]
    fn frozen(&self, py: Python<'_>, namespace: Option<Text<'_>>) -> PyResult<Vec<FrozenSegment>> {
        let segments =
            call_core(py, || Ok::<_, Failure>(self.cache.frozen(namespace.map(|text| text.0))))?;
        Ok(segments.into_iter().map(FrozenSegment::from).collect())
    }

    /// One knowledge-base entry, whatever the number of others.
    #[pyo3(signature = (name, namespace=Text("")))]
    fn frozen_segment(
        &self,
        py: Python<'_>,
        name: Text<'_>,
        namespace: Text<'_>,
    ) -> PyResult<FrozenSegment> {
        call_core(py, || self.cache.frozen_segment(name.0, namespace.0)).map(FrozenSegment::from)
    }

    /// Deletes a knowledge-base entry. What it alone owned is no longer read by other texts; for
    /// its own text it stays cached until it is evicted.
    #[pyo3(signature = (name, namespace=Text("")))]
    fn delete(&self, py: Python<'_>, name: Text<'_>, namespace: Text<'_>) -> PyResult<()> {
        call_core(py, || self.cache.delete_frozen(name.0, namespace.0))
    }

    /// Refuses a text without room to be admitted without reuse or, computed, to be frozen whole:
    /// what has the name goes, as do entries of `going`. Only the order of eviction changes.
    #[pyo3(signature = (name, tokens, namespace, *, regime, going=vec![]))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn require_frozen_room(
        &self,
        py: Python<'_>,
        name: Text<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Text<'_>,
        regime: Regime,
        going: Vec<(String, String)>,
    ) -> PyResult<()> {
        let tokens = Tokens::of(tokens)?;
        let (ids, scope) = (raised(py, tokens.ids())?, (namespace.0, regime.0));
        call_core(py, || self.cache.require_frozen_room(name.0, &ids, scope, &going))
    }

    /// Gives a namespace a quota, of blocks of every head group or of their bytes; without either
    /// it has none. Documents beyond it are refused or lose their pins, and what else is cached of
    /// the namespace beyond it is evicted first.
    #[pyo3(signature = (namespace=Text(""), *, blocks=None, bytes=None))]
    fn set_quota(
        &self,
        py: Python<'_>,
        namespace: Text<'_>,
        blocks: Option<Number>,
        bytes: Option<Number>,
    ) -> PyResult<()> {
        let blocks = raised(py, quota_blocks(blocks, bytes, self.block_bytes()))?;
        call_core(py, || self.cache.set_quota(namespace.0, blocks))
    }

    /// Takes note of what is known of a range of a text, as far as the longest exact prefix that is
    /// cached of the text goes; returns its tokens. Only a cache that evicts by "cost-aware" has a
    /// use for it.
    #[pyo3(signature = (
        tokens, namespace=Text(""), *, start=Number::from(0), end=None, regime=Regime::default(),
        priority=Number::from(0), cost=Number::from(1), until=None, past=Text("first"),
        hint=Text("none")
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn advise(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        namespace: Text<'_>,
        start: Number,
        end: Option<Number>,
        regime: Regime,
        priority: Number,
        cost: Number,
        until: Option<Number>,
        past: Text<'_>,
        hint: Text<'_>,
    ) -> PyResult<usize> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        let start = raised(py, count("start", start))?;
        let end = raised(py, end.map_or(Ok(ids.len()), |end| count("end", end)))?;
        let advice = raised(py, advice(priority, cost, (until, past.0), hint.0))?;
        let scope = (namespace.0, regime.0);
        call_core(py, || Ok::<_, Failure>(self.cache.advise(&ids, start..end, scope, advice)))
    }

    /// Says what time it is, in the unit of `advise`'s `until`; it never goes back.
    fn set_time(&self, py: Python<'_>, now: Number) -> PyResult<()> {
        let now = raised(py, count("now", now))?;
        call_core(py, || {
            self.cache.set_time(now as u64);
            Ok::<_, Failure>(())
        })
    }

    /// Shrinks the frozen pool above the watermark, lets it grow back below.
    fn rebalance(&self, py: Python<'_>) -> PyResult<()> {
        call_core(py, || {
            self.cache.rebalance();
            Ok::<_, Failure>(())
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let stats = call_core(py, || Ok::<_, Failure>(self.cache.stats()))?;
        let held: usize = stats.groups.iter().map(|group| group.held).sum();
        Ok(format!("KvCache({} pages, {held} blocks held)", stats.arena_pages))
    }
}

/// Memory for the pages; none for more than a cache can number, which the cache itself refuses.
fn arena_of(py: Python<'_>, shape: &core::KvShape, pages: u64) -> PyResult<Option<Py<PyAny>>> {
    if i32::try_from(pages).is_err() {
        return Ok(None);
    }
    let sizes = [pages as usize, 2, shape.page_tokens() as usize, shape.head_dim() as usize];
    let arena = call_core(py, || Arena::new(sizes, shape.dtype().into()))?;
    Ok(Some(Py::new(py, arena)?.into_any()))
}

/// Pages of a tensor that is given as the arena: [pages, 2, P, D].
fn external_pages(
    py: Python<'_>,
    shape: &core::KvShape,
    tensor: &Bound<'_, PyAny>,
) -> PyResult<u64> {
    let tensor = borrow("external", tensor)?.tensor;
    let (page_tokens, head_dim) = (shape.page_tokens() as usize, shape.head_dim() as usize);
    let wanted = [("pages", None), ("2", Some(2)), ("P", Some(page_tokens)), ("D", Some(head_dim))];
    let checks = || {
        tensor.expect_dtype("external", DType::from(shape.dtype()))?;
        tensor.expect_shape("external", &wanted)?;
        tensor.expect_contiguous("external")?;
        tensor.expect_writable("external")?;
        tensor.expect_aligned("external", 16)
    };
    raised(py, checks())?;
    Ok(tensor.shape()[0] as u64)
}

/// Pages of an arena given in bytes or in blocks, exactly one of them.
fn pages(
    shape: &core::KvShape,
    heads: Option<&core::HeadClassMap>,
    arena_bytes: Option<Number>,
    blocks: Option<Number>,
) -> Result<u64, Failure> {
    match (arena_bytes, blocks) {
        (Some(bytes), None) => Ok(count("arena_bytes", bytes)? as u64 / shape.page_bytes()),
        (None, Some(blocks)) => pages_for_blocks(shape, heads, blocks),
        (bytes, blocks) => {
            let got = match (bytes, blocks) {
                (None, None) => "none of them",
                _ => "both",
            };
            Err(Failure::invalid("arena", "arena_bytes, blocks or external", got))
        }
    }
}

/// The head map with the model's fingerprint: part of every key of the index.
fn head_map(
    given: Option<core::HeadClassMap>,
    shape: &core::KvShape,
    fingerprint: &str,
) -> Result<Option<core::HeadClassMap>, Failure> {
    match given {
        None if fingerprint.is_empty() => Ok(None),
        None => Ok(Some(core::HeadClassMap::full(shape, fingerprint))),
        Some(map) if fingerprint.is_empty() || map.model_fingerprint == fingerprint => {
            Ok(Some(map))
        }
        Some(map) => {
            let got = map.model_fingerprint;
            let kind = core::ErrorKind::CorruptHeadMap;
            let expected = format!("a map of model {fingerprint:?}");
            Err(core::Error::new(kind, "head map", expected, format!("one of {got:?}")).into())
        }
    }
}

/// A marked segment as Python gives it: start, end, namespace.
type Mark = (Number, Number, String);

fn marks(segments: &Bound<'_, PyAny>) -> Result<Vec<Mark>, Failure> {
    const EXPECTED: &str = "(start, end, namespace)";
    let refused = |what: String, expected: &str, got: &Bound<'_, PyAny>| {
        let shown = got.repr().map_or_else(|_| "something else".into(), |text| text.to_string());
        Failure::invalid(what, expected, shown.chars().take(80).collect::<String>())
    };
    let sequence = format!("a sequence of {EXPECTED}");
    let listed = segments.cast::<PySequence>().ok().and_then(|list| list.try_iter().ok());
    let items = listed.ok_or_else(|| refused("segments".into(), &sequence, segments))?;
    let mark = |(number, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let item = item.map_err(|_| refused("segments".into(), &sequence, segments))?;
        match item.extract::<Mark>() {
            Ok(mark @ (Number::Whole(_), Number::Whole(_), _)) => Ok(mark),
            _ => Err(refused(format!("segment {number}"), EXPECTED, &item)),
        }
    };
    items.enumerate().map(mark).collect()
}

fn marked(segments: &[Mark]) -> Result<Vec<MarkedSegment<'_>>, Failure> {
    let mark = |segment| {
        let (start, end, namespace): &(Number, Number, String) = segment;
        let (start, end) = (count("segment start", start)?, count("segment end", end)?);
        Ok(MarkedSegment { start, end, namespace })
    };
    segments.iter().map(mark).collect()
}
