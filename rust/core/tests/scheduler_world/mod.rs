//! An engine of no cost that carries plans out and holds every one of them to the rules.

use std::collections::{BTreeMap, BTreeSet};

use kvweave_core::scheduler::{
    Arrival, BlockLedger, RequestId, RequestState, Room, Scheduler, SchedulerConfig, StepPlan,
};

/// A request as the engine knows it, counted independently of the scheduler.
#[derive(Clone, Debug)]
pub struct Job {
    pub priority: i32,
    pub kind: u32,
    pub whole: bool,
    pub namespace: String,
    pub arrived: u64,
    /// How many came before.
    pub order: usize,
    pub prompt: usize,
    /// Tokens that it will say.
    pub limit: usize,
    pub said: usize,
    /// Tokens whose KV is stored; `None` while it holds nothing.
    pub stored: Option<usize>,
    pub cached: usize,
    /// Whether a token is being computed for it.
    pub asked: bool,
}

impl Job {
    pub fn known(&self) -> usize {
        self.prompt + self.said
    }
}

pub struct World {
    pub scheduler: Scheduler<BlockLedger>,
    pub jobs: BTreeMap<u64, Job>,
    pub arrived: usize,
    pub now: u64,
    pub done: Vec<u64>,
    pub refused: Vec<u64>,
}

impl World {
    pub fn new(config: SchedulerConfig, pages: usize) -> World {
        let ledger = BlockLedger::new(pages, 4, config.chunk_tokens, &[]).unwrap();
        let scheduler = Scheduler::new(config, ledger).unwrap();
        let (jobs, done, refused) = (BTreeMap::new(), Vec::new(), Vec::new());
        World { scheduler, jobs, arrived: 0, now: 0, done, refused }
    }

    /// A job arrives; `false` for one that the empty room could not hold, at once.
    pub fn arrive(&mut self, id: u64, job: Job) -> bool {
        let arrival = Arrival {
            request: RequestId(id),
            tokens: job.prompt,
            cached: job.cached,
            priority: job.priority,
            namespace: &job.namespace,
            kind: job.kind,
            whole: job.whole,
        };
        self.scheduler.room_mut().expect(RequestId(id), job.cached, 0);
        let outcome = self.scheduler.arrive(self.now, &arrival);
        let fits = job.prompt.div_ceil(4) <= self.scheduler.room().total();
        assert_eq!(outcome.is_ok(), fits, "{outcome:?}");
        if !fits {
            self.scheduler.room_mut().release(RequestId(id));
            self.refused.push(id);
            return false;
        }
        let (order, arrived) = (self.arrived, self.now);
        self.arrived += 1;
        self.jobs.insert(id, Job { order, arrived, ..job });
        true
    }

    pub fn cancel(&mut self, id: u64) {
        let live = self.jobs.remove(&id).is_some();
        assert_eq!(self.scheduler.cancel(RequestId(id)), live);
        assert_eq!(self.scheduler.state(RequestId(id)), None);
        self.check_room();
    }

    /// A plan, of which every part is checked and begun.
    pub fn plan(&mut self) -> StepPlan {
        let mut before = self.jobs.clone();
        let plan = self.scheduler.plan(self.now).unwrap();
        for refused in &plan.refused {
            let gone = self.jobs.remove(&refused.request.0).unwrap();
            assert!(gone.known().div_ceil(4) > self.scheduler.room().total());
            self.refused.push(refused.request.0);
        }
        self.check_preemptions(&plan, &mut before);
        for admitted in &plan.admitted {
            let job = self.jobs.get_mut(&admitted.request.0).unwrap();
            assert_eq!(job.stored, None, "admitted twice");
            assert_eq!(admitted.known, job.known());
            assert!(admitted.cached < admitted.known);
            job.stored = Some(admitted.cached);
        }
        self.begin_decode(&plan);
        self.begin_prefill(&plan);
        self.check_room();
        plan
    }

    /// Room is taken from the last by key, for somebody who stands before it.
    fn check_preemptions(&mut self, plan: &StepPlan, before: &mut BTreeMap<u64, Job>) {
        let ageing = self.scheduler.config().ageing as i64;
        let key = |job: &Job| (job.arrived as i64 - i64::from(job.priority) * ageing, job.order);
        for preempted in &plan.preempted {
            let (id, cause) = (preempted.request.0, preempted.for_request.0);
            let held = |id: u64| before[&id].stored.is_some();
            let (job, other) = (&before[&id], &before[&cause]);
            assert!(held(id) && !job.asked, "{preempted:?} of {job:?} in {plan:?}");
            assert!(id == cause || key(other) < key(job), "room was taken from one before");
            if held(cause) {
                let decodes = other.stored == Some(other.known() - 1);
                assert!(decodes, "a prompt has its room from the start");
            } else {
                assert!(other.priority > job.priority && other.kind == job.kind);
            }
            if job.priority == other.priority {
                let oldest = before.values().filter(|j| j.stored.is_some() && !j.asked);
                let equals = oldest.filter(|j| j.priority == job.priority);
                let count = equals.clone().count();
                let first = equals.map(|j| j.order).min();
                assert!(count == 1 || first != Some(job.order), "the oldest of its equals");
            }
            for jobs in [&mut *before, &mut self.jobs] {
                jobs.get_mut(&id).unwrap().stored = None;
            }
        }
    }

