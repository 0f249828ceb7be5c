//! Pages into the slots of rows, and carried there and back.

use half::bf16;
use kvweave_core::ops::{
    Fp8Arenas, Fp8E4m3, MoveFp8Pages, MovePages, Moves, NO_PAGE, OpError, OpErrorKind,
    RecyclePages, RowPages, Way,
};
use proptest::prelude::*;

use crate::paged::Random;

type Recycle = fn(RecyclePages<'_>) -> Result<(), OpError>;
type Move = fn(MovePages<'_>) -> Result<(), OpError>;

const RECYCLES: [Recycle; 2] = [kvweave_reference::recycle_pages, kvweave_cpu::recycle_pages];
const MOVES: [Move; 2] = [kvweave_reference::move_pages, kvweave_cpu::move_pages];

/// Rows that selected pages, and what their slots hold.
#[derive(Clone, Debug)]
struct Rows {
    pages: Vec<i32>,
    most: usize,
    selected: Vec<i32>,
    limit: usize,
    pinned: Option<Vec<u8>>,
    slots: Vec<i32>,
    width: usize,
}

/// Slots as they are after a call, and its results.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    slots: Vec<i32>,
    places: Vec<i32>,
    moves: Vec<[i32; 3]>,
}

impl Rows {
    /// Rows that fit.
    fn of(seed: u64, rows: usize, width: usize, limit: usize) -> Self {
        let mut random = Random(seed);
        let most = random.below(width + 3);
        let mut made = Self {
            pages: vec![-9; rows * most],
            most,
            selected: Vec::new(),
            limit,
            pinned: (random.below(3) > 0).then(|| vec![0; rows * width]),
            slots: vec![NO_PAGE; rows * width],
            width,
        };
        for row in 0..rows {
            let mut order: Vec<i32> = (0..limit as i32).collect();
            random.shuffle(&mut order);
            let share = random.below(3);
            for (slot, &page) in made.slots[row * width..][..width].iter_mut().zip(&order) {
                if random.below(3) >= share {
                    *slot = page;
                }
            }
            if let Some(pins) = &mut made.pinned {
                pins[row * width..][..width].fill_with(|| {
                    if random.below(4) == 0 { 1 + random.below(200) as u8 } else { 0 }
                });
            }
            let free = made.pinned.as_ref().map_or(width, |pins| {
                pins[row * width..][..width].iter().filter(|&&pin| pin == 0).count()
            });
            let count = random.below(free.min(most).min(limit) + 1);
            let from = random.below(limit - count + 1);
            let mut chosen = order[from..from + count].to_vec();
            chosen.sort_unstable();
            made.pages[row * most..][..count].copy_from_slice(&chosen);
            made.selected.push(count as i32);
        }
        made
    }

    fn recycle(&self, run: Recycle) -> Result<Found, OpError> {
        let rows = self.selected.len();
        let mut found = Found {
            slots: self.slots.clone(),
            places: vec![-7; rows * self.most],
            moves: vec![[-7; 3]; rows * self.most.min(self.width)],
        };
        let (mut count, mut refused) = ([-7], vec![-7; rows]);
        run(RecyclePages {
            pages: &self.pages,
            most: self.most,
            selected: &self.selected,
            limit: self.limit,
            pinned: self.pinned.as_deref(),
            slots: &mut found.slots,
            width: self.width,
            places: &mut found.places,
            moves: &mut found.moves,
            count: &mut count,
            refused: &mut refused,
        })?;
        assert!(refused.iter().all(|&flag| flag == 0));
        let behind = found.moves.split_off(count[0] as usize);
        assert!(behind.iter().all(|&step| step == [-7; 3]));
        Ok(found)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// What is selected is in slots, pinned ones hold what they held, nothing moves in vain.
    #[test]
    fn recycle_pages(seed in any::<u64>(), sizes in (0usize..6, 0usize..70, 1usize..200)) {
        let (count, width, limit) = sizes;
        let rows = Rows::of(seed, count, width, limit);
        let found = rows.recycle(RECYCLES[0]).unwrap();
        prop_assert_eq!(&rows.recycle(RECYCLES[1]).unwrap(), &found);
        prop_assert!(found.moves.is_sorted());
        let mut moves = found.moves.iter().copied().peekable();
        for row in 0..count {
            let slots = [&rows.slots, &found.slots].map(|all| &all[row * width..][..width]);
            let (chosen, rest) = rows.pages[row * rows.most..][..rows.most]
                .split_at(rows.selected[row] as usize);
            let (places, behind) =
                found.places[row * rows.most..][..rows.most].split_at(chosen.len());
            prop_assert_eq!(rest.len(), behind.len());
            prop_assert!(behind.iter().all(|&place| place == -1));
            for (&page, &place) in chosen.iter().zip(places) {
                let slot = place as usize;
                prop_assert_eq!(slots[1][slot], page);
                match slots[0].iter().position(|&held| held == page) {
                    Some(before) => prop_assert_eq!(before, slot),
                    None => {
                        prop_assert_eq!(moves.next(), Some([row as i32, page, place]));
                        // No slot before it was left.
                        let taken = |before: usize| {
                            chosen.contains(&slots[1][before]) || is_pinned(&rows, row, before)
                        };
                        prop_assert!((0..slot).all(taken));
                        prop_assert!(!is_pinned(&rows, row, slot));
                    }
                }
            }
            for (slot, (before, after)) in slots[0].iter().zip(slots[1]).enumerate() {
                prop_assert!(before == after || places.contains(&(slot as i32)));
            }
        }
        prop_assert_eq!(moves.next(), None);
        // Who has all that it selects moves nothing.
        let again = Rows { slots: found.slots.clone(), ..rows }.recycle(RECYCLES[1]).unwrap();
        prop_assert_eq!(again, Found { moves: Vec::new(), ..found });
    }

    /// What is fetched and spilled again is what lay there, and nothing else was touched.
    #[test]
    fn move_pages(seed in any::<u64>(), sizes in (1usize..5, 1usize..4, 1usize..40, 1usize..4)) {
        let (tables, width, bytes, ranks) = sizes;
        let mut random = Random(seed);
        let rows = tables * ranks;
        let blocks = |random: &mut Random, width: usize| {
            let mut order: Vec<i32> =
                (0..tables * width).map(|block| (block * ranks) as i32).collect();
            random.shuffle(&mut order);
            order
        };
        let (of_slots, of_home) = (blocks(&mut random, width), blocks(&mut random, 2 * width));
        let (slot_pages, home_pages) = (rows * width + 1, 2 * rows * width);
        let mut moves = Vec::new();
        for row in 0..rows as i32 {
            for slot in 0..width as i32 {
                moves.push([row, 2 * slot + random.below(2) as i32, slot]);
            }
        }
        let home: Vec<u8> = (0..home_pages * bytes).map(|_| random.below(256) as u8).collect();
        let count = [random.below(moves.len() + 1) as i32];
        let of = |way| Moves {
            moves: &moves,
            count: &count,
            slots: RowPages { blocks: &of_slots, width, ranks, pages: slot_pages },
            home: RowPages { blocks: &of_home, width: 2 * width, ranks, pages: home_pages },
            way,
        };
        let run = |run: Move| {
            let mut slots = vec![0xA5; slot_pages * bytes];
            run(MovePages {
                moves: of(Way::Fetch),
                page_bytes: bytes,
                source: &home,
                target: &mut slots,
            }).unwrap();
            let mut back = vec![0x5A; home.len()];
            run(MovePages {
                moves: of(Way::Spill),
                page_bytes: bytes,
                source: &slots,
                target: &mut back,
            }).unwrap();
            (slots, back)
        };
        let (slots, back) = run(MOVES[0]);
        prop_assert_eq!(&run(MOVES[1]), &(slots, back.clone()));
        let mut wanted = vec![0x5A; home.len()];
        for &[row, page, _] in &moves[..count[0] as usize] {
            let (row, page) = (row as usize, page as usize);
            let at = of_home[row / ranks * 2 * width + page] as usize + row % ranks;
            wanted[at * bytes..][..bytes].copy_from_slice(&home[at * bytes..][..bytes]);
        }
        prop_assert_eq!(back, wanted);
    }
}

fn is_pinned(rows: &Rows, row: usize, slot: usize) -> bool {
    rows.pinned.as_ref().is_some_and(|pins| pins[row * rows.width + slot] != 0)
}

#[test]
fn rows_that_are_not_as_they_have_to_be_are_refused_by_name() {
    let good = Rows {
        pages: vec![1, 3, -1, 0, 2, 4],
        most: 3,
        selected: vec![2, 3],
        limit: 5,
        pinned: Some(vec![0, 0, 7, 0, 0, 0]),
        slots: vec![3, -1, 4, 2, 1, 0],
        width: 3,
    };
    let Found { slots, moves, .. } = good.recycle(RECYCLES[0]).unwrap();
    assert_eq!((slots, moves), (vec![3, 1, 4, 2, 4, 0], vec![[0, 1, 1], [1, 4, 1]]));
    let bad: [(&str, Rows); 10] = [
        ("pages", Rows { pages: vec![3, 1, -1, 0, 2, 4], ..good.clone() }),
        ("pages", Rows { pages: vec![1, 1, -1, 0, 2, 4], ..good.clone() }),
        ("pages", Rows { pages: vec![1, 5, -1, 0, 2, 4], ..good.clone() }),
        ("pages", Rows { pages: vec![-1, 3, -1, 0, 2, 4], ..good.clone() }),
        ("selected", Rows { selected: vec![4, 3], ..good.clone() }),
        ("selected", Rows { selected: vec![-1, 3], ..good.clone() }),
        ("slots", Rows { slots: vec![3, -1, 5, 2, 1, 0], ..good.clone() }),
        ("slots", Rows { slots: vec![3, -2, 4, 2, 1, 0], ..good.clone() }),
        ("slots", Rows { slots: vec![3, -1, 4, 2, 2, 0], ..good.clone() }),
        ("selected", Rows { pinned: Some(vec![0, 1, 1, 0, 0, 0]), ..good.clone() }),
    ];
    for (what, rows) in bad {
        for run in RECYCLES {
            assert_eq!(rows.recycle(run).unwrap_err().what(), what);
        }
    }
}

#[test]
fn moves_that_point_nowhere_or_twice_to_a_page_are_refused() {
    let blocks = [0, 1, -1, 3];
    let of = RowPages { blocks: &blocks, width: 2, ranks: 1, pages: 4 };
    let told = |moves: &[[i32; 3]], count: i32, slots: RowPages<'_>| {
        let (source, mut target) = ([7; 8], [0; 8]);
        MOVES.map(|run| {
            let moves = Moves { moves, count: &[count], slots, home: of, way: Way::Fetch };
            let done =
                run(MovePages { moves, page_bytes: 2, source: &source, target: &mut target });
            done.map_err(|error| (error.kind(), error.what()))
        })
    };
    let outside = [Err((OpErrorKind::OutOfRange, "moves")); 2];
    for step in [[2, 0, 0], [-1, 0, 0], [0, 2, 0], [0, 0, -1], [1, 0, 0], [i32::MAX; 3]] {
        assert_eq!(told(&[step], 1, of), outside);
        assert_eq!(told(&[step], 0, of), [Ok(()); 2]);
    }
    assert_eq!(
        told(&[[0, 0, 0]], 1, RowPages { pages: 0, ..of }),
        [Err((OpErrorKind::Shape, "target")); 2]
    );
    assert_eq!(told(&[[0, 0, 0], [0, 1, 0]], 2, of), [Err((OpErrorKind::Overlap, "moves")); 2]);
    assert_eq!(told(&[[0, 0, 0]], 2, of), [Err((OpErrorKind::OutOfRange, "count")); 2]);
    assert_eq!(told(&[[0, 0, 0]], -1, of), [Err((OpErrorKind::OutOfRange, "count")); 2]);
    assert_eq!(
        told(&[], 0, RowPages { ranks: 0, ..of }),
        [Err((OpErrorKind::OutOfRange, "ranks")); 2]
    );
}

/// Both crates round and widen alike, and pages that come back are kept as the same bits.
#[test]
fn rounded_pages_are_the_same_by_both_and_a_second_time() {
    const PAGES: usize = 40;
    const PAGE: usize = 2 * 24;
    let mut random = Random(5);
    let drawn = |random: &mut Random| f32::from_bits((random.below(1 << 16) as u32) << 16);
    let slots: Vec<bf16> = (0..PAGES * PAGE).map(|_| bf16::from_f32(drawn(&mut random))).collect();
    let blocks: Vec<i32> = (0..PAGES as i32).collect();
    let of = RowPages { blocks: &blocks, width: PAGES, ranks: 1, pages: PAGES };
    let steps: Vec<[i32; 3]> = (0..PAGES as i32).map(|n| [0, (n + 7) % PAGES as i32, n]).collect();
    let count = [PAGES as i32];
    let moves = |way| Moves { moves: &steps, count: &count, slots: of, home: of, way };
    let kept =
        [kvweave_reference::move_fp8_pages::<bf16>, kvweave_cpu::move_fp8_pages].map(|run| {
            let spilled = |slots: &[bf16]| {
                let mut home = vec![Fp8E4m3::default(); PAGES * PAGE];
                let mut scales = vec![[0; 2]; PAGES];
                let arenas = Fp8Arenas::Spill { slots, home: &mut home, scales: &mut scales };
                run(MoveFp8Pages { moves: moves(Way::Spill), page: PAGE, arenas }).unwrap();
                (home, scales)
            };
            let (home, scales) = spilled(&slots);
            let mut back = vec![bf16::ZERO; slots.len()];
            let arenas = Fp8Arenas::Fetch { home: &home, scales: &scales, slots: &mut back };
            run(MoveFp8Pages { moves: moves(Way::Fetch), page: PAGE, arenas }).unwrap();
            let (again, scales_again) = spilled(&back);
            let bits = |all: &[Fp8E4m3]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!((bits(&again), scales_again), (bits(&home), scales.clone()));
            let arenas = Fp8Arenas::Fetch { home: &home, scales: &scales, slots: &mut back[1..] };
            let refused = run(MoveFp8Pages { moves: moves(Way::Fetch), page: PAGE, arenas });
            assert_eq!(refused.unwrap_err().what(), "slots");
            (bits(&home), scales)
        });
    assert_eq!(kept[0], kept[1]);
}
