//! The whole store against a map in memory: budgets, eviction, time, documents, several at once.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use kvweave_store::{
    Budget, Dtype, ErrorKind, Layout, Part, Provenance, Resident, ShardName, Store, StoreOptions,
    Stored, Victims,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// Bytes of the file of a small shard: a head, token ids, one part.
const FILE: u64 = 3 * 4096;

fn of(namespace: &str) -> Provenance {
    Provenance {
        namespace: namespace.into(),
        model: "model".into(),
        dtype: Dtype::F32,
        regime: 0,
        heads: String::new(),
        layout: Layout { kind: "payload".into(), layers: 1, kv_heads: 1, head_dim: 8 },
    }
}

fn store_of(root: &Path, capacity: Option<u64>, quota: Option<u64>) -> Store {
    let budget = Budget { capacity, quota, quotas: HashMap::new() };
    Store::open(root, StoreOptions { budget, ..StoreOptions::default() }).expect("a store")
}

fn put(store: &Store, namespace: &str, text: u32, expires: Option<u64>, now: u64) -> Stored {
    try_put(store, namespace, text, expires, now).expect("room")
}

fn try_put(
    store: &Store,
    namespace: &str,
    text: u32,
    expires: Option<u64>,
    now: u64,
) -> Result<Stored, kvweave_store::StoreError> {
    let bytes = text.to_le_bytes();
    let parts = [Part { name: "kv", bytes: &bytes }];
    store.put(&of(namespace), &[text, 1], &parts, expires, now)
}

fn has(store: &Store, namespace: &str, text: u32, now: u64) -> bool {
    let found = store.get(&of(namespace), &[text, 1], now).expect("a whole store");
    let read = found.map(|shard| shard.read_part("kv").expect("whole"));
    assert!(read.is_none() || read == Some(text.to_le_bytes().to_vec()));
    read.is_some()
}

#[test]
fn the_least_recently_used_goes_first_and_names_keep() {
    let folder = TempDir::new().expect("a folder");
    let store = store_of(folder.path(), Some(3 * FILE), None);
    let names: Vec<ShardName> = (0..3).map(|text| put(&store, "a", text, None, 10).name).collect();
    store.name("a", "manual", &names[1]).expect("named");
    assert!(has(&store, "a", 0, 20));
    // 2 was used least recently but for 1, which has a name.
    assert_eq!(put(&store, "a", 3, None, 30).evicted, [names[2].clone()]);
    assert_eq!(put(&store, "b", 4, None, 40).evicted, [names[0].clone()]);
    let manual = store.document("a", "manual", 40).expect("whole").expect("there");
    assert_eq!(manual.0, names[1]);
    // Whoever opens the folder next knows the order of use from the files.
    drop(store);
    let store = store_of(folder.path(), Some(3 * FILE), None);
    assert!(has(&store, "a", 3, 50));
    put(&store, "a", 5, None, 60);
    assert!(!has(&store, "b", 4, 70) && has(&store, "a", 3, 70) && has(&store, "a", 1, 70));
    assert_eq!(store.delete(&names[1]).expect_err("named").kind(), ErrorKind::InvalidArgument);
    assert!(store.forget("a", "manual").expect("there"));
    assert!(!store.forget("a", "manual").expect("gone"));
    assert!(store.delete(&names[1]).expect("free"));
    assert!(!store.delete(&names[1]).expect("gone"));
}

