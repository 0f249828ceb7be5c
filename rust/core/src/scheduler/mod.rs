//! Which requests a step computes: a pure, deterministic state machine.
//!
//! Events go in (a request comes, is cancelled, has said tokens, has finished), and
//! [`Scheduler::plan`] says what the next step of the whole batch does. Time is an argument and
//! nothing here reads a clock; the same events give the same plans.
//!
//! The rules, and where each stands:
//! * A request's key is its first arrival, moved earlier by its priority times `ageing`. It never
//!   changes, so whoever is preempted keeps its place, and a request is passed by priority only by
//!   those that come within (their priority − its own) × `ageing` after it (`request`).
//! * Decoding goes first, one token a request; prompts share the rest of the budget in chunks, the
//!   first in order a said share, and long prompts never all places (`decode`, `prefill`).
//! * Admission takes room for all known tokens at once or nothing, and who waits holds nothing. Who
//!   finds no room lets others pass until its patience ends; then nobody is admitted before it, so
//!   it waits no longer than those who run then take to end (`admit`).
//! * Only a failed allocation preempts: of a running request, whoever is last by key among those
//!   who run; of a waiting one, those of lower priority and its own kind, between two chunks or
//!   tokens. So of equals the oldest is never preempted (`decode`, `admit`).
//! * Namespaces share what is computed by their weights (`fair`).
//! * Kinds take turns at steps and never evict one another for them (`kinds`).

mod admit;
mod books;
mod config;
mod decode;
mod fair;
mod homes;
mod kinds;
mod ledger;
mod metrics;
mod prefill;
mod queue;
mod request;
mod room;
mod step_plan;

pub use config::{PrefillOrder, SchedulerConfig};
pub use homes::HomeGroup;
pub use ledger::{BlockLedger, LedgerGroup};
pub use metrics::{Counts, SchedulerMetrics};
pub use request::{Arrival, RequestId, RequestState};
pub use room::{Room, Shortage};
pub use step_plan::{Admitted, Chunk, Preempted, Refusal, Refused, StepPlan};

use crate::error::Error;
use books::Books;
use request::Given;

/// Requests of one engine and the room that they share. Times are nanoseconds from any start.
pub struct Scheduler<R> {
    books: Books,
    room: R,
}

impl<R: Room> Scheduler<R> {
    /// # Errors
    /// `InvalidArgument` naming a field of the configuration that cannot be right.
    pub fn new(config: SchedulerConfig, room: R) -> Result<Scheduler<R>, Error> {
        config.validate()?;
        Ok(Scheduler { books: Books::new(config), room })
    }

