//! Who decodes in a step, and who makes room for it.

use super::books::Books;
use super::request::{Given, RequestId, RequestState};
use super::room::Room;
use super::step_plan::{Preempted, Refusal, Refused, StepPlan};

/// Every decoding request of the plan's kind gets a token, those before others first. Only where
/// one finds no room for it, the last of those who run gives its own up: perhaps that one itself.
pub(super) fn plan_decode(books: &mut Books, room: &mut impl Room, plan: &mut StepPlan) {
    let mut at = 0;
    while let Some(&slot) = books.running.get(at) {
        let step = plan.step;
        let Some(request) = books.get_mut(slot) else { break };
        let decodes = request.state == RequestState::Decoding && request.kind == plan.kind;
        if !decodes || request.given != Given::Nothing {
            at += 1;
            continue;
        }
        let (id, known, namespace) = (request.id, request.known, request.namespace);
        match room.grow(id, known) {
            Ok(()) => {
                request.given = Given::Token { step };
                books.shares.charge(namespace, 1);
                plan.decode.push(id);
                at += 1;
            }
            Err(_) if refuse_too_large(books, room, plan, (id, known)) => {}
            Err(_) if yield_last(books, room, plan, (at, id)) => {}
            Err(_) if is_any_in_flight(books, step) => at += 1,
            Err(_) => preempt(books, room, plan, (slot, id)),
        }
    }
}

/// Ends a request that, with what it has said, would not even fit into an empty room. Whether so.
pub(super) fn refuse_too_large(
    books: &mut Books,
    room: &mut impl Room,
    plan: &mut StepPlan,
    (request, known): (RequestId, usize),
) -> bool {
    let Err(shortage) = room.fits(request, known) else { return false };
    books.end(request, room);
    books.counts.refused += 1;
    plan.refused.push(Refused { request, why: Refusal::Outgrown(shortage) });
    true
}

/// The last who runs behind `at`, holds something and computes nothing gives way. Whether there
/// was one.
fn yield_last(
    books: &mut Books,
    room: &mut impl Room,
    plan: &mut StepPlan,
    (at, id): (usize, RequestId),
) -> bool {
    let behind = books.running[at + 1..].iter().rev().copied();
    let yields = |slot: &u32| {
        let request = books.get(*slot);
        request.is_some_and(|request| !request.awaits_token() && room.gain(request.id) > 0)
    };
    let Some(last) = behind.into_iter().find(yields) else { return false };
    preempt(books, room, plan, (last, id));
    true
}

/// Takes the room of a running request back.
pub(super) fn preempt(
    books: &mut Books,
    room: &mut impl Room,
    plan: &mut StepPlan,
    (slot, for_request): (u32, RequestId),
) {
    let Some(request) = books.get(slot) else { return };
    let request = request.id;
    books.step_back(slot, room);
    books.eased += 1;
    books.counts.preempted += 1;
    plan.preempted.push(Preempted { request, for_request });
}

/// Whether a token of an earlier plan is still being computed: its request may make room then.
fn is_any_in_flight(books: &Books, step: u64) -> bool {
    let slots = books.running.iter();
    slots.filter_map(|&slot| books.get(slot)).any(|request| request.in_flight_before(step))
}
