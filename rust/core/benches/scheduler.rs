//! What a plan costs, with 256 requests that decode and others that come and go.
//!
//! Elements are plans. Each case first checks that the answer is right.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvweave_core::scheduler::{
    Arrival, BlockLedger, RequestId, Scheduler, SchedulerConfig, StepPlan,
};

const PAGE: usize = 16;

/// Blocks that no run uses up, however many steps the machine does in its time.
const ENOUGH: usize = i32::MAX as usize;
const TENANTS: [&str; 4] = ["a", "b", "c", "d"];

fn scheduler(running: usize, pages: usize) -> Scheduler<BlockLedger> {
    let config = SchedulerConfig { max_running: running.max(8), ..SchedulerConfig::default() };
    let ledger = BlockLedger::new(pages, PAGE, config.chunk_tokens, &[]).unwrap();
    Scheduler::new(config, ledger).unwrap()
}

fn arrive(scheduler: &mut Scheduler<BlockLedger>, id: usize, tokens: usize) {
    let namespace = TENANTS[id % TENANTS.len()];
    let arrival = Arrival { namespace, ..Arrival::new(RequestId(id as u64), tokens) };
    scheduler.arrive(0, &arrival).unwrap();
}

fn answer(scheduler: &mut Scheduler<BlockLedger>, plan: &StepPlan) {
    for &request in &plan.decode {
        scheduler.produced(request, 1).unwrap();
    }
    for chunk in plan.prefill.iter().filter(|chunk| chunk.last) {
        scheduler.produced(chunk.request, 1).unwrap();
    }
}

/// `running` requests of 1000 tokens that decode.
fn decoding(running: usize, pages: usize) -> Scheduler<BlockLedger> {
    let mut scheduler = scheduler(running, pages);
    (0..running).for_each(|id| arrive(&mut scheduler, id, 1000));
    while scheduler.metrics().decoding < running {
        let plan = scheduler.plan(0).unwrap();
        answer(&mut scheduler, &plan);
    }
    scheduler
}

fn plan(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    group.throughput(Throughput::Elements(1));
    for running in [1, 32, 256] {
        let mut steady = decoding(running, ENOUGH);
        group.bench_function(BenchmarkId::new("decode", running), |b| {
            b.iter_custom(|plans| {
                let mut spent = std::time::Duration::ZERO;
                for _ in 0..plans {
                    let start = std::time::Instant::now();
                    let plan = black_box(steady.plan(0).unwrap());
                    spent += start.elapsed();
                    assert_eq!(plan.decode.len(), running);
                    answer(&mut steady, &plan);
                }
                spent
            });
        });
    }
    group.finish();
}

/// The same with the answers to it, and with a queue: one ends and one comes in each step.
fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan_and_answers");
    group.throughput(Throughput::Elements(1));
    let mut steady = decoding(256, ENOUGH);
    group.bench_function("decode/256", |b| {
        b.iter(|| {
            let plan = steady.plan(0).unwrap();
            answer(&mut steady, &plan);
        });
    });
    let mut busy = decoding(256, ENOUGH);
    (256..1256).for_each(|id| arrive(&mut busy, id, 1000));
    let mut next = 1256;
    group.bench_function("one_leaves_one_joins/256_of_1256", |b| {
        b.iter(|| {
            let plan = busy.plan(0).unwrap();
            answer(&mut busy, &plan);
            assert!(plan.decode.len() + plan.prefill.len() >= 255);
            if let Some(&oldest) = plan.decode.first() {
                busy.finish(oldest);
                arrive(&mut busy, next, 1000);
                next += 1;
            }
        });
    });
    // Little room: for what is said until the last prompt is read, and nobody of those who wait.
    let mut full = decoding(255, 255 * 66);
    (255..1255).for_each(|id| arrive(&mut full, id, 20_000));
    group.bench_function("no_room/255_of_1255", |b| {
        b.iter(|| {
            let plan = full.plan(0).unwrap();
            for &request in &plan.decode {
                full.not_done(request, false).unwrap();
            }
            assert_eq!((plan.decode.len(), plan.admitted.len()), (255, 0));
        });
    });
    group.finish();
}

criterion_group!(benches, plan, step);
criterion_main!(benches);
