//! The rules one by one: each is a mistake that a serving engine has made.

mod scheduler_world;

use kvweave_core::heads::LocalWindow;
use kvweave_core::scheduler::{
    Arrival, BlockLedger, LedgerGroup, PrefillOrder, Refusal, RequestId, RequestState, Room,
    Scheduler, SchedulerConfig, StepPlan,
};
use kvweave_core::{Error, ErrorKind};
use scheduler_world::{Job, World, job, small};

fn ids(plan: &StepPlan) -> Vec<u64> {
    plan.admitted.iter().map(|admitted| admitted.request.0).collect()
}

fn simple(world: &mut World, id: u64, prompt: usize, limit: usize) -> bool {
    world.arrive(id, job(prompt, limit))
}

fn step(world: &mut World) -> StepPlan {
    let plan = world.plan();
    world.now += 1000;
    world.answer(&plan);
    plan
}

fn counts(world: &World) -> kvweave_core::scheduler::Counts {
    world.scheduler.metrics().counts
}

/// Buckets of unlike requests evicted one another, and every prompt was computed for ever.
#[test]
fn who_cannot_share_a_step_waits_and_evicts_nobody() {
    let mut world = World::new(small(), 200);
    for id in 0..6 {
        world.arrive(id, Job { kind: id as u32 % 3, ..job(20, 30) });
    }
    let mut steps = Vec::new();
    while !world.jobs.is_empty() {
        steps.push(step(&mut world).kind);
    }
    assert_eq!(counts(&world).preempted, 0);
    assert_eq!(counts(&world).prefill_tokens, 6 * 20, "each prompt once");
    let patience = small().kind_patience as usize;
    for kind in 0..3 {
        let turns: Vec<usize> = (0..steps.len()).filter(|&at| steps[at] == kind).collect();
        assert!(turns.windows(2).all(|pair| pair[1] - pair[0] <= patience + 3), "{turns:?}");
    }
}

/// A sort the wrong way round served the newest first and preempted the oldest.
#[test]
fn the_oldest_is_first_in_and_never_out() {
    let config = SchedulerConfig { headroom: 0, ..small() };
    let mut world = World::new(config, 12);
    (0..6).for_each(|id| assert!(simple(&mut world, id, 8, 30)));
    let mut admitted = Vec::new();
    while !world.jobs.is_empty() {
        let plan = step(&mut world);
        admitted.extend(ids(&plan));
        assert!(plan.preempted.iter().all(|preempted| preempted.request.0 != 0));
    }
    assert_eq!(admitted[..6], [0, 1, 2, 3, 4, 5]);
    assert!(counts(&world).preempted > 0);
    assert_eq!(world.done[0], 0);
}

/// A first chunk was admitted of a prompt whose rest could not fit: a storm of preemptions.
#[test]
fn a_prompt_is_admitted_with_room_for_all_of_it_or_not_at_all() {
    let mut world = World::new(small(), 30);
    simple(&mut world, 1, 60, 20);
    step(&mut world);
    simple(&mut world, 2, 80, 4);
    for _ in 0..15 {
        let plan = step(&mut world);
        assert!(plan.admitted.is_empty() && plan.preempted.is_empty());
        assert_eq!(plan.blocked.map(|(request, _)| request.0), Some(2));
    }
    world.drain();
    assert_eq!(counts(&world).preempted, 0);
    assert_eq!(world.done, [1, 2]);
}

#[test]
fn a_prompt_larger_than_the_pool_is_refused_at_once() {
    let mut world = World::new(small(), 30);
    let arrival = Arrival::new(RequestId(1), 121);
    let error = world.scheduler.arrive(0, &arrival).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolFull { needed: 31, free: 30 });
    assert_eq!(error.to_string(), "prompt: expected 31 blocks to be available, got 30");
    assert_eq!(world.scheduler.state(RequestId(1)), None);
    assert_eq!(counts(&world).refused, 1);
    world.refused.push(1);
    assert!(simple(&mut world, 2, 120, 1));
    world.drain();
    assert_eq!(world.done, [2]);
}