    fn begin_decode(&mut self, plan: &StepPlan) {
        let distinct: BTreeSet<u64> = plan.decode.iter().map(|id| id.0).collect();
        assert_eq!(distinct.len(), plan.decode.len(), "a token twice");
        for id in distinct {
            let job = self.jobs.get_mut(&id).unwrap();
            assert!(!job.asked);
            assert_eq!(job.kind, plan.kind);
            assert_eq!(job.stored, Some(job.known() - 1), "one token behind");
            job.stored = Some(job.known());
            job.asked = true;
        }
    }

    fn begin_prefill(&mut self, plan: &StepPlan) {
        let config = *self.scheduler.config();
        let mut cut = 0;
        let mut whole = false;
        for chunk in &plan.prefill {
            let job = self.jobs.get_mut(&chunk.request.0).unwrap();
            assert!(!job.asked && chunk.count > 0);
            assert_eq!(job.kind, plan.kind);
            assert_eq!(job.stored, Some(chunk.first), "a token lost or computed twice");
            let end = chunk.first + chunk.count;
            assert_eq!(chunk.last, end == job.known());
            assert!(end <= job.known());
            assert!(chunk.last || !job.whole, "a whole prompt was cut");
            assert!(job.whole || chunk.count <= config.chunk_tokens);
            assert!(chunk.last || chunk.count.is_multiple_of(config.chunk_multiple));
            job.stored = Some(end);
            job.asked = chunk.last;
            cut += usize::from(!chunk.last);
            whole |= job.whole;
        }
        assert!(plan.tokens() <= config.token_budget || whole, "over budget");
        assert!(cut <= config.partial_prefills);
    }

    /// Everyone who was asked answers; who has said all is finished.
    pub fn answer(&mut self, plan: &StepPlan) {
        let last = plan.prefill.iter().filter(|chunk| chunk.last).map(|chunk| chunk.request);
        for id in plan.decode.iter().copied().chain(last) {
            self.answer_one(id.0);
        }
        self.check_room();
    }

    pub fn answer_one(&mut self, id: u64) {
        let live = self.scheduler.produced(RequestId(id), 1).unwrap();
        let Some(job) = self.jobs.get_mut(&id) else {
            assert!(!live);
            return;
        };
        assert!(live && job.asked);
        job.asked = false;
        job.said += 1;
        assert!(self.scheduler.produced(RequestId(id), 1).is_err(), "said twice");
        if job.said == job.limit {
            assert!(self.scheduler.finish(RequestId(id)));
            self.jobs.remove(&id);
            self.done.push(id);
        }
    }

    /// Who waits holds nothing, the others what their tokens take, and nothing is lost.
    pub fn check_room(&self) {
        let room = self.scheduler.room();
        let mut held = 0;
        for (&id, job) in &self.jobs {
            let (id, state) = (RequestId(id), self.scheduler.state(RequestId(id)));
            assert_eq!(state == Some(RequestState::Waiting), job.stored.is_none());
            let pages = room.held(id);
            match job.stored {
                None => assert_eq!(pages, 0, "held while waiting"),
                Some(stored) => assert!(
                    pages == stored.max(job.prompt).div_ceil(4) || {
                        pages == job.known().div_ceil(4)
                    }
                ),
            }
            held += pages;
        }
        assert_eq!(room.free() + held, room.total());
        let metrics = self.scheduler.metrics();
        assert_eq!(metrics.waiting + metrics.prefilling + metrics.decoding, self.jobs.len());
    }

    /// Plans until nobody is left. Two plans without work mean a deadlock.
    pub fn drain(&mut self) {
        let mut idle = 0;
        while !self.jobs.is_empty() {
            let plan = self.plan();
            idle = if plan.is_idle() { idle + 1 } else { 0 };
            assert!(idle < 3, "deadlock: {:?}", self.scheduler.metrics());
            self.now += 1000;
            self.answer(&plan);
        }
        let metrics = self.scheduler.metrics();
        assert_eq!(metrics.namespaces, 0);
        assert_eq!(self.scheduler.room().free(), self.scheduler.room().total());
        assert_eq!(self.scheduler.room().accounts(), 0);
        let (mut work, gain) = (self.done.len(), metrics.counts);
        work += self.refused.len() + gain.cancelled as usize;
        assert_eq!(work as u64, gain.finished + gain.refused + gain.cancelled);
        assert_eq!(self.scheduler.room().gain(RequestId(0)), 0);
    }
}

/// A job of no priority that says `limit` tokens.
pub fn job(prompt: usize, limit: usize) -> Job {
    Job {
        priority: 0,
        kind: 0,
        whole: false,
        namespace: String::new(),
        arrived: 0,
        order: 0,
        prompt,
        limit,
        said: 0,
        stored: None,
        cached: 0,
        asked: false,
    }
}

/// Small budgets, so that every limit is met.
pub fn small() -> SchedulerConfig {
    SchedulerConfig {
        token_budget: 32,
        chunk_tokens: 16,
        chunk_multiple: 4,
        max_running: 8,
        partial_prefills: 3,
        ageing: 20_000,
        patience: 10_000,
        quantum: 64,
        kind_patience: 3,
        ..SchedulerConfig::default()
    }
}
