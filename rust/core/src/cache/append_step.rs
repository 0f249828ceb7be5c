//! More tokens for each request of a batch: all or nothing, under one lock.

use std::fmt;
use std::sync::Arc;

use crate::error::Error;

use super::advance::{Left, Slide, exchange};
use super::books::Common;
use super::request::Request;

/// Why a step was refused, and because of which request of the batch, where it is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRefused {
    /// Index in the batch.
    pub request: Option<usize>,
    /// What is the matter; its text names the request.
    pub error: Error,
}

impl StepRefused {
    pub(super) fn of(request: usize, batch: usize, error: &Error) -> StepRefused {
        let what = format!("{} of request {request} of {batch}", error.what());
        let error = Error::new(error.kind(), what, error.expected(), error.got());
        StepRefused { request: Some(request), error }
    }
}

impl From<Error> for StepRefused {
    fn from(error: Error) -> StepRefused {
        StepRefused { request: None, error }
    }
}

impl fmt::Display for StepRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for StepRefused {}

/// See [`super::KvCache::append_step`].
pub(super) fn append_step(
    common: &Arc<Common>,
    requests: &mut [&mut Request],
    tokens: &[u32],
) -> Result<(), StepRefused> {
    append_runs(common, requests, tokens, &vec![1; requests.len()])
}

/// The same of so many tokens for each, at least one: those of all, one request behind the other.
pub(super) fn append_runs(
    common: &Arc<Common>,
    requests: &mut [&mut Request],
    tokens: &[u32],
    counts: &[usize],
) -> Result<(), StepRefused> {
    let batch = requests.len();
    check_counts(batch, tokens, counts)?;
    for (number, (request, &count)) in requests.iter().zip(counts).enumerate() {
        let refused = |error| StepRefused::of(number, batch, &error);
        may_append(common, request, count).map_err(refused)?;
    }
    let mut stored = common.store.lock();
    let state = &mut *stored;
    let (mut slides, mut left) = (Vec::<(usize, Slide)>::new(), Left::default());
    let mut within = Vec::with_capacity(batch);
    for (number, request) in requests.iter_mut().enumerate() {
        let (len, end) = (request.len(), request.len() + counts[number]);
        within.push(request.rests_until(state, len..end));
        if !within[number] {
            slides.push((number, request.slide_to(state, len..end, end, &mut left)));
        }
    }
    let parts: Vec<&Slide> = slides.iter().map(|(_, slide)| slide).collect();
    let mut given = if parts.is_empty() {
        None
    } else {
        let refused = |(part, error): (usize, Error)| {
            StepRefused::of(slides.get(part).map_or(0, |slide| slide.0), batch, &error)
        };
        Some(exchange(common, state, &parts).map_err(refused)?)
    };
    for (number, slide) in slides {
        if let Some(given) = &mut given {
            requests[number].carry_out(common, state, slide, given);
        }
    }
    drop(stored);
    let mut tokens = tokens;
    for ((request, &count), within) in requests.iter_mut().zip(counts).zip(within) {
        if within {
            request.rest();
        }
        let (own, others) = tokens.split_at(count);
        request.tokens.extend_from_slice(own);
        tokens = others;
    }
    Ok(())
}

fn check_counts(batch: usize, tokens: &[u32], counts: &[usize]) -> Result<(), Error> {
    if counts.len() != batch {
        return Err(Error::invalid("counts", format!("{batch} of them"), counts.len()));
    }
    if counts.contains(&0) {
        return Err(Error::invalid("counts", "at least one token a request", 0));
    }
    let wanted = counts.iter().fold(0_usize, |sum, &count| sum.saturating_add(count));
    if tokens.len() != wanted {
        return Err(Error::invalid("tokens", format!("{wanted} of them"), tokens.len()));
    }
    Ok(())
}

fn may_append(common: &Arc<Common>, request: &Request, count: usize) -> Result<(), Error> {
    if !Arc::ptr_eq(&request.common, common) {
        return Err(Error::invalid("cache", "that of the step", "another"));
    }
    let len = request.len().saturating_add(count);
    if i32::try_from(len).is_err() {
        return Err(Error::invalid("append", "at most 2147483647 positions", len));
    }
    request.copies_taken("append")
}
