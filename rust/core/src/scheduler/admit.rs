//! Who of those that wait gets room in a step.

use super::books::Books;
use super::decode::{preempt, refuse_too_large};
use super::request::{Given, Tracked};
use super::room::{Room, Shortage};
use super::step_plan::{Admitted, StepPlan};

/// Requests that are looked at beyond the first that cannot be admitted.
const LOOKAHEAD: usize = 8;

/// What prompts in a step want together.
struct Demand {
    /// Prompts that will not be done with it.
    partial: usize,
    /// Of all prompts, those longer than one chunk.
    long: usize,
}

impl Demand {
    fn of(books: &Books, slots: &[u32], left: usize) -> Demand {
        let most = books.config.chunk_tokens;
        let remaining = || slots.iter().filter_map(|&s| books.get(s)).map(Tracked::remaining);
        let tokens: usize = remaining().map(|count| count.min(most)).sum();
        let long = remaining().filter(|&count| count > most).count();
        Demand { partial: if tokens < left { long } else { slots.len() }, long }
    }
}

/// Admits those whose turn it is, as long as the step has use for them; adds them to `slots`.
///
/// Whoever finds no room lets others pass, unless it has waited for longer than its patience.
/// Lower priorities of its kind give way to it, where that makes the room.
pub(super) fn admit_some(
    books: &mut Books,
    room: &mut impl Room,
    plan: &mut StepPlan,
    slots: &mut Vec<u32>,
    left: usize,
) {
    let mut passed = Vec::new();
    while let Some(slot) = next(books, plan.kind, &passed) {
        let Some(request) = books.get(slot) else { return };
        if !may_join(books, request, slots, left) {
            passed.push(slot);
            if passed.len() > LOOKAHEAD {
                return;
            }
            continue;
        }
        let (id, known, waited) = (request.id, request.known, books.now - request.since);
        match take_room(books, room, plan, slots, slot) {
            Ok(cached) => {
                books.admit(slot, cached);
                let cached = books.get(slot).map_or(0, |request| request.computed);
                plan.admitted.push(Admitted { request: id, known, cached });
                books.counts.overtakes += u64::from(plan.blocked.is_some());
                slots.push(slot);
            }
            Err(_) if refuse_too_large(books, room, plan, (id, known)) => {}
            Err(shortage) => {
                plan.blocked.get_or_insert((id, shortage));
                passed.push(slot);
                if waited > books.config.patience || passed.len() > LOOKAHEAD {
                    return;
                }
            }
        }
    }
}

/// The first in line of those whose namespace has credit. When nobody who waits has any, a round
/// begins; when all who have some were passed, the others may go, for the step has use for them.
fn next(books: &mut Books, kind: u32, passed: &[u32]) -> Option<u32> {
    let Books { queue, shares, .. } = books;
    let any_credit = queue.heads(kind, &[]).any(|(namespace, _)| shares.has_credit(namespace));
    if !any_credit {
        shares.next_rounds(queue.heads(kind, &[]).map(|(namespace, _)| namespace));
    }
    let heads = queue.heads(kind, passed);
    let first = heads.map(|(namespace, place)| (!shares.has_credit(namespace), place)).min();
    first.map(|(_, (_, _, slot))| slot)
}

/// Whether a step with these prompts has a place for another.
fn may_join(books: &Books, request: &Tracked, slots: &[u32], left: usize) -> bool {
    let config = &books.config;
    let demand = Demand::of(books, slots, left);
    let before = |other: &Tracked| other.priority < request.priority && other.rank > request.rank;
    if slots.iter().filter_map(|&slot| books.get(slot)).any(before) {
        return true;
    }
    let expected = request.known - request.cached.min(request.known - 1);
    let long = expected > config.chunk_tokens;
    demand.partial < config.partial_prefills
        && !(long && demand.long + 1 >= config.partial_prefills)
}

/// Room for a waiting request: free, or that of lower priorities.
fn take_room(
    books: &mut Books,
    room: &mut impl Room,
    plan: &mut StepPlan,
    slots: &mut Vec<u32>,
    slot: u32,
) -> Result<usize, Shortage> {
    let Some(request) = books.get(slot) else { return Ok(0) };
    let (id, known) = (request.id, request.known);
    // Nobody gives way to it: it is not known whose room it lacks, and by the books there is
    // enough, so who gave way would be admitted again in this very plan.
    if books.waits_for_others(request) {
        return Err(Shortage::new(1, 0));
    }
    let full = books.running.len() >= books.config.max_running;
    if full && lower(books, request, plan.step).next().is_none() {
        return Err(Shortage::new(1, 0));
    }
    let spare = books.config.headroom * books.running.len();
    let mut outcome = room.admit(id, known, spare);
    let lower = || lower(books, request, plan.step);
    let victims: Vec<u32> = match outcome {
        Ok(_) if full => lower().take(1).collect(),
        Ok(_) => Vec::new(),
        Err(shortage) => sufficing(books, room, lower(), shortage),
    };
    for victim in victims {
        take_back(books, plan, victim);
        preempt(books, room, plan, (victim, id));
        slots.retain(|&other| other != victim);
    }
    if outcome.is_err() && !plan.preempted.is_empty() {
        outcome = room.admit(id, known, books.config.headroom * books.running.len());
    }
    outcome
}

/// Running requests of lower priority and the same kind, the last first. What earlier plans gave
/// must be answered before, and what this one admitted stays.
fn lower<'a>(books: &'a Books, request: &'a Tracked, step: u64) -> impl Iterator<Item = u32> + 'a {
    let gives_way = move |slot: &u32| {
        let other = books.get(*slot);
        other.is_some_and(|other| {
            other.priority < request.priority
                && other.kind == request.kind
                && !other.in_flight_before(step)
                && other.admitted < step
        })
    };
    // Whoever runs stands in the order of keys: those with a greater one are few or none.
    let behind = |slot: &u32| books.get(*slot).is_some_and(|other| other.key > request.key);
    let last_first = books.running.iter().rev().copied();
    last_first.take_while(behind).filter(gives_way)
}

/// The first of these whose room makes up for what is missing; none if all of it would not.
fn sufficing(
    books: &Books,
    room: &impl Room,
    lower: impl Iterator<Item = u32>,
    shortage: Shortage,
) -> Vec<u32> {
    if shortage.at_home {
        return Vec::new();
    }
    let mut missing = shortage.missing();
    let mut victims = Vec::new();
    for slot in lower {
        let gain = books.get(slot).map_or(0, |other| room.gain(other.id));
        if gain > 0 {
            victims.push(slot);
            missing = missing.saturating_sub(gain);
        }
        if missing == 0 {
            return victims;
        }
    }
    Vec::new()
}

/// Takes a token out of the plan again that this very plan gave.
fn take_back(books: &mut Books, plan: &mut StepPlan, slot: u32) {
    let Some(request) = books.get(slot) else { return };
    let (id, namespace) = (request.id, request.namespace);
    if matches!(request.given, Given::Token { step } if step == plan.step) {
        plan.decode.retain(|&other| other != id);
        books.shares.charge(namespace, -1);
    }
}