/// A request that outgrows an empty pool cannot go on; nobody is evicted for it.
#[test]
fn an_answer_that_outgrows_the_pool_ends_and_says_why() {
    let mut world = World::new(small(), 10);
    simple(&mut world, 1, 30, 100);
    simple(&mut world, 2, 4, 30);
    let mut refused = Vec::new();
    while !world.jobs.is_empty() {
        let plan = step(&mut world);
        refused.extend(plan.refused);
    }
    let [refused] = refused[..] else { panic!("{refused:?}") };
    assert_eq!(refused.request, RequestId(1));
    let Refusal::Outgrown(shortage) = refused.why else { panic!("{refused:?}") };
    assert_eq!((shortage.needed, shortage.free), (11, 10));
    assert_eq!(world.done, [2]);
}

/// Requests that held part of what they needed waited for one another, and the worker was idle.
#[test]
fn who_waits_holds_nothing_and_lets_pass_until_its_patience_ends() {
    let mut world = World::new(small(), 30);
    simple(&mut world, 1, 60, 40);
    step(&mut world);
    simple(&mut world, 2, 90, 1);
    let mut passed = Vec::new();
    for id in 10..40 {
        simple(&mut world, id, 4, 1);
        assert_eq!(world.scheduler.room().held(RequestId(2)), 0);
        passed.extend(ids(&step(&mut world)));
    }
    // Patience is ten steps here: so many pass, then all wait until it has had its turn.
    assert!((8..=12).contains(&passed.len()), "{passed:?}");
    assert_eq!(counts(&world).overtakes, passed.len() as u64);
    let mut order = Vec::new();
    while !world.jobs.is_empty() {
        order.extend(ids(&step(&mut world)));
    }
    assert_eq!(order[0], 2);
}

/// Preempted requests went to the back of the queue.
#[test]
fn who_was_preempted_keeps_its_place() {
    let config = SchedulerConfig { headroom: 0, ..small() };
    let mut world = World::new(config, 12);
    (0..3).for_each(|id| assert!(simple(&mut world, id, 14, 16)));
    let mut order = Vec::new();
    for id in 3..400 {
        let plan = step(&mut world);
        order.extend(plan.preempted.iter().map(|preempted| (preempted.request.0, false)));
        order.extend(ids(&plan).into_iter().map(|id| (id, true)));
        if id < 8 {
            simple(&mut world, id, 14, 2);
        }
        if world.jobs.is_empty() {
            break;
        }
    }
    let out = order.iter().position(|&(id, _)| id == 2).map(|first| &order[first..]).unwrap();
    let out = &out[out.iter().position(|entry| !entry.1).unwrap()..];
    let again = out.iter().find(|entry| entry.1 && entry.0 >= 2).unwrap();
    assert_eq!(again.0, 2, "those that came later were let in before: {order:?}");
    assert!(world.jobs.is_empty());
}

/// A waiting request of high priority looked on while one of low priority ran.
#[test]
fn a_higher_priority_takes_room_between_two_chunks() {
    let mut world = World::new(small(), 30);
    world.arrive(1, Job { priority: -1, ..job(100, 5) });
    let plan = step(&mut world);
    assert!(!plan.prefill[0].last);
    world.arrive(2, job(60, 5));
    let plan = step(&mut world);
    let preempted: Vec<(u64, u64)> =
        plan.preempted.iter().map(|p| (p.request.0, p.for_request.0)).collect();
    assert_eq!(preempted, [(1, 2)]);
    assert_eq!(ids(&plan), [2]);
    world.drain();
    assert_eq!(world.done, [2, 1]);
}

/// The same while it decodes: the token that this very plan would have given is taken back.
#[test]
fn a_higher_priority_takes_room_between_two_tokens() {
    let mut world = World::new(small(), 30);
    world.arrive(1, Job { priority: -1, ..job(30, 40) });
    (0..6).for_each(|_| drop(step(&mut world)));
    world.arrive(2, job(100, 5));
    let plan = step(&mut world);
    assert_eq!((plan.preempted.len(), plan.decode.len(), ids(&plan)), (1, 0, vec![2]));
    world.drain();
    assert_eq!(world.done, [2, 1]);
}

#[test]
fn nobody_is_preempted_by_an_equal_another_kind_or_in_vain() {
    for (priority, kind, prompt) in [(0, 0, 60), (1, 1, 60), (1, 0, 118)] {
        let mut world = World::new(small(), 30);
        simple(&mut world, 1, 80, 5);
        world.arrive(2, Job { priority: 3, ..job(12, 30) });
        step(&mut world);
        world.arrive(3, Job { priority, kind, ..job(prompt, 1) });
        let plan = step(&mut world);
        assert!(plan.preempted.is_empty() && plan.admitted.is_empty(), "{plan:?}");
        world.drain();
    }
}