    /// What the scheduler was built from.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.books.config
    }

    /// The room.
    #[must_use]
    pub fn room(&self) -> &R {
        &self.room
    }

    /// The room, for what only the caller knows of it.
    pub fn room_mut(&mut self) -> &mut R {
        &mut self.room
    }

    /// Sets the weight of a namespace: its share is that of one of weight 1, this many times.
    ///
    /// # Errors
    /// `InvalidArgument` for 0.
    pub fn set_weight(&mut self, namespace: &str, weight: u32) -> Result<(), Error> {
        if weight == 0 {
            return Err(Error::invalid("weight", "at least 1", weight));
        }
        self.books.shares.set_weight(namespace, weight.into());
        Ok(())
    }

    /// # Errors
    /// `InvalidArgument` for a time before the last.
    pub fn check_time(&self, now: u64) -> Result<(), Error> {
        self.books.check_time(now)
    }

    /// A request comes and waits.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that is live, a prompt without tokens, or a time before the
    /// last; `PoolFull` for a prompt that the empty room could not hold. It is not live then.
    pub fn arrive(&mut self, now: u64, arrival: &Arrival<'_>) -> Result<(), Error> {
        arrival.validate()?;
        if self.books.slot(arrival.request).is_some() {
            let got = arrival.request.0;
            return Err(Error::invalid("request", "a number of no live request", got));
        }
        self.books.at(now)?;
        self.room.fits(arrival.request, arrival.tokens).map_err(|shortage| {
            self.books.counts.refused += 1;
            shortage.as_error("prompt")
        })?;
        self.books.join(arrival);
        Ok(())
    }

    /// Where a request stands; `None` if it is not live.
    #[must_use]
    pub fn state(&self, request: RequestId) -> Option<RequestState> {
        self.books.slot(request).and_then(|slot| self.books.get(slot)).map(|live| live.state)
    }

    /// Ends a request in whatever state it is; what it held is free at once. Whether it was live: a
    /// request that has ended meanwhile is no error.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let ended = self.books.end(request, &mut self.room).is_some();
        if ended {
            self.books.counts.cancelled += 1;
        }
        ended
    }

    /// Ends a request that has said all. Whether it was live.
    pub fn finish(&mut self, request: RequestId) -> bool {
        let ended = self.books.end(request, &mut self.room).is_some();
        // Not `+= u64::from(ended)`: where a caller asserts what is returned, optimised code of
        // rustc 1.95 left the sum out.
        if ended {
            self.books.counts.finished += 1;
        }
        ended
    }

    /// A request has said `count` tokens in answer to its part of a plan: one, or more where the
    /// step guessed ahead; the KV of all but the last is stored. Whether it was live: the tokens of
    /// a request that was cancelled meanwhile are nobody's.
    ///
    /// # Errors
    /// `InvalidArgument` if no plan has asked it for a token, or for no tokens: nothing is said
    /// twice.
    pub fn produced(&mut self, request: RequestId, count: usize) -> Result<bool, Error> {
        let Some(slot) = self.books.slot(request) else { return Ok(false) };
        if !self.books.is_asked(slot) {
            return Err(not_asked(request));
        }
        self.books.produced(slot, count).map(|()| true)
    }

    /// Each of these has said one token, as [`Self::produced`] has it: all or nothing.
    ///
    /// # Errors
    /// `InvalidArgument` for one that no plan has asked for a token, or that is named twice.
    /// Nothing has changed then.
    pub fn answered(&mut self, requests: &[RequestId]) -> Result<(), Error> {
        let mut slots = Vec::with_capacity(requests.len());
        for &request in requests {
            let Some(slot) = self.books.slot(request) else { continue };
            if !self.books.is_asked(slot) {
                return Err(not_asked(request));
            }
            slots.push((slot, request));
        }
        slots.sort_unstable();
        if let Some(pair) = slots.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(not_asked(pair[0].1));
        }
        slots.into_iter().try_for_each(|(slot, _)| self.books.produced(slot, 1))
    }

    /// What the last plan gave this request was not carried out, and will be planned again. With
    /// `no_room` because its memory was not to be had after all: a prompt waits again and holds
    /// nothing, until somebody who runs gives room back or is done with a prompt, or nobody runs:
    /// those in mid-way would get no tokens if it took the next step's again. For one that decodes,
    /// the next plan makes room. Whether it was live.
    ///
    /// # Errors
    /// `InvalidArgument` if the last plan gave it nothing, or it has been answered.
    pub fn not_done(&mut self, request: RequestId, no_room: bool) -> Result<bool, Error> {
        let Some(slot) = self.books.slot(request) else { return Ok(false) };
        let step = self.books.step;
        let Some(live) = self.books.get_mut(slot) else { return Ok(false) };
        let given = std::mem::replace(&mut live.given, Given::Nothing);
        let (known, namespace) = (live.known, live.namespace);
        match given {
            Given::Token { step: at } if at == step => {
                self.books.shares.charge(namespace, -1);
                if no_room {
                    self.room.retract(request, known - 1);
                }
            }
            Given::Chunk { step: at, first } if at == step => {
                live.computed = first;
                if no_room {
                    // It has given back all that it held: nobody has to make room for it.
                    self.books.step_back(slot, &mut self.room);
                    let eased = self.books.eased;
                    if let Some(live) = self.books.get_mut(slot) {
                        live.lacked = Some(eased);
                    }
                }
            }
            other => {
                live.given = other;
                let what = format!("request {}", request.0);
                let got = "one that it gave nothing";
                return Err(Error::invalid(what, "one of the last plan's", got));
            }
        }
        Ok(true)
    }

    /// What the next step does. May be asked while an earlier plan is being carried out: who has
    /// not answered yet is left alone.
    ///
    /// # Errors
    /// `InvalidArgument` for a time before the last. Nothing has changed then.
    pub fn plan(&mut self, now: u64) -> Result<StepPlan, Error> {
        let Scheduler { books, room } = self;
        books.at(now)?;
        books.step += 1;
        let mut plan = StepPlan { step: books.step, ..StepPlan::default() };
        plan.decode.reserve(books.running.len());
        for kind in kinds::in_turn(books) {
            plan.kind = kind;
            decode::plan_decode(books, room, &mut plan);
            let may_admit = plan.preempted.is_empty();
            prefill::plan_prefill(books, room, &mut plan, may_admit);
            if !plan.is_idle() {
                if let Some(kind) = books.kinds.get_mut(&kind) {
                    kind.served = plan.step;
                }
                books.counts.steps += 1;
                break;
            }
        }
        books.counts.decode_tokens += plan.decode.len() as u64;
        let prefilled = plan.prefill.iter().map(|chunk| chunk.count as u64);
        books.counts.prefill_tokens += prefilled.sum::<u64>();
        Ok(plan)
    }

    /// Counts, and the queue as it is.
    #[must_use]
    pub fn metrics(&self) -> SchedulerMetrics {
        self.books.metrics()
    }
}

fn not_asked(request: RequestId) -> Error {
    let what = format!("tokens of request {}", request.0);
    Error::invalid(what, "one that a plan has asked for, once", "another")
}
