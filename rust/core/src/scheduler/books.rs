//! Who is live, who holds room, who waits: what events change and plans read.

use hashbrown::HashMap;
use std::collections::BTreeMap;

use crate::error::Error;

use super::config::SchedulerConfig;
use super::fair::Shares;
use super::metrics::{Counts, SchedulerMetrics};
use super::queue::Queue;
use super::request::{Arrival, Given, RequestId, RequestState, Tracked, key, rank};
use super::room::Room;

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kind {
    pub(super) live: usize,
    /// The last step that was theirs, or the one after which the first of them came.
    pub(super) served: u64,
}

pub(super) struct Books {
    pub(super) config: SchedulerConfig,
    pub(super) now: u64,
    pub(super) step: u64,
    pub(super) requests: Vec<Option<Tracked>>,
    free: Vec<u32>,
    slots: HashMap<RequestId, u32>,
    /// Those who hold room, in the order of their keys.
    pub(super) running: Vec<u32>,
    pub(super) queue: Queue,
    pub(super) shares: Shares,
    pub(super) kinds: BTreeMap<u32, Kind>,
    pub(super) counts: Counts,
    /// How often somebody who ran gave room back, or was done with a prompt.
    pub(super) eased: u64,
    longest_wait: u64,
    total_wait: u64,
}

impl Books {
    pub(super) fn new(config: SchedulerConfig) -> Books {
        Books {
            config,
            now: 0,
            step: 0,
            requests: Vec::new(),
            free: Vec::new(),
            slots: HashMap::new(),
            running: Vec::new(),
            queue: Queue::default(),
            shares: Shares::new(config.quantum),
            kinds: BTreeMap::new(),
            counts: Counts::default(),
            eased: 0,
            longest_wait: 0,
            total_wait: 0,
        }
    }

    /// # Errors
    /// `InvalidArgument` for a time before the last.
    pub(super) fn check_time(&self, now: u64) -> Result<(), Error> {
        if now < self.now {
            return Err(Error::invalid("now", format!("at least {}", self.now), now));
        }
        Ok(())
    }

    /// Moves time on.
    ///
    /// # Errors
    /// `InvalidArgument` for a time before the last. Nothing has changed then.
    pub(super) fn at(&mut self, now: u64) -> Result<(), Error> {
        self.check_time(now)?;
        self.now = now;
        Ok(())
    }

    /// A request that is not live joins the queue.
    pub(super) fn join(&mut self, arrival: &Arrival<'_>) {
        let id = arrival.request;
        let key = key(self.now, arrival.priority, self.config.ageing);
        let namespace = self.shares.enter(arrival.namespace);
        let request = Tracked {
            id,
            order: self.counts.arrived,
            since: self.now,
            priority: arrival.priority,
            key,
            rank: rank(self.config.order, key, arrival.tokens, arrival.cached),
            namespace,
            kind: arrival.kind,
            whole: arrival.whole,
            state: RequestState::Waiting,
            known: arrival.tokens,
            computed: 0,
            cached: arrival.cached,
            given: Given::Nothing,
            admitted: 0,
            charged: false,
            lacked: None,
        };
        self.counts.arrived += 1;
        let served = self.step;
        self.kinds.entry(arrival.kind).or_insert(Kind { live: 0, served }).live += 1;
        let slot = self.free.pop().unwrap_or(self.requests.len() as u32);
        if slot as usize == self.requests.len() {
            self.requests.push(None);
        }
        self.slots.insert(id, slot);
        self.queue.join(slot, &request);
        self.shares.note_waiting(namespace, true);
        self.requests[slot as usize] = Some(request);
    }

    /// The slot of a live request.
    pub(super) fn slot(&self, id: RequestId) -> Option<u32> {
        self.slots.get(&id).copied()
    }