/// Prompts first starved those who decode for minutes.
#[test]
fn everybody_who_decodes_says_a_token_in_every_step() {
    let mut world = World::new(small(), 2000);
    (0..4).for_each(|id| assert!(simple(&mut world, id, 4, 100)));
    while world.scheduler.metrics().decoding < 4 {
        step(&mut world);
    }
    simple(&mut world, 9, 1000, 1);
    for _ in 0..60 {
        let plan = step(&mut world);
        assert_eq!(plan.decode.len(), 4);
        assert!(plan.tokens() <= 32);
        assert_eq!(plan.prefill[0].count, 16);
    }
}

/// One prompt of 100K and more kept every other from its first token.
#[test]
fn long_prompts_leave_a_place_for_short_ones() {
    let mut world = World::new(small(), 2000);
    (0..5).for_each(|id| assert!(simple(&mut world, id, 1000, 1)));
    let plan = step(&mut world);
    assert_eq!(ids(&plan), [0, 1], "two long prompts at a time share a step");
    assert_eq!(plan.prefill.iter().map(|chunk| chunk.count).collect::<Vec<_>>(), [16, 16]);
    simple(&mut world, 9, 16, 1);
    let plan = step(&mut world);
    assert_eq!(ids(&plan), [9], "one that came last is not kept waiting by them");
    let mut steps = 1;
    while world.jobs.contains_key(&9) {
        step(&mut world);
        steps += 1;
    }
    assert!(steps <= 3);
}

/// A more urgent prompt makes others pause, which keep what they have computed.
#[test]
fn a_pause_costs_nothing_and_ends() {
    let mut world = World::new(small(), 2000);
    (0..2).for_each(|id| assert!(world.arrive(id, Job { priority: -2, ..job(200, 1) })));
    (0..3).for_each(|_| drop(step(&mut world)));
    (10..13).for_each(|id| assert!(simple(&mut world, id, 100, 1)));
    let plan = step(&mut world);
    assert_eq!(ids(&plan), [10, 11, 12]);
    assert!(plan.prefill.iter().all(|chunk| chunk.request.0 >= 10));
    world.drain();
    assert_eq!(counts(&world).preempted, 0);
    assert_eq!(counts(&world).prefill_tokens, 2 * 200 + 3 * 100);
}

#[test]
fn short_first_starves_nobody() {
    let doubling = 10_000;
    let order = PrefillOrder::ShortFirst { doubling };
    let mut world = World::new(SchedulerConfig { order, ..small() }, 2000);
    simple(&mut world, 0, 500, 1);
    (1..4).for_each(|id| assert!(simple(&mut world, id, 8, 1)));
    assert_eq!(ids(&world.plan())[0], 1, "the short ones first");
    // Work is at most n(n+1)/2 = 2^17 tokens here, that of the short ones 36: the long one is
    // passed by those that come within log2 of the ratio of both works' squares, times D.
    let mut world = World::new(SchedulerConfig { order, max_running: 1, ..small() }, 2000);
    simple(&mut world, 100, 8, 4);
    simple(&mut world, 0, 500, 1);
    let bound = (2.0 * (125_250f64 / 36.0).log2() * doubling as f64) as u64;
    let mut id = 101;
    while world.jobs[&0].stored.is_none() {
        simple(&mut world, id, 8, 1);
        id += 1;
        step(&mut world);
        assert!(world.now <= bound + 6000, "starved");
    }
    assert!(world.now > bound / 2, "the short ones were not first");
}

/// Requests waited in line behind one whose prefix was on its way.
#[test]
fn who_shares_a_prefix_is_not_kept_behind_its_first_reader() {
    let mut world = World::new(small(), 2000);
    simple(&mut world, 1, 1000, 1);
    step(&mut world);
    world.arrive(2, Job { cached: 16, ..job(1000, 1) });
    let plan = step(&mut world);
    assert_eq!(plan.admitted[0].cached, 16);
    assert!(plan.prefill.iter().any(|chunk| chunk.request.0 == 2 && chunk.first == 16));
}