#[test]
fn a_refusal_changes_nothing() {
    let folder = TempDir::new().expect("a folder");
    let store = store_of(folder.path(), Some(4 * FILE), Some(2 * FILE));
    for (namespace, text) in [("a", 0), ("a", 1), ("b", 2), ("b", 3)] {
        let name = put(&store, namespace, text, None, 1).name;
        store.name(namespace, &format!("document {text}"), &name).expect("named");
    }
    let error = try_put(&store, "a", 9, None, 2).expect_err("a full quota");
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded { needed: FILE, free: 0 });
    let error = try_put(&store, "c", 9, None, 2).expect_err("a full store");
    assert_eq!(error.kind(), ErrorKind::Full { needed: FILE, free: 0 });
    store.forget("a", "document 0").expect("there");
    let big = vec![0; 3 * FILE as usize];
    let parts = [Part { name: "kv", bytes: &big }];
    let error = store.put(&of("a"), &[7, 1], &parts, None, 3).expect_err("too large");
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded { needed: 11 * 4096, free: FILE });
    for (namespace, text) in [("a", 0), ("a", 1), ("b", 2), ("b", 3)] {
        assert!(has(&store, namespace, text, 4));
    }
    // A quota evicts its own namespace's and leaves others alone.
    let stored = put(&store, "a", 9, None, 5);
    assert_eq!(stored.evicted.len(), 1);
    assert!(!has(&store, "a", 0, 6) && has(&store, "b", 2, 6) && has(&store, "b", 3, 6));
    store.set_quota("a", None).expect("a name");
    assert_eq!(try_put(&store, "a", 10, None, 7).expect("one evicted").evicted.len(), 1);
    store.set_quota("b", Some(5 * FILE)).expect("a name");
    assert_eq!(try_put(&store, "b", 11, None, 8).expect("one evicted").evicted.len(), 1);
    assert_eq!(store.held().expect("books").0, 4 * FILE);
}

#[test]
fn what_has_expired_is_no_hit_and_goes_before_anything_else() {
    let folder = TempDir::new().expect("a folder");
    let store = store_of(folder.path(), Some(3 * FILE), None);
    put(&store, "a", 0, None, 10);
    let brief = put(&store, "a", 1, Some(100), 90).name;
    store.name("a", "brief", &brief).expect("named");
    assert!(has(&store, "a", 1, 99) && !has(&store, "a", 1, 100) && has(&store, "a", 1, 50));
    assert!(store.document("a", "brief", 99).expect("whole").is_some());
    assert!(store.document("a", "brief", 100).expect("whole").is_none());
    let other = put(&store, "a", 2, Some(100), 95).name;
    assert_eq!(put(&store, "a", 3, None, 100).evicted, [other]);
    // Put again with another end, it is written anew.
    assert!(put(&store, "a", 1, Some(300), 150).written && has(&store, "a", 1, 200));
    assert_eq!(store.collect(299).expect("collected").expired, 0);
    let collected = store.collect(300).expect("collected");
    assert_eq!((collected.expired, collected.bytes), (1, FILE));
    assert!(store.documents(None).expect("a list").is_empty());
    // A clock that went back makes nothing of that undone.
    assert!(!has(&store, "a", 1, 1) && has(&store, "a", 0, 0));
}

#[test]
fn what_another_process_reads_counts_as_used() {
    let folder = TempDir::new().expect("a folder");
    let stores = [(); 2].map(|()| store_of(folder.path(), Some(2 * FILE), None));
    put(&stores[0], "a", 0, None, 10);
    put(&stores[0], "a", 1, None, 20);
    assert!(has(&stores[1], "a", 0, 30));
    put(&stores[0], "a", 2, None, 40);
    assert!(has(&stores[0], "a", 0, 50) && !has(&stores[0], "a", 1, 50));
}

/// The largest first, and of equals the one of the greatest name.
struct Largest;