    pub(super) fn get(&self, slot: u32) -> Option<&Tracked> {
        self.requests[slot as usize].as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Tracked> {
        self.requests[slot as usize].as_mut()
    }

    /// Where a request stands, or would, among those who run.
    fn place(&self, request: &Tracked) -> usize {
        let at = |slot: &u32| {
            let other = self.get(*slot);
            other.is_some_and(|other| (other.key, other.order) < (request.key, request.order))
        };
        self.running.partition_point(at)
    }

    /// Forgets a request; what it held is given back. Returns where it stood, if it was live.
    pub(super) fn end(&mut self, id: RequestId, room: &mut impl Room) -> Option<RequestState> {
        let slot = self.slots.remove(&id)?;
        let request = self.requests[slot as usize].take()?;
        if request.state == RequestState::Waiting {
            self.queue.leave(slot, &request);
            self.shares.note_waiting(request.namespace, false);
        } else {
            self.running.retain(|&other| other != slot);
            self.eased += 1;
        }
        room.release(id);
        self.shares.exit(request.namespace);
        if let Some(kind) = self.kinds.get_mut(&request.kind) {
            kind.live -= 1;
            if kind.live == 0 {
                self.kinds.remove(&request.kind);
            }
        }
        self.free.push(slot);
        Some(request.state)
    }

    /// A waiting request runs from now on, with room for what it knows; `cached` of it is there.
    pub(super) fn admit(&mut self, slot: u32, cached: usize) {
        let Some(request) = self.requests[slot as usize].as_mut() else { return };
        self.queue.leave(slot, request);
        self.shares.note_waiting(request.namespace, false);
        request.computed = cached.min(request.known - 1);
        request.state = RequestState::Prefilling;
        request.given = Given::Nothing;
        request.admitted = self.step;
        if !std::mem::replace(&mut request.charged, true) {
            self.shares.charge(request.namespace, request.remaining() as i64);
        }
        self.counts.admitted += 1;
        self.counts.cached_tokens += request.computed as u64;
        let waited = self.now - request.since;
        self.longest_wait = self.longest_wait.max(waited);
        self.total_wait = self.total_wait.saturating_add(waited);
        request.since = self.now;
        if let Some(request) = self.get(slot) {
            let place = self.place(request);
            self.running.insert(place, slot);
        }
    }

    /// A running request waits again, at its old place, and gives its room back.
    pub(super) fn step_back(&mut self, slot: u32, room: &mut impl Room) {
        self.running.retain(|&other| other != slot);
        let Some(request) = self.requests[slot as usize].as_mut() else { return };
        room.release(request.id);
        request.state = RequestState::Waiting;
        request.computed = 0;
        request.given = Given::Nothing;
        request.since = self.now;
        self.queue.join(slot, request);
        self.shares.note_waiting(request.namespace, true);
    }

    /// Whether a request waits for others: its prompt found no room that was promised, and who runs
    /// has neither given any back since nor done with a prompt.
    pub(super) fn waits_for_others(&self, request: &Tracked) -> bool {
        request.lacked == Some(self.eased) && !self.running.is_empty()
    }

    /// Whether a request's token is being computed.
    pub(super) fn is_asked(&self, slot: u32) -> bool {
        self.get(slot).is_some_and(Tracked::awaits_token)
    }

    /// A request whose token was being computed has said `count`.
    ///
    /// # Errors
    /// `InvalidArgument` for none, or too many. Nothing has changed then.
    pub(super) fn produced(&mut self, slot: u32, count: usize) -> Result<(), Error> {
        let Some(request) = self.requests[slot as usize].as_mut() else { return Ok(()) };
        let known = request.known.checked_add(count).filter(|&n| i32::try_from(n).is_ok());
        let Some(known) = known.filter(|_| count > 0) else {
            return Err(Error::invalid("count", "1 <= count, 2147483647 tokens in all", count));
        };
        request.known = known;
        request.computed = known - 1;
        request.given = Given::Nothing;
        let was = std::mem::replace(&mut request.state, RequestState::Decoding);
        self.eased += u64::from(was == RequestState::Prefilling);
        // The first token of each step is charged when it is planned.
        self.shares.charge(request.namespace, count as i64 - 1);
        Ok(())
    }

    pub(super) fn metrics(&self) -> SchedulerMetrics {
        let waits = self.queue.slots().filter_map(|slot| self.get(slot));
        let running = || self.running.iter().filter_map(|&slot| self.get(slot));
        let decoding = running().filter(|request| request.state == RequestState::Decoding).count();
        SchedulerMetrics {
            waiting: self.queue.len(),
            prefilling: self.running.len() - decoding,
            decoding,
            namespaces: self.shares.len(),
            oldest_wait: waits.map(|request| self.now - request.since).max().unwrap_or(0),
            longest_wait: self.longest_wait,
            total_wait: self.total_wait,
            counts: self.counts,
        }
    }
}