/// A stream of urgent requests passes one of lower priority for ageing × difference, not longer.
#[test]
fn ageing_bounds_how_long_priorities_pass() {
    let mut world = World::new(SchedulerConfig { max_running: 1, ..small() }, 200);
    world.arrive(100, Job { priority: 2, ..job(4, 4) });
    simple(&mut world, 0, 4, 1);
    let mut id = 101;
    while world.jobs.get(&0).is_some_and(|job| job.stored.is_none()) {
        world.arrive(id, Job { priority: 2, ..job(4, 1) });
        id += 1;
        step(&mut world);
        // Those that came in the 2 × 20 µs are served before it, one a step.
        assert!(world.now <= 2 * (2 * 20_000) + 10_000, "starved");
    }
    assert!(world.now > 30_000, "the urgent ones were not first");
}

/// Tokens computed of two tenants who both always have more to do, in a hundred steps.
fn shared(weights: [u32; 2], sizes: [usize; 2]) -> [usize; 2] {
    let mut world = World::new(SchedulerConfig { max_running: 4, ..small() }, 4000);
    let names = ["many", "few"];
    for (name, weight) in names.iter().zip(weights) {
        world.scheduler.set_weight(name, weight).unwrap();
    }
    for id in 0..2000 {
        let tenant = usize::from(id % 10 == 9);
        let namespace = names[tenant].to_owned();
        world.arrive(id, Job { namespace, ..job(sizes[tenant], 2) });
    }
    let mut computed = [0, 0];
    for _ in 0..100 {
        let plan = step(&mut world);
        for id in plan.decode.iter().map(|id| id.0) {
            computed[usize::from(id % 10 == 9)] += 1;
        }
        for chunk in &plan.prefill {
            computed[usize::from(chunk.request.0 % 10 == 9)] += chunk.count;
        }
    }
    computed
}

#[test]
fn namespaces_share_by_weight_whatever_they_send() {
    for (weights, sizes) in [([1, 1], [30, 30]), ([1, 3], [30, 30]), ([1, 1], [8, 90])] {
        let [many, few] = shared(weights, sizes);
        let ratio = few as f64 / many as f64 * f64::from(weights[0]) / f64::from(weights[1]);
        assert!((0.8..1.25).contains(&ratio), "{weights:?} {sizes:?}: {many} and {few}");
    }
    let mut world = World::new(small(), 100);
    assert!(world.scheduler.set_weight("a", 0).is_err());
    for id in 0..2000 {
        world.arrive(id, Job { namespace: format!("{id}"), ..job(10, 2) });
        step(&mut world);
    }
    assert!(world.scheduler.metrics().namespaces <= world.jobs.len() + 8, "forgotten in time");
    world.drain();
}

#[test]
fn whoever_is_cancelled_gives_back_all_in_every_state() {
    let states = [RequestState::Waiting, RequestState::Prefilling, RequestState::Decoding];
    for wanted in states {
        for answered in [false, true] {
            let mut world = World::new(SchedulerConfig { max_running: 1, ..small() }, 60);
            simple(&mut world, 1, 40, 9);
            let other = if wanted == RequestState::Waiting { 2 } else { 1 };
            simple(&mut world, 2, 40, 9);
            let mut plan = world.plan();
            while world.scheduler.state(RequestId(other)) != Some(wanted) {
                world.answer(&plan);
                plan = world.plan();
            }
            if answered {
                world.answer(&plan);
            }
            world.cancel(other);
            assert_eq!(world.scheduler.room().held(RequestId(other)), 0);
            // Its token may come all the same, and is nobody's.
            if !answered {
                world.answer(&plan);
            }
            world.drain();
            assert_eq!(world.done, [3 - other]);
        }
    }
}

/// Heads that keep a window take no more for a longer prompt: they are admitted by what they hold.
#[test]
fn windows_are_admitted_by_what_they_hold() {
    let window = Some(LocalWindow { sink: 4, recent: 16 });
    let groups =
        [LedgerGroup { block_pages: 1, window: None }, LedgerGroup { block_pages: 7, window }];
    let full = [LedgerGroup { block_pages: 8, window: None }];
    let admitted = |groups: &[LedgerGroup]| {
        let ledger = BlockLedger::new(4000, 4, 16, groups).unwrap();
        let mut scheduler = Scheduler::new(small(), ledger).unwrap();
        for id in 0..8 {
            let arrival = Arrival { cached: 999, ..Arrival::new(RequestId(id), 1000) };
            scheduler.room_mut().expect(RequestId(id), 999, 0);
            scheduler.arrive(0, &arrival).unwrap();
        }
        scheduler.plan(0).unwrap().admitted.len()
    };
    assert_eq!((admitted(&full), admitted(&groups)), (1, 8));
}