impl Victims for Largest {
    fn order(&self, residents: &mut [Resident<'_>], _now: u64) {
        residents.sort_by(|a, b| (b.bytes, b.name).cmp(&(a.bytes, a.name)));
    }
}

#[test]
fn who_goes_first_is_the_policy_s_to_say() {
    let folder = TempDir::new().expect("a folder");
    let budget = Budget { capacity: Some(8 * 4096), ..Budget::default() };
    let options = StoreOptions { budget, victims: Box::new(Largest), ..StoreOptions::default() };
    let store = Store::open(folder.path(), options).expect("a store");
    let big = vec![1; 3 * 4096];
    let parts = [Part { name: "kv", bytes: &big }];
    let largest = store.put(&of("a"), &[9, 9], &parts, None, 100).expect("room").name;
    put(&store, "a", 0, None, 1);
    assert_eq!(put(&store, "a", 1, None, 2).evicted, [largest]);
}

#[test]
fn what_writers_left_is_collected_and_what_they_write_is_not() {
    let folder = TempDir::new().expect("a folder");
    let store = store_of(folder.path(), None, None);
    let writing = folder.path().join("writing");
    fs::write(writing.join("1-1"), [7; 100]).expect("written");
    let alive = fs::File::create(writing.join("1-2")).expect("made");
    alive.lock().expect("locked");
    let collected = store.collect(0).expect("collected");
    assert_eq!((collected.leftovers, collected.bytes), (1, 100));
    assert!(writing.join("1-2").exists());
    drop(alive);
    store_of(folder.path(), None, None);
    assert!(!writing.join("1-2").exists());
}

#[test]
fn a_folder_of_other_things_is_refused_and_left_alone() {
    let folder = TempDir::new().expect("a folder");
    fs::write(folder.path().join("thesis.tex"), "x").expect("written");
    let error = Store::open(folder.path(), StoreOptions::default()).err().expect("a refusal");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    let look = || StoreOptions { create: false, ..StoreOptions::default() };
    let error = Store::open(&folder.path().join("none"), look()).err().expect("a refusal");
    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(!folder.path().join("none").exists());
    let file = folder.path().join("thesis.tex");
    let error = Store::open(&file, StoreOptions::default()).err().expect("a refusal");
    assert_eq!(error.kind(), ErrorKind::Io);
    // A store whose empty folders got lost on the way is one.
    let copied = folder.path().join("copied");
    drop(store_of(&copied, None, None));
    fs::remove_dir(copied.join("writing")).expect("removed");
    assert!(put(&store_of(&copied, None, None), "a", 0, None, 1).written);
    // Files among the shards that are none are nobody's business.
    let root = folder.path().join("store");
    let store = store_of(&root, None, None);
    fs::write(root.join("shards/notes.txt"), "x").expect("written");
    fs::create_dir(root.join("shards").join(format!("{}.kv", "a".repeat(32)))).expect("made");
    put(&store, "a", 0, None, 1);
    assert_eq!(store_of(&root, None, None).list(None).expect("a list").len(), 2);
    let store = store_of(&root, Some(FILE), None);
    assert!(has(&store, "a", 0, 1));
    assert_eq!(store.collect(1).expect("left alone").spoiled, 0);
    // A folder counts with its bytes and is nobody's to evict.
    let counted = store.held().expect("books").0 - FILE;
    let store = store_of(&root, Some(FILE + counted), None);
    assert_eq!(put(&store, "a", 1, None, 2).evicted.len(), 1);
}

#[test]
fn documents_that_name_nothing_are_told() {
    let folder = TempDir::new().expect("a folder");
    let store = store_of(folder.path(), None, None);
    let name = put(&store, "a", 0, None, 1).name;
    let error = store.name("b", "taken", &name).expect_err("another's");
    assert_eq!(error.kind(), ErrorKind::Foreign);
    let nobody = ShardName::parse(&"0".repeat(32)).expect("a name");
    assert_eq!(store.name("a", "x", &nobody).expect_err("none").kind(), ErrorKind::Unknown);
    for text in ["spoiled", "lost", "kept well"] {
        let shard = put(&store, "a", text.len() as u32, None, 1).name;
        store.name("a", text, &shard).expect("named");
    }
    let lost = store.document("a", "lost", 1).expect("whole").expect("there").0;
    fs::remove_file(folder.path().join(format!("shards/{lost}.kv"))).expect("removed");
    assert_eq!(store.document("a", "lost", 1).expect_err("lost").kind(), ErrorKind::Unknown);
    let records: Vec<_> = fs::read_dir(folder.path().join("documents"))
        .expect("a folder")
        .map(|entry| entry.expect("a file").path())
        .filter(|path| fs::read_to_string(path).expect("text").contains("\"spoiled\""))
        .collect();
    let mut bytes = fs::read(&records[0]).expect("the record");
    bytes[40] ^= 1;
    fs::write(&records[0], bytes).expect("written");
    let store = store_of(folder.path(), None, None);
    let mut kinds: Vec<_> =
        store.verify_documents().expect("a list").into_iter().map(|(_, e)| e.kind()).collect();
    kinds.sort_by_key(|kind| format!("{kind:?}"));
    assert_eq!(kinds, [ErrorKind::Corrupt, ErrorKind::Unknown]);
    assert!(store.document("a", "kept well", 1).expect("whole").is_some());
}

#[test]
fn shards_are_carried_from_store_to_store() {
    let (here, there) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let (from, to) = (store_of(here.path(), None, None), store_of(there.path(), None, Some(FILE)));
    let names: Vec<ShardName> = (0..2).map(|text| put(&from, "a", text, None, 1).name).collect();
    let file = there.path().with_extension("kv");
    from.export(&names[0], &file).expect("written");
    assert_eq!(
        from.export(&names[1], &file).expect_err("there").kind(),
        ErrorKind::InvalidArgument
    );
    assert_eq!(to.import(&file, 5).expect("room").name, names[0]);
    assert!(has(&to, "a", 0, 6));
    let mut bytes = fs::read(&file).expect("the file");
    fs::remove_file(&file).expect("removed");
    from.export(&names[1], &file).expect("written");
    to.name("a", "kept", &names[0]).expect("named");
    let error = to.import(&file, 7).expect_err("a full quota");
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded { needed: FILE, free: 0 });
    bytes[2 * 4096] ^= 1;
    fs::write(&file, &bytes).expect("written");
    assert_eq!(to.import(&file, 8).expect_err("spoiled").kind(), ErrorKind::Corrupt);
    fs::write(&file, &bytes[..5000]).expect("written");
    assert_eq!(to.import(&file, 8).expect_err("cut").kind(), ErrorKind::Truncated);
    // A source that fails while it is copied.
    assert_eq!(to.import(here.path(), 8).expect_err("a folder").kind(), ErrorKind::Io);
    fs::remove_file(&file).expect("removed");
    assert_eq!(fs::read_dir(there.path().join("writing")).expect("a folder").count(), 0);
    assert_eq!(to.list(None).expect("a list").len(), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Put(usize, u32, Option<u64>),
    Get(usize, u32),
    Name(usize, u32),
    Forget(usize, u32),
    Delete(usize, u32),
    Collect,
    Open,
}

fn step() -> impl Strategy<Value = Step> {
    let (who, text) = (0usize..2, 0u32..6);
    prop_oneof![
        4 => (who.clone(), text.clone(), prop::option::weighted(0.3, 0u64..60))
            .prop_map(|(who, text, life)| Step::Put(who, text, life)),
        3 => (who.clone(), text.clone()).prop_map(|(who, text)| Step::Get(who, text)),
        1 => (who.clone(), text.clone()).prop_map(|(who, text)| Step::Name(who, text)),
        1 => (who.clone(), text.clone()).prop_map(|(who, text)| Step::Forget(who, text)),
        1 => (who, text).prop_map(|(who, text)| Step::Delete(who, text)),
        1 => Just(Step::Collect),
        1 => Just(Step::Open),
    ]
}

/// Namespace and text of each shard → when it expires, when it was used, whether it has a name.
type Model = BTreeMap<(usize, u32), (Option<u64>, u64, bool)>;

/// Who goes in the model, written down another way: one at a time, the first of the rest.
fn make_room(model: &mut Model, who: usize, replaced: u32, now: u64) -> Result<(), ()> {
    const QUOTA: usize = 3;
    const CAPACITY: usize = 4;
    let mut left = model.clone();
    left.remove(&(who, replaced));
    let first = |left: &Model, own: bool| {
        let free = left.iter().filter(|((of, _), (.., named))| !named && (!own || *of == who));
        let rank = free.map(|(key, (end, used, _))| (end.is_none_or(|e| now < e), *used, *key));
        rank.min().map(|(.., key)| key)
    };
    while left.keys().filter(|(of, _)| *of == who).count() >= QUOTA {
        left.remove(&first(&left, true).ok_or(())?);
    }
    while left.len() >= CAPACITY {
        left.remove(&first(&left, false).ok_or(())?);
    }
    *model = left;
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Two stores on one folder, used in turns, are one map in memory.
    #[test]
    fn a_store_is_a_map(steps in prop::collection::vec((step(), 0usize..2), 1..40)) {
        let folder = TempDir::new().expect("a folder");
        let open = || store_of(folder.path(), Some(4 * FILE), Some(3 * FILE));
        let mut stores = [open(), open()];
        let mut model = Model::new();
        for (now, (step, which)) in (1..).map(|at| at * 10).zip(steps) {
            let store = &stores[which];
            let space = |who: usize| ["a", "b"][who];
            match step {
                Step::Put(who, text, life) => {
                    let end = life.map(|life| now + life);
                    let there = model.get(&(who, text)).is_some_and(|found| found.0 == end);
                    let named = model.get(&(who, text)).is_some_and(|found| found.2);
                    let room = if there { Ok(()) } else { make_room(&mut model, who, text, now) };
                    let done = try_put(store, space(who), text, end, now);
                    prop_assert_eq!(done.is_ok(), room.is_ok());
                    if let Ok(stored) = done {
                        prop_assert_eq!(stored.written, !there);
                        model.insert((who, text), (end, now, named));
                    }
                }
                Step::Get(who, text) => {
                    let found = model.get_mut(&(who, text));
                    let live = found.filter(|found| found.0.is_none_or(|end| now < end));
                    prop_assert_eq!(has(store, space(who), text, now), live.is_some());
                    live.into_iter().for_each(|found| found.1 = now);
                }
                Step::Name(who, text) => {
                    let shard = of(space(who)).name(store.naming(), &[text, 1]);
                    let found = model.get_mut(&(who, text));
                    let done = store.name(space(who), &format!("{text}"), &shard);
                    prop_assert_eq!(done.is_ok(), found.is_some());
                    found.into_iter().for_each(|found| found.2 = true);
                }
                Step::Forget(who, text) => {
                    let found = model.get_mut(&(who, text)).filter(|found| found.2);
                    let done = store.forget(space(who), &format!("{text}")).expect("a folder");
                    prop_assert_eq!(done, found.is_some());
                    found.into_iter().for_each(|found| found.2 = false);
                }
                Step::Delete(who, text) => {
                    let shard = of(space(who)).name(store.naming(), &[text, 1]);
                    let named = model.get(&(who, text)).map(|found| found.2);
                    let done = store.delete(&shard);
                    let wanted = (named != Some(true)).then_some(named.is_some());
                    prop_assert_eq!(done.ok(), wanted);
                    if named == Some(false) {
                        model.remove(&(who, text));
                    }
                }
                Step::Collect => {
                    let before = model.len();
                    model.retain(|_, found| found.0.is_none_or(|end| now < end));
                    let collected = store.collect(now).expect("a folder");
                    prop_assert_eq!(collected.expired as usize, before - model.len());
                }
                Step::Open => stores[which] = open(),
            }
            for store in &stores {
                let (total, held) = store.held().expect("books");
                prop_assert_eq!(total, model.len() as u64 * FILE);
                prop_assert_eq!(held.values().sum::<u64>(), total);
                let named = model.values().filter(|found| found.2).count();
                prop_assert_eq!(store.documents(None).expect("a list").len(), named);
            }
        }
    }
}
