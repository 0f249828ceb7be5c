//! Which prompts a step computes, and how they share its budget.

use super::admit::admit_some;
use super::books::Books;
use super::request::{Given, RequestState};
use super::room::Room;
use super::step_plan::{Chunk, StepPlan};

/// Shares what the plan's decoding leaves of the budget among prompts.
pub(super) fn plan_prefill(
    books: &mut Books,
    room: &mut impl Room,
    plan: &mut StepPlan,
    may_admit: bool,
) {
    let left = books.config.token_budget.saturating_sub(plan.decode.len());
    let mut slots = prompts(books, plan.kind);
    if may_admit {
        admit_some(books, room, plan, &mut slots, left);
    }
    let left = books.config.token_budget.saturating_sub(plan.decode.len());
    let order = books.config.order;
    let place = |slot: &u32| books.get(*slot).map(|r| (r.rank_now(order), r.order));
    slots.sort_by_key(place);
    let wanted: Vec<(usize, bool)> = slots
        .iter()
        .filter_map(|&slot| books.get(slot).map(|r| (r.remaining(), r.whole)))
        .collect();
    let counts = divide(&books.config.into(), &wanted, left);
    for (slot, count) in slots.into_iter().zip(counts) {
        let step = plan.step;
        if let (true, Some(request)) = (count > 0, books.get_mut(slot)) {
            let first = request.computed;
            request.given = Given::Chunk { step, first };
            request.computed += count;
            let last = request.computed == request.known;
            plan.prefill.push(Chunk { request: request.id, first, count, last });
        }
    }
}

/// Prompts of a kind that have room and are not done.
fn prompts(books: &Books, kind: u32) -> Vec<u32> {
    let runs = |slot: &&u32| {
        let request = books.get(**slot);
        request.is_some_and(|r| {
            r.state == RequestState::Prefilling && r.kind == kind && r.remaining() > 0
        })
    };
    books.running.iter().filter(runs).copied().collect()
}

/// What of a configuration says how prompts share a step.
struct Division {
    most: usize,
    multiple: usize,
    prompts: usize,
    lead_percent: usize,
}

impl From<super::config::SchedulerConfig> for Division {
    fn from(config: super::config::SchedulerConfig) -> Division {
        Division {
            most: config.chunk_tokens - config.chunk_tokens % config.chunk_multiple,
            multiple: config.chunk_multiple,
            prompts: config.partial_prefills,
            lead_percent: config.lead_percent,
        }
    }
}

/// Divides `left` tokens among prompts in order, each of which wants some, all at once or not.
///
/// The first gets its percentage, the next ones equal parts of the rest, and what one cannot use
/// goes to the others in order. No more than `prompts` of them are left unfinished with a part: the
/// others keep what they have and pause. A whole prompt is computed when it is the first, or fits.
fn divide(how: &Division, wanted: &[(usize, bool)], left: usize) -> Vec<usize> {
    let mut counts = vec![0; wanted.len()];
    let Some(&(lead, whole)) = wanted.first() else { return counts };
    if whole {
        counts[0] = lead;
        let rest = divide(how, &wanted[1..], left.saturating_sub(lead));
        counts[1..].copy_from_slice(&rest);
        // Only the first may exceed what is left.
        if lead > left {
            counts[1..].fill(0);
        }
        return counts;
    }
    let most = |at: usize| wanted[at].0.min(how.most);
    let round = |count: usize, at: usize| {
        let whole_prompt = count >= wanted[at].0;
        if whole_prompt { count } else { count - count % how.multiple }
    };
    let demand: usize = (0..wanted.len()).map(most).sum();
    let sharing = if demand <= left { wanted.len() } else { wanted.len().min(how.prompts) };
    let cut = |at: &usize| !wanted[*at].1;
    let others = (1..sharing).filter(cut).count();
    let mut rest = left;
    let first = if others == 0 { left } else { left * how.lead_percent / 100 };
    let even = |rest: usize| rest / others.max(1);
    counts[0] = round(most(0).min(first.max(left / (others + 1))), 0);
    rest -= counts[0];
    let part = even(rest);
    for at in (1..sharing).filter(cut) {
        counts[at] = round(most(at).min(part), at);
        rest -= counts[at];
    }
    for at in 0..sharing {
        let (want, whole) = wanted[at];
        let more = most(at).saturating_sub(counts[at]).min(rest);
        if whole && at > 0 {
            counts[at] = if want <= rest { want } else { 0 };
            rest -= counts[at];
        } else {
            let grown = round(counts[at] + more, at);
            rest -= grown - counts[at];
            counts[at] = grown;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::{Division, divide};

    const HOW: Division = Division { most: 4096, multiple: 16, prompts: 3, lead_percent: 50 };

    fn divided(wanted: &[usize], left: usize) -> Vec<usize> {
        let wanted: Vec<(usize, bool)> = wanted.iter().map(|&tokens| (tokens, false)).collect();
        divide(&HOW, &wanted, left)
    }

    #[test]
    fn one_alone_gets_all_of_it() {
        assert_eq!(divided(&[100_000], 2048), [2048]);
        assert_eq!(divided(&[100_000], 2047), [2032]);
        assert_eq!(divided(&[100_000], 8192), [4096]);
        assert_eq!(divided(&[33], 2048), [33]);
    }

    #[test]
    fn the_first_gets_half_and_the_others_share_the_rest() {
        assert_eq!(divided(&[100_000, 100_000], 2048), [1024, 1024]);
        assert_eq!(divided(&[100_000, 100_000, 100_000], 2048), [1024, 512, 512]);
        assert_eq!(divided(&[100_000, 100_000, 100_000, 100_000], 2048), [1024, 512, 512, 0]);
    }

    #[test]
    fn what_one_cannot_use_goes_to_the_others_in_order() {
        assert_eq!(divided(&[100, 100_000, 100_000], 2048), [100, 976, 960]);
        assert_eq!(divided(&[100_000, 7, 100_000], 2048), [1520, 7, 512]);
        assert_eq!(divided(&[5, 6, 7, 8, 9], 2048), [5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_whole_prompt_is_computed_when_it_is_first_or_fits() {
        let wanted = [(5000, true), (100, false)];
        assert_eq!(divide(&HOW, &wanted, 2048), [5000, 0]);
        let wanted = [(100, false), (5000, true), (300, true)];
        assert_eq!(divide(&HOW, &wanted, 2048), [100, 0, 300]);
        let wanted = [(300, true), (100_000, false)];
        assert_eq!(divide(&HOW, &wanted, 2048), [300, 1744]);
    }
}