fn refused<T>(outcome: Result<T, Error>, text: &str) {
    let Err(error) = outcome else { panic!("expected a refusal: {text}") };
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().starts_with(text), "{error}");
}

#[test]
fn what_cannot_be_right_is_refused_by_name() {
    let mut world = World::new(small(), 60);
    let scheduler = &mut world.scheduler;
    let arrival = Arrival::new(RequestId(1), 8);
    refused(scheduler.arrive(0, &Arrival { tokens: 0, ..arrival }), "tokens: ");
    refused(scheduler.arrive(0, &Arrival { tokens: 1 << 40, ..arrival }), "tokens: ");
    refused(scheduler.arrive(0, &Arrival { cached: 9, ..arrival }), "cached: ");
    scheduler.arrive(5, &arrival).unwrap();
    refused(scheduler.arrive(5, &arrival), "request: ");
    refused(scheduler.plan(4), "now: ");
    refused(scheduler.produced(RequestId(1), 1), "tokens of request 1: ");
    refused(scheduler.not_done(RequestId(1), false), "request 1: ");
    assert!(!scheduler.produced(RequestId(7), 1).unwrap());
    scheduler.answered(&[RequestId(7)]).unwrap();
    refused(scheduler.answered(&[RequestId(1)]), "tokens of request 1: ");
    assert!(!scheduler.finish(RequestId(7)) && !scheduler.cancel(RequestId(7)));
    scheduler.plan(5).unwrap();
    refused(scheduler.produced(RequestId(1), 0), "count: ");
    refused(scheduler.produced(RequestId(1), usize::MAX), "count: ");
    refused(scheduler.answered(&[RequestId(1), RequestId(1)]), "tokens of request 1: ");
    scheduler.answered(&[RequestId(7), RequestId(1)]).unwrap();
    for config in [
        SchedulerConfig { token_budget: 10, ..small() },
        SchedulerConfig { partial_prefills: 1, ..small() },
        SchedulerConfig { max_running: 0, ..small() },
        SchedulerConfig { max_running: usize::MAX, ..small() },
        SchedulerConfig { chunk_tokens: 3, ..small() },
        SchedulerConfig { chunk_multiple: 0, ..small() },
        SchedulerConfig { lead_percent: 101, ..small() },
        SchedulerConfig { order: PrefillOrder::ShortFirst { doubling: 0 }, ..small() },
    ] {
        let ledger = BlockLedger::new(10, 4, 16, &[]).unwrap();
        refused(Scheduler::new(config, ledger).map(|_| ()), "");
    }
    refused(BlockLedger::new(0, 4, 16, &[]), "pages: ");
    refused(BlockLedger::new(4, 4, 1 << 40, &[]), "chunk_tokens: ");
    let none = LedgerGroup { block_pages: 0, window: None };
    refused(BlockLedger::new(4, 4, 16, &[none]), "block_pages: ");
    assert!(BlockLedger::new(4, 4, 16, &[]).unwrap().fits(RequestId(1), 17).is_err());
}

/// The engine's memory may fall short of what was promised: then, and only then, somebody yields.
#[test]
fn memory_that_falls_short_makes_the_last_yield() {
    let mut world = World::new(small(), 200);
    (0..3).for_each(|id| assert!(simple(&mut world, id, 8, 20)));
    while world.scheduler.metrics().decoding < 3 {
        step(&mut world);
    }
    // Tokens of a page are had with its first: the next page is what falls short.
    let first = RequestId(0);
    let plan = loop {
        let plan = world.plan();
        if world.jobs[&0].known() % 4 == 1 {
            break plan;
        }
        world.answer(&plan);
    };
    assert!(plan.decode.contains(&first));
    assert!(world.scheduler.not_done(first, true).unwrap());
    for id in [1, 2] {
        world.answer_one(id);
    }
    let plan = world.scheduler.plan(world.now).unwrap();
    let preempted: Vec<u64> = plan.preempted.iter().map(|p| p.request.0).collect();
    assert_eq!(preempted, [2]);
    assert!(plan.decode.contains(&first));
}
