//! Prompts that find no room which they were promised.

mod scheduler_world;

use kvweave_core::scheduler::{RequestId, RequestState, StepPlan};
use scheduler_world::{Job, World, job, small};

fn ids(plan: &StepPlan) -> Vec<u64> {
    plan.admitted.iter().map(|admitted| admitted.request.0).collect()
}

fn step(world: &mut World) -> StepPlan {
    let plan = world.plan();
    world.now += 1000;
    world.answer(&plan);
    plan
}

/// A prompt that is computed whole took every step's tokens, found no room for what others in
/// mid-way held, and was first again: none of them came any further.
#[test]
fn who_finds_no_room_lets_those_in_mid_way_go_on() {
    let mut world = World::new(small(), 200);
    let whole = RequestId(1);
    world.arrive(1, Job { whole: true, ..job(60, 4) });
    assert!(world.arrive(2, job(80, 4)));
    let plan = world.plan();
    assert_eq!(ids(&plan), [1, 2]);
    assert_eq!(plan.prefill.iter().map(|chunk| chunk.request).collect::<Vec<_>>(), [whole]);
    assert!(world.scheduler.not_done(whole, true).unwrap());
    let job = world.jobs.get_mut(&1).unwrap();
    (job.stored, job.asked) = (None, false);
    let mut steps = 0;
    while world.scheduler.state(RequestId(2)) == Some(RequestState::Prefilling) {
        let plan = step(&mut world);
        assert!(ids(&plan).is_empty(), "it waits until the other is done with its prompt");
        assert_eq!(plan.blocked.map(|(request, _)| request), Some(whole));
        steps += 1;
    }
    assert_eq!(steps, 5);
    assert_eq!(ids(&step(&mut world)), [1]);
    assert_eq!(world.scheduler.metrics().counts.preempted, 0, "nobody made room for it");
    world.drain();
}

/// Where nobody else runs there is nobody to wait for.
#[test]
fn who_finds_no_room_alone_is_tried_again() {
    let mut world = World::new(small(), 200);
    assert!(world.arrive(1, job(8, 2)));
    world.plan();
    assert!(world.scheduler.not_done(RequestId(1), true).unwrap());
    let job = world.jobs.get_mut(&1).unwrap();
    (job.stored, job.asked) = (None, false);
    assert_eq!(ids(&step(&mut world)), [1]);
    world.drain();
}

#[test]
fn who_finds_no_room_is_next_when_the_other_is_cancelled() {
    let mut world = World::new(small(), 200);
    world.arrive(1, Job { whole: true, ..job(60, 4) });
    world.arrive(2, job(80, 4));
    world.plan();
    assert!(world.scheduler.not_done(RequestId(1), true).unwrap());
    let job = world.jobs.get_mut(&1).unwrap();
    (job.stored, job.asked) = (None, false);
    assert!(ids(&step(&mut world)).is_empty());
    world.cancel(2);
    assert_eq!(ids(&step(&mut world)), [1]);
    world.drain();
}

#[test]
fn nobody_gives_way_to_who_finds_no_room_whatever_the_priorities() {
    let mut world = World::new(small(), 200);
    world.arrive(2, job(8, 40));
    assert_eq!(ids(&step(&mut world)), [2]);
    world.arrive(1, Job { priority: 1, ..job(60, 4) });
    let plan = world.plan();
    assert_eq!((ids(&plan), plan.decode), (vec![1], vec![RequestId(2)]));
    world.answer_one(2);
    assert!(world.scheduler.not_done(RequestId(1), true).unwrap());
    let job = world.jobs.get_mut(&1).unwrap();
    (job.stored, job.asked) = (None, false);
    let plan = step(&mut world);
    assert!(plan.preempted.is_empty());
    assert_eq!((ids(&plan), plan.decode), (vec![], vec![RequestId(2)]));
    world.drain();
}
