//! Traces replayed in virtual time: the scheduler's plans, carried out by a clock.

mod cost;
mod prefix_room;
mod trace;

use kvweave_core::scheduler::{
    Arrival, RequestId, Scheduler, SchedulerConfig, SchedulerMetrics, StepPlan,
};

pub use cost::StepCost;
pub use prefix_room::PrefixRoom;
pub use trace::{Request, read};

const NANOS: f64 = 1e9;

/// How requests come and what computes them.
#[derive(Clone, Copy)]
pub struct Setting {
    pub config: SchedulerConfig,
    pub pages: usize,
    pub cost: StepCost,
    /// Arrivals come this many times as fast as in the trace.
    pub speed: f64,
    /// Whether blocks of an earlier request are found again.
    pub reuse: bool,
}

/// What came of it. Times are seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub requests: usize,
    pub seconds: f64,
    pub said: usize,
    pub cached: usize,
    pub first_token: Times,
    pub between_tokens: Times,
    pub metrics: SchedulerMetrics,
}

/// Median, 99th percentile and mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    pub p50: f64,
    pub p99: f64,
    pub mean: f64,
}

impl Times {
    fn of(mut nanos: Vec<u64>) -> Times {
        if nanos.is_empty() {
            return Times { p50: 0.0, p99: 0.0, mean: 0.0 };
        }
        let mean = nanos.iter().sum::<u64>() as f64 / nanos.len() as f64 / NANOS;
        let mut at = |percent: usize| {
            let place = (nanos.len() - 1) * percent / 100;
            *nanos.select_nth_unstable(place).1 as f64 / NANOS
        };
        Times { p50: at(50), p99: at(99), mean }
    }
}

/// One request on its way.
#[derive(Clone, Copy, Default)]
struct Progress {
    arrived: u64,
    /// Tokens computed, checked against every plan.
    computed: usize,
    said: usize,
    spoke: u64,
}

struct Replay<'a> {
    trace: &'a [Request],
    setting: Setting,
    scheduler: Scheduler<PrefixRoom<'a>>,
    progress: Vec<Progress>,
    now: u64,
    /// Who comes next.
    next: usize,
    live: usize,
    first_token: Vec<u64>,
    between_tokens: Vec<u64>,
    said: usize,
    refused: usize,
}

/// Replays a trace to its end.
pub fn replay(trace: &[Request], setting: Setting) -> Outcome {
    let room = PrefixRoom::new(trace, setting.pages, setting.reuse);
    let mut replay = Replay {
        trace,
        setting,
        scheduler: Scheduler::new(setting.config, room).unwrap(),
        progress: vec![Progress::default(); trace.len()],
        now: 0,
        next: 0,
        live: 0,
        first_token: Vec::with_capacity(trace.len()),
        between_tokens: Vec::new(),
        said: 0,
        refused: 0,
    };
    while replay.step() {}
    let wanted: usize = trace.iter().map(|request| request.output).sum();
    assert_eq!(replay.refused, 0, "every request of a trace fits the pool");
    assert_eq!(replay.said, wanted, "every token once");
    replay.scheduler.room().check(0);
    let metrics = replay.scheduler.metrics();
    Outcome {
        requests: trace.len(),
        seconds: replay.now as f64 / NANOS,
        said: replay.said,
        cached: metrics.counts.cached_tokens as usize,
        first_token: Times::of(replay.first_token),
        between_tokens: Times::of(replay.between_tokens),
        metrics,
    }
}

impl Replay<'_> {
    /// When a request comes.
    fn arrival(&self, at: usize) -> u64 {
        (self.trace[at].millis as f64 * 1e6 / self.setting.speed) as u64
    }

    /// Those who have come, one plan, and the time that it takes. Whether there is more to do.
    fn step(&mut self) -> bool {
        while self.next < self.trace.len() && self.arrival(self.next) <= self.now {
            self.arrive();
        }
        let plan = self.scheduler.plan(self.now).unwrap();
        if plan.is_idle() {
            assert!(plan.preempted.is_empty());
            if self.next == self.trace.len() {
                assert_eq!(self.live, 0, "deadlock: {:?}", self.scheduler.metrics());
                return false;
            }
            self.now = self.arrival(self.next);
            return true;
        }
        self.carry_out(&plan);
        true
    }

    fn arrive(&mut self) {
        let request = &self.trace[self.next];
        let (id, arrived) = (RequestId(self.next as u64), self.arrival(self.next));
        let cached = self.scheduler.room().cached(self.next);
        let arrival = Arrival { cached, ..Arrival::new(id, request.input) };
        let outcome = self.scheduler.arrive(self.now, &arrival);
        self.refused += usize::from(outcome.is_err());
        self.live += usize::from(outcome.is_ok());
        self.progress[self.next].arrived = arrived;
        self.next += 1;
    }

    fn carry_out(&mut self, plan: &StepPlan) {
        assert!(plan.tokens() <= self.setting.config.token_budget);
        for preempted in &plan.preempted {
            self.progress[preempted.request.0 as usize].computed = 0;
        }
        for admitted in &plan.admitted {
            self.progress[admitted.request.0 as usize].computed = admitted.cached;
        }
        let (mut read, mut pairs, mut fresh) = (0, 0, 0);
        for chunk in &plan.prefill {
            let progress = &mut self.progress[chunk.request.0 as usize];
            assert_eq!(progress.computed, chunk.first);
            progress.computed += chunk.count;
            fresh += chunk.count;
            pairs += chunk.count * (2 * chunk.first + chunk.count + 1) / 2;
        }
        for &id in &plan.decode {
            let progress = &mut self.progress[id.0 as usize];
            progress.computed += 1;
            read += progress.computed;
            let known = self.trace[id.0 as usize].input + progress.said;
            assert_eq!(progress.computed, known);
        }
        self.now += self.setting.cost.nanos(fresh, pairs, read);
        for chunk in &plan.prefill {
            let computed = self.progress[chunk.request.0 as usize].computed;
            self.scheduler.room_mut().commit(chunk.request, computed);
            if chunk.last {
                self.say(chunk.request);
            }
        }
        plan.decode.iter().for_each(|&id| self.say(id));
    }

    fn say(&mut self, id: RequestId) {
        let request = &self.trace[id.0 as usize];
        let progress = &mut self.progress[id.0 as usize];
        match progress.said {
            0 => self.first_token.push(self.now - progress.arrived),
            _ => self.between_tokens.push(self.now - progress.spoke),
        }
        (progress.said, progress.spoke) = (progress.said + 1, self.now);
        self.said += 1;
        self.scheduler.produced(id, 1).unwrap();
        if progress.said == request.output {
            assert!(self.scheduler.finish(id));
            self.live -= 1;
        }
    }
}
