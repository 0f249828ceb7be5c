//! Real traces through the scheduler, in virtual time. Figures are of the cost model in
//! `trace_replay/cost.rs`: what they show is order, not what a GPU would measure.
//!
//! `cargo test --test scheduler_replay -- --nocapture` prints the table.

mod trace_replay;

use std::time::Instant;

use kvweave_core::scheduler::{PrefillOrder, SchedulerConfig};
use trace_replay::{Outcome, Request, Setting, StepCost, read, replay};

fn setting(speed: f64) -> Setting {
    Setting {
        config: SchedulerConfig {
            token_budget: 2048,
            chunk_tokens: 2048,
            ..SchedulerConfig::default()
        },
        pages: StepCost::H200_8B_PAGES,
        cost: StepCost::H200_8B,
        speed,
        reuse: true,
    }
}

fn show(name: &str, outcome: &Outcome) {
    let Outcome { requests, seconds, said, cached, first_token, between_tokens, metrics } = outcome;
    let counts = metrics.counts;
    println!(
        "{name:<34} {requests:>6} requests {seconds:>6.0} s | {:>5.2} req/s {:>5.0} tok/s out | \
         first token p50 {:>7.2} p99 {:>7.1} s | between p50 {:>4.0} p99 {:>5.0} ms | cached \
         {:>5.1} M of {:>5.1} M | {} preempted, {} overtook, {} steps",
        *requests as f64 / seconds,
        *said as f64 / seconds,
        first_token.p50,
        first_token.p99,
        between_tokens.p50 * 1e3,
        between_tokens.p99 * 1e3,
        *cached as f64 / 1e6,
        (*cached as u64 + counts.prefill_tokens) as f64 / 1e6,
        counts.preempted,
        counts.overtakes,
        counts.steps,
    );
}

fn shown(name: &str, trace: &[Request], setting: Setting) -> Outcome {
    let started = Instant::now();
    let outcome = replay(trace, setting);
    show(name, &outcome);
    println!("{name}: replayed in {:.3} s", started.elapsed().as_secs_f64());
    outcome
}

/// 100 requests of 10K to 30K tokens, 500 tokens out, all at once: vLLM 0.26.0 took 105 s on the
/// machine whose single steps the model was fitted to, which nothing was fitted to.
#[test]
fn the_cost_model_says_what_was_measured() {
    let input = |at: usize| 10_000 + at * 20_000 / 99 + 410;
    let request = |at| Request { millis: 0, input: input(at), output: 500, blocks: Vec::new() };
    let trace: Vec<Request> = (0..100).map(|at| request(at * 37 % 100)).collect();
    let total: usize = trace.iter().map(|request| request.input).sum();
    assert_eq!(total / 10_000, 204, "2.04 M tokens");
    let mut large = setting(1.0);
    large.config.token_budget = 16_384;
    large.config.chunk_tokens = 16_384;
    let outcome = shown("100 × 10–30K at once", &trace, large);
    assert!((outcome.seconds / 105.0 - 1.0).abs() < 0.1, "{outcome:?}");
}

/// One hour of production at 0.4 of its speed: at its own it is more than one such GPU computes.
#[test]
fn the_whole_conversation_is_replayed() {
    let trace = read("mooncake_conversation");
    assert_eq!(trace.len(), 12_031);
    let outcome = shown("conversation, all of it", &trace, setting(0.4));
    assert_eq!(outcome.said, 4_122_048);
    assert!(outcome.cached > 0);
    assert_eq!(outcome.metrics.counts.finished, 12_031);
    assert_eq!(outcome.metrics.waiting, 0);
}

#[test]
fn chunks_keep_the_time_between_tokens_short() {
    let trace = &read("mooncake_conversation")[..1500];
    let chunked = shown("conversation, chunks of 2K", trace, setting(0.4));
    let mut large = setting(0.4);
    large.config.token_budget = 131_072;
    large.config.chunk_tokens = 131_072;
    let whole = shown("conversation, no chunks", trace, large);
    assert!(chunked.between_tokens.p99 < whole.between_tokens.p99 / 2.0);
    assert_eq!(chunked.said, whole.said);
}

#[test]
fn short_prompts_first_are_answered_sooner_and_nobody_starves() {
    let trace = &read("mooncake_conversation")[..1500];
    let by_arrival = shown("conversation, by arrival", trace, setting(0.9));
    let mut short_first = setting(0.9);
    short_first.config.order = PrefillOrder::ShortFirst { doubling: 10_000_000_000 };
    let short_first = shown("conversation, short first", trace, short_first);
    assert!(short_first.first_token.p50 < by_arrival.first_token.p50);
    assert!(short_first.first_token.mean < by_arrival.first_token.mean);
}

#[test]
fn prefixes_that_are_found_again_are_not_computed() {
    let trace = &read("mooncake_synthetic")[..1000];
    let found = shown("synthetic, prefixes found", trace, setting(1.0));
    let nothing = Setting { reuse: false, ..setting(1.0) };
    let nothing = shown("synthetic, nothing found", trace, nothing);
    let computed = |outcome: &Outcome| outcome.metrics.counts.prefill_tokens;
    assert!(computed(&found) < computed(&nothing));
    assert!(found.first_token.mean < nothing.first_token.mean);
}

#[test]
fn little_room_preempts_and_loses_nothing() {
    let trace = &read("azure_conv")[..3000];
    let plenty = shown("chat, plenty of room", trace, setting(8.0));
    let mut scarce = setting(8.0);
    scarce.pages = 4000;
    let scarce = shown("chat, little room", trace, scarce);
    assert_eq!(plenty.metrics.counts.preempted, 0);
    assert!(scarce.metrics.counts.preempted > 0);
    assert_eq!(plenty.said, scarce.said);
    let again = shown("code", &read("azure_code"), setting(2.0));
    assert_eq!(again, replay(&read("azure_code"), setting(2.0)), "the same every time");
}
