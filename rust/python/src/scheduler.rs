//! `Scheduler`: which requests of a cache the next step computes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvweave_core::scheduler::{
    self as core, Arrival, PrefillOrder, Refusal, RequestState, Room as _, SchedulerConfig,
};
use kvweave_core::{CacheRoom, Error};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{count, raised};
use crate::cache::KvCache;
use crate::failure::{Failure, call_core};
use crate::request_numbers::{Requests, request_id};
use crate::scalars::{Number, Text};

/// Plans steps for the requests of one cache. Use it from any thread.
#[pyclass(frozen, module = "kvweave._native")]
pub struct Scheduler {
    scheduler: Mutex<core::Scheduler<CacheRoom>>,
}

impl Scheduler {
    fn lock(&self) -> MutexGuard<'_, core::Scheduler<CacheRoom>> {
        self.scheduler.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work`, the interpreter lock released before ours is taken.
    fn with<T: Send, E: Into<Failure>>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut core::Scheduler<CacheRoom>) -> Result<T, E> + Send,
    ) -> PyResult<T> {
        call_core(py, || work(&mut self.lock()).map_err(Into::into))
    }
}

fn nanos(what: &str, number: Number) -> Result<u64, Failure> {
    Ok(count(what, number)? as u64)
}

/// A request comes and waits, where the empty room could hold it and what it reserves.
fn arrived(
    scheduler: &mut core::Scheduler<CacheRoom>,
    now: u64,
    arrival: &Arrival<'_>,
    reserve: usize,
) -> Result<(), Failure> {
    if reserve > 0 {
        let fits = scheduler.room().fits(arrival.request, arrival.tokens.saturating_add(reserve));
        fits.map_err(|short| short.as_error("prompt and answer"))?;
    }
    Ok(scheduler.arrive(now, arrival)?)
}

/// A head group, the cache that counts its blocks in the host's memory, slots and newest blocks.
type Home<N> = (N, kvweave_core::KvCache, N, N);

/// The same as Python gives it.
type GivenHome<'py> = (Number, Bound<'py, KvCache>, Number, Number);

fn homes_of(homes: Vec<Home<Number>>) -> Result<Vec<Home<usize>>, Failure> {
    let counted = |(group, cache, slots, newest)| {
        let counts = (count("group", group)?, count("slots", slots)?, count("newest", newest)?);
        Ok((counts.0, cache, counts.1, counts.2))
    };
    homes.into_iter().map(counted).collect()
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (
        cache, *, token_budget=Number::from(8192), chunk_tokens=Number::from(8192),
        max_running=Number::from(256), partial_prefills=Number::from(4), lead_share=0.5,
        ageing_ns=Number::from(10_000_000_000_i64), patience_ns=Number::from(2_000_000_000_i64),
        headroom=Number::from(1), quantum=Number::from(65_536), kind_patience=Number::from(8),
        order=Text("arrival"), doubling_ns=Number::from(10_000_000_000_i64), span_tokens=None,
        homes=None, part_tokens=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn new(
        py: Python<'_>,
        cache: &Bound<'_, KvCache>,
        token_budget: Number,
        chunk_tokens: Number,
        max_running: Number,
        partial_prefills: Number,
        lead_share: f64,
        ageing_ns: Number,
        patience_ns: Number,
        headroom: Number,
        quantum: Number,
        kind_patience: Number,
        order: Text<'_>,
        doubling_ns: Number,
        span_tokens: Option<Number>,
        homes: Option<Vec<GivenHome<'_>>>,
        part_tokens: Option<Number>,
    ) -> PyResult<Self> {
        let cache = cache.get().core().clone();
        let homes: Vec<_> = homes
            .into_iter()
            .flatten()
            .map(|(group, home, slots, newest)| (group, home.get().core().clone(), slots, newest))
            .collect();
        call_core(py, || {
            let order = match order.0 {
                "arrival" => PrefillOrder::Arrival,
                "short-first" => {
                    PrefillOrder::ShortFirst { doubling: nanos("doubling_ns", doubling_ns)? }
                }
                other => {
                    let expected = "\"arrival\" or \"short-first\"";
                    return Err(Failure::invalid("order", expected, format!("{other:?}")));
                }
            };
            if !(0.0..=1.0).contains(&lead_share) {
                return Err(Failure::invalid("lead_share", "0 <= share <= 1", lead_share));
            }
            let config = SchedulerConfig {
                token_budget: count("token_budget", token_budget)?,
                chunk_tokens: count("chunk_tokens", chunk_tokens)?,
                chunk_multiple: cache.config().shape.page_tokens() as usize,
                max_running: count("max_running", max_running)?,
                partial_prefills: count("partial_prefills", partial_prefills)?,
                lead_percent: (lead_share * 100.0).round() as usize,
                ageing: nanos("ageing_ns", ageing_ns)?,
                patience: nanos("patience_ns", patience_ns)?,
                headroom: count("headroom", headroom)?,
                quantum: nanos("quantum", quantum)?,
                kind_patience: nanos("kind_patience", kind_patience)?,
                order,
            };
            let span = span_tokens.map(|number| count("span_tokens", number)).transpose()?;
            let span = span.unwrap_or(config.chunk_tokens);
            let part = part_tokens.map(|number| count("part_tokens", number)).transpose()?;
            let room = CacheRoom::new(&cache, span)?;
            let homes = homes_of(homes)?;
            let room = room.with_homes(&homes, part.unwrap_or(span))?;
            let scheduler = core::Scheduler::new(config, room)?;
            Ok(Self { scheduler: Mutex::new(scheduler) })
        })
    }

    /// A request comes and waits.
    #[pyo3(signature = (
        request, tokens, now, *, cached=Number::from(0), shared_pages=Number::from(0),
        reserve=Number::from(0), priority=Number::from(0), namespace=Text(""),
        kind=Number::from(0), whole=false, leaves=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn arrive(
        &self,
        py: Python<'_>,
        request: Number,
        tokens: Number,
        now: Number,
        cached: Number,
        shared_pages: Number,
        reserve: Number,
        priority: Number,
        namespace: Text<'_>,
        kind: Number,
        whole: bool,
        leaves: bool,
    ) -> PyResult<()> {
        self.with(py, |scheduler| {
            let request = request_id(request)?;
            let (priority, kind) = (priority.whole("priority")?, kind.whole("kind")?);
            let arrival = Arrival {
                request,
                tokens: count("tokens", tokens)?,
                cached: count("cached", cached)?,
                priority: i32::try_from(priority)
                    .map_err(|_| Failure::invalid("priority", "32 bits", priority))?,
                namespace: namespace.0,
                kind: u32::try_from(kind)
                    .map_err(|_| Failure::invalid("kind", "0 to 2^32 − 1", kind))?,
                whole,
            };
            let shared = count("shared_pages", shared_pages)?;
            let reserve = count("reserve", reserve)?;
            let (now, comes) = (nanos("now", now)?, scheduler.state(request).is_none());
            if comes {
                scheduler.room_mut().ledger_mut().may_leave(request, leaves);
            }
            if let Err(error) = arrived(scheduler, now, &arrival, reserve) {
                if comes {
                    scheduler.room_mut().release(request);
                }
                return Err(error);
            }
            let ledger = scheduler.room_mut().ledger_mut();
            ledger.expect(request, arrival.cached, shared);
            ledger.reserve(request, arrival.tokens.saturating_add(reserve));
            Ok::<_, Failure>(())
        })
    }

    /// Says of a waiting request what a look-up has found since.
    #[pyo3(signature = (
        request, *, cached, shared_pages=Number::from(0), reserved=Number::from(0), leaves=false
    ))]
    fn expect(
        &self,
        py: Python<'_>,
        request: Number,
        cached: Number,
        shared_pages: Number,
        reserved: Number,
        leaves: bool,
    ) -> PyResult<bool> {
        self.with(py, |scheduler| {
            let request = request_id(request)?;
            let (cached, shared) = (count("cached", cached)?, count("shared_pages", shared_pages)?);
            let reserved = count("reserved", reserved)?;
            let waits = scheduler.state(request) == Some(RequestState::Waiting);
            if waits {
                let ledger = scheduler.room_mut().ledger_mut();
                ledger.expect(request, cached, shared);
                ledger.reserve(request, reserved);
                ledger.may_leave(request, leaves);
            }
            Ok::<_, Failure>(waits)
        })
    }

    /// Whether a request was admitted by its working set.
    fn in_parts(&self, py: Python<'_>, request: Number) -> PyResult<bool> {
        self.with(py, |scheduler| {
            Ok::<_, Failure>(scheduler.room().ledger().is_in_parts(request_id(request)?))
        })
    }

    /// Says what a request that was admitted by its working set holds by now; all, without homes.
    #[pyo3(signature = (request, *, pages=Number::from(0), homes=None))]
    fn holds(
        &self,
        py: Python<'_>,
        request: Number,
        pages: Number,
        homes: Option<Vec<Number>>,
    ) -> PyResult<()> {
        self.with(py, |scheduler| {
            let (request, pages) = (request_id(request)?, count("pages", pages)?);
            let blocks = |homes: Vec<Number>| -> Result<Vec<usize>, Failure> {
                homes.into_iter().map(|blocks| count("homes", blocks)).collect()
            };
            let homes = homes.map(blocks).transpose()?;
            let ledger = scheduler.room_mut().ledger_mut();
            match homes {
                Some(homes) => ledger.tell_held(request, pages, &homes),
                None => ledger.tell_filled(request),
            }
            Ok::<_, Failure>(())
        })
    }

    /// Pages that some tokens are counted as.
    fn pages_of(&self, py: Python<'_>, tokens: Number) -> PyResult<usize> {
        self.with(py, |scheduler| {
            Ok::<_, Failure>(scheduler.room().ledger().pages_of(count("tokens", tokens)?))
        })
    }

    /// Sets the share of a namespace beside those of weight 1.
    fn set_weight(&self, py: Python<'_>, namespace: Text<'_>, weight: Number) -> PyResult<()> {
        self.with(py, |scheduler| {
            let weight = weight.whole("weight")?;
            let weight = u32::try_from(weight)
                .map_err(|_| Failure::invalid("weight", "1 to 2^32 − 1", weight))?;
            scheduler.set_weight(namespace.0, weight).map_err(Failure::from)
        })
    }

    /// Ends a request in whatever state. Whether it was live.
    fn cancel(&self, py: Python<'_>, request: Number) -> PyResult<bool> {
        self.with(py, |scheduler| Ok::<_, Failure>(scheduler.cancel(request_id(request)?)))
    }

    /// Ends a request that has said all. Whether it was live.
    fn finish(&self, py: Python<'_>, request: Number) -> PyResult<bool> {
        self.with(py, |scheduler| Ok::<_, Failure>(scheduler.finish(request_id(request)?)))
    }

    /// A request has said `count` tokens. Whether it was live.
    #[pyo3(signature = (request, count=Number::from(1)))]
    fn produced(&self, py: Python<'_>, request: Number, count: Number) -> PyResult<bool> {
        let said = raised(py, crate::arguments::count("count", count))?;
        self.with(py, |scheduler| Ok::<_, Failure>(scheduler.produced(request_id(request)?, said)?))
    }

    /// What the last plan gave a request was not carried out. Whether it was live.
    #[pyo3(signature = (request, *, no_room=false))]
    fn not_done(&self, py: Python<'_>, request: Number, no_room: bool) -> PyResult<bool> {
        self.with(py, |scheduler| {
            Ok::<_, Failure>(scheduler.not_done(request_id(request)?, no_room)?)
        })
    }

    /// Answers to the last plan, then who has finished, then the next step. All or nothing.
    #[pyo3(signature = (now, *, answered=None, finished=None))]
    fn plan(
        &self,
        py: Python<'_>,
        now: Number,
        answered: Option<&Bound<'_, PyAny>>,
        finished: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<StepPlan> {
        let answered = Requests::maybe("answered", answered)?;
        let finished = Requests::maybe("finished", finished)?;
        self.with(py, |scheduler| {
            let now = nanos("now", now)?;
            scheduler.check_time(now)?;
            scheduler.answered(&answered)?;
            for request in finished {
                scheduler.finish(request);
            }
            scheduler.room_mut().look();
            let plan = scheduler.plan(now)?;
            Ok::<_, Failure>(StepPlan(plan))
        })
    }

    /// "waiting", "prefilling" or "decoding"; None for a request that is not live.
    fn state(&self, py: Python<'_>, request: Number) -> PyResult<Option<&'static str>> {
        self.with(py, |scheduler| {
            Ok::<_, Failure>(scheduler.state(request_id(request)?).map(|state| match state {
                RequestState::Waiting => "waiting",
                RequestState::Prefilling => "prefilling",
                RequestState::Decoding => "decoding",
                _ => "loading",
            }))
        })
    }

    /// Counts, and the queue as it is; times in nanoseconds.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = self.with(py, |scheduler| Ok::<_, Error>(scheduler.metrics()))?;
        let made = PyDict::new(py);
        for (name, value) in [
            ("waiting", metrics.waiting),
            ("prefilling", metrics.prefilling),
            ("decoding", metrics.decoding),
            ("namespaces", metrics.namespaces),
        ] {
            made.set_item(name, value)?;
        }
        let counts = metrics.counts;
        for (name, value) in [
            ("oldest_wait_ns", metrics.oldest_wait),
            ("longest_wait_ns", metrics.longest_wait),
            ("total_wait_ns", metrics.total_wait),
            ("steps", counts.steps),
            ("arrived", counts.arrived),
            ("admitted", counts.admitted),
            ("preempted", counts.preempted),
            ("overtakes", counts.overtakes),
            ("finished", counts.finished),
            ("cancelled", counts.cancelled),
            ("refused", counts.refused),
            ("prefill_tokens", counts.prefill_tokens),
            ("cached_tokens", counts.cached_tokens),
            ("decode_tokens", counts.decode_tokens),
        ] {
            made.set_item(name, value)?;
        }
        Ok(made)
    }
}

/// One step of the whole batch.
#[pyclass(frozen, module = "kvweave._native")]
pub struct StepPlan(core::StepPlan);

/// Rows of `COLUMNS` numbers as numpy int64.
type Numbers<'py> = Bound<'py, PyArray2<i64>>;

fn numbers<const COLUMNS: usize>(
    py: Python<'_>,
    rows: impl Iterator<Item = [i64; COLUMNS]>,
) -> PyResult<Numbers<'_>> {
    let rows: Vec<[i64; COLUMNS]> = rows.collect();
    let count = rows.len();
    PyArray1::from_vec(py, rows.into_flattened()).reshape([count, COLUMNS])
}

#[pymethods]
impl StepPlan {
    /// The number of the plan, from 1 on.
    #[getter]
    fn step(&self) -> u64 {
        self.0.step
    }

    /// The kind of all requests that compute something.
    #[getter]
    fn kind(&self) -> u32 {
        self.0.kind
    }

    /// (request, why) of those who are ended unasked.
    #[getter]
    fn refused(&self) -> Vec<(u64, String)> {
        let why = |why: Refusal| match why {
            Refusal::Outgrown(short) => {
                let core::Shortage { needed, free, at_home } = short;
                let what = if at_home { "blocks of the host's memory" } else { "pages" };
                format!("request: expected at most {free} {what}, got {needed}")
            }
            _ => "request: refused".into(),
        };
        self.0.refused.iter().map(|refused| (refused.request.0, why(refused.why))).collect()
    }

    /// (request, for whom) of those who give their room up: int64 [N, 2].
    #[getter]
    fn preempted<'py>(&self, py: Python<'py>) -> PyResult<Numbers<'py>> {
        let row = |p: &core::Preempted| [p.request.0 as i64, p.for_request.0 as i64];
        numbers(py, self.0.preempted.iter().map(row))
    }

    /// (request, known tokens, cached tokens) of those who have got room: int64 [N, 3].
    #[getter]
    fn admitted<'py>(&self, py: Python<'py>) -> PyResult<Numbers<'py>> {
        let row = |a: &core::Admitted| [a.request.0 as i64, a.known as i64, a.cached as i64];
        numbers(py, self.0.admitted.iter().map(row))
    }

    /// Who decodes: int64 [N].
    #[getter]
    fn decode<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_vec(py, self.0.decode.iter().map(|request| request.0 as i64).collect())
    }

    /// (request, first token, count, 1 for the last) of the prompts' chunks: int64 [N, 4].
    #[getter]
    fn prefill<'py>(&self, py: Python<'py>) -> PyResult<Numbers<'py>> {
        let row = |chunk: &core::Chunk| {
            let (request, last) = (chunk.request.0 as i64, i64::from(chunk.last));
            [request, chunk.first as i64, chunk.count as i64, last]
        };
        numbers(py, self.0.prefill.iter().map(row))
    }

    /// (request, pages needed, pages that could be had) of the first who found no room, or None.
    #[getter]
    fn blocked(&self) -> Option<(u64, usize, usize)> {
        self.0.blocked.map(|(request, short)| (request.0, short.needed, short.free))
    }

    /// Tokens that are computed.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Whether nothing is computed.
    #[getter]
    fn is_idle(&self) -> bool {
        self.0.is_idle()
    }

    fn __repr__(&self) -> String {
        format!(
            "StepPlan(step={}, kind={}, decode={}, prefill={}, admitted={}, preempted={})",
            self.0.step,
            self.0.kind,
            self.0.decode.len(),
            self.0.prefill.len(),
            self.0.admitted.len(),
            self.0.preempted.len()
        )
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
