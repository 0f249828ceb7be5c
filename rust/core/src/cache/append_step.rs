//! One more token for each request of a batch: all or nothing, under one lock.

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
    let batch = requests.len();
    if tokens.len() != batch {
        return Err(Error::invalid("tokens", format!("{batch} of them"), tokens.len()).into());
    }
    for (number, request) in requests.iter().enumerate() {
        let refused = |error| StepRefused::of(number, batch, &error);
        may_append(common, request).map_err(refused)?;
    }
    let mut stored = common.store.lock();
    let state = &mut *stored;
    let (mut slides, mut left) = (Vec::<(usize, Slide)>::new(), Left::default());
    let mut within = Vec::with_capacity(batch);
    for (number, request) in requests.iter_mut().enumerate() {
        let len = request.len();
        within.push(request.rests_at(state, len));
        if !within[number] {
            slides.push((number, request.slide_to(state, len..len + 1, len + 1, &mut left)));
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
    for ((request, &token), within) in requests.iter_mut().zip(tokens).zip(within) {
        if within {
            request.rest();
        }
        request.tokens.push(token);
    }
    Ok(())
}

fn may_append(common: &Arc<Common>, request: &Request) -> Result<(), Error> {
    if !Arc::ptr_eq(&request.common, common) {
        return Err(Error::invalid("cache", "that of the step", "another"));
    }
    if i32::try_from(request.len() + 1).is_err() {
        return Err(Error::invalid("append", "at most 2147483647 positions", request.len() + 1));
    }
    request.copies_taken("append")
}
