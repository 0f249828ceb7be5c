//! Random events: arrivals of all kinds, cancellations at any time, answers late, in any order and
//! lost, memory that falls short of what was promised. The world checks every plan; here it is
//! driven. More than 10^5 events in all.

mod scheduler_world;

use kvweave_core::scheduler::{PrefillOrder, SchedulerConfig, StepPlan};
use proptest::prelude::*;
use scheduler_world::{Job, World, job, small};

#[derive(Clone, Debug)]
enum Event {
    Arrive {
        prompt: usize,
        limit: usize,
        priority: i32,
        namespace: u8,
        kind: u32,
        traits: u8,
    },
    Cancel {
        which: u8,
    },
    /// A plan, and the answers to it.
    Step {
        wait: u64,
    },
    /// A plan whose answers come later, after others.
    Overlap {
        wait: u64,
    },
    /// A plan of which one part is not carried out.
    Fail {
        which: u8,
        no_room: bool,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let prompt = prop_oneof![8 => 1usize..40, 2 => 40usize..110, 1 => 110usize..200];
    let arrive = (prompt, 1usize..20, -1i32..3, 0u8..3, 0u32..6, any::<u8>());
    prop_oneof![
        6 => arrive.prop_map(|(prompt, limit, priority, namespace, kind, traits)| {
            let kind = kind.saturating_sub(3);
            Event::Arrive { prompt, limit, priority, namespace, kind, traits }
        }),
        1 => any::<u8>().prop_map(|which| Event::Cancel { which }),
        10 => (0u64..3000).prop_map(|wait| Event::Step { wait }),
        2 => (0u64..3000).prop_map(|wait| Event::Overlap { wait }),
        1 => (any::<u8>(), any::<bool>())
            .prop_map(|(which, no_room)| Event::Fail { which, no_room }),
    ]
}

fn config() -> impl Strategy<Value = SchedulerConfig> {
    let order = prop_oneof![
        Just(PrefillOrder::Arrival),
        (1u64..100_000).prop_map(|doubling| PrefillOrder::ShortFirst { doubling }),
    ];
    (order, 2usize..5, 0usize..101, 0usize..3, 1usize..9, 0u64..20_000).prop_map(
        |(order, partial_prefills, lead_percent, headroom, max_running, patience)| {
            SchedulerConfig {
                order,
                partial_prefills,
                lead_percent,
                headroom,
                max_running,
                patience,
                ..small()
            }
        },
    )
}

/// Live jobs in order, by index.
fn pick(world: &World, which: u8) -> Option<u64> {
    let live = world.jobs.len().max(1);
    world.jobs.keys().nth(usize::from(which) % live).copied()
}

struct Drive {
    world: World,
    late: Vec<StepPlan>,
    numbers: u64,
    plans: Vec<StepPlan>,
}

impl Drive {
    fn answer_late(&mut self) {
        for plan in std::mem::take(&mut self.late) {
            self.world.answer(&plan);
        }
    }

    fn step(&mut self, event: &Event) {
        match *event {
            Event::Arrive { prompt, limit, priority, namespace, kind, traits } => {
                let whole = traits.is_multiple_of(7);
                let cached = if traits.is_multiple_of(3) { prompt / 2 } else { 0 };
                let namespace = format!("tenant {namespace}");
                let arriving =
                    Job { priority, kind, whole, namespace, cached, ..job(prompt, limit) };
                self.numbers += 1;
                self.world.arrive(self.numbers, arriving);
            }
            Event::Cancel { which } => {
                if let Some(id) = pick(&self.world, which) {
                    self.world.cancel(id);
                }
            }
            Event::Step { wait } => {
                let plan = self.world.plan();
                self.world.now += wait;
                self.world.answer(&plan);
                self.answer_late();
                self.plans.push(plan);
            }
            Event::Overlap { wait } => {
                let plan = self.world.plan();
                self.world.now += wait;
                self.late.push(plan.clone());
                self.plans.push(plan);
            }
            Event::Fail { which, no_room } => self.fail(which, no_room),
        }
    }

    /// One request of a plan cannot be computed, and says so.
    fn fail(&mut self, which: u8, no_room: bool) {
        let mut plan = self.world.plan();
        let chunks = plan.prefill.len();
        let parts = plan.decode.len() + chunks;
        if parts > 0 {
            let at = usize::from(which) % parts;
            let (id, stored) = if at < chunks {
                let chunk = plan.prefill.remove(at);
                (chunk.request, if no_room { None } else { Some(chunk.first) })
            } else {
                let id = plan.decode.remove(at - chunks);
                (id, Some(self.world.jobs[&id.0].known() - 1))
            };
            assert!(self.world.scheduler.not_done(id, no_room).unwrap());
            assert!(self.world.scheduler.not_done(id, no_room).is_err());
            if let Some(job) = self.world.jobs.get_mut(&id.0) {
                job.stored = stored;
                job.asked = false;
            }
        }
        self.world.answer(&plan);
    }
}

fn run(config: SchedulerConfig, pages: usize, events: &[Event]) -> Vec<StepPlan> {
    let world = World::new(config, pages);
    let mut drive = Drive { world, late: Vec::new(), numbers: 0, plans: Vec::new() };
    events.iter().for_each(|event| drive.step(event));
    drive.answer_late();
    drive.world.drain();
    drive.plans
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// 600 cases of 250 events on average.
    #[test]
    fn every_plan_keeps_the_rules_and_everybody_ends(
        config in config(),
        pages in 12usize..60,
        events in proptest::collection::vec(event(), 100..400),
    ) {
        run(config, pages, &events);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn the_same_events_give_the_same_plans(
        config in config(),
        pages in 12usize..60,
        events in proptest::collection::vec(event(), 50..200),
    ) {
        prop_assert_eq!(run(config, pages, &events), run(config, pages, &events));
    }
}
