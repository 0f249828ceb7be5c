//! Whose a folder is: the first model's that asks, whatever happens meanwhile.

use std::fs;
use std::path::Path;
use std::thread;

use kvweave_store::{Dtype, ErrorKind, Layout, Part, Provenance, Store, StoreError, StoreOptions};
use proptest::prelude::*;
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

fn of(model: &str) -> Provenance {
    Provenance {
        namespace: String::new(),
        model: model.into(),
        dtype: Dtype::F32,
        regime: 0,
        heads: String::new(),
        layout: Layout { kind: "payload".into(), layers: 1, kv_heads: 1, head_dim: 8 },
    }
}

fn open(root: &Path, model: Option<&str>) -> Result<Store, StoreError> {
    let model = model.map(str::to_owned);
    Store::open(root, StoreOptions { model, ..StoreOptions::default() })
}

/// The owner that a model is told of, or what it is refused by.
fn owner(root: &Path, model: &str) -> Result<Option<String>, String> {
    match open(root, Some(model)) {
        Ok(store) => Ok(store.model().map(str::to_owned)),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::OtherModel, "{error}");
            assert!(error.expected().contains(model), "{error}");
            Err(error.got().to_owned())
        }
    }
}

/// What a version wrote that knew of no owners.
fn written(root: &Path, models: &[&str]) {
    let store = open(root, None).expect("a store");
    for model in models {
        store
            .put(&of(model), &[1, 2], &[Part { name: "kv", bytes: b"kv" }], None, 5)
            .expect("room");
    }
}

fn record(root: &Path, text: &str) {
    let sealed = format!("{:016x} {text}\n", xxh3_64(text.as_bytes()));
    fs::write(root.join("store.json"), sealed).expect("a file");
}

#[test]
fn a_folder_belongs_to_the_first_model_that_asks() {
    let folder = TempDir::new().expect("a folder");
    assert_eq!(owner(folder.path(), "one"), Ok(Some("one".into())));
    assert_eq!(owner(folder.path(), "another"), Err("one of one".into()));
    assert_eq!(owner(folder.path(), "one"), Ok(Some("one".into())));
    // Whoever does not ask may use it, and it stays whose it is.
    written(folder.path(), &["another"]);
    assert_eq!(open(folder.path(), None).expect("a store").model(), Some("one"));
    assert_eq!(owner(folder.path(), "another"), Err("one of one".into()));
    assert_eq!(owner(folder.path(), "one"), Ok(Some("one".into())));
}

#[test]
fn a_folder_of_before_belongs_to_whose_shards_it_holds() {
    for (models, own, others) in [
        (vec![], Ok(Some("one".into())), Err("one of one".into())),
        (vec!["one"], Ok(Some("one".into())), Err("one of one".into())),
        (vec!["one under a map", "one"], Ok(Some("one".into())), Err("one of one".into())),
        (vec!["another"], Err("one of another".into()), Ok(Some("another".into()))),
        (vec!["onerous"], Err("one of onerous".into()), Err("one of onerous".into())),
        // Both go on as before, and nobody else comes.
        (vec!["one", "another"], Ok(None), Ok(None)),
    ] {
        let folder = TempDir::new().expect("a folder");
        written(folder.path(), &models);
        assert_eq!(owner(folder.path(), "one"), own, "{models:?}");
        assert_eq!(owner(folder.path(), "another"), others, "{models:?}");
        assert_eq!(owner(folder.path(), "one"), own, "{models:?}");
    }
}

#[test]
fn of_models_that_start_at_once_one_has_the_folder() {
    for round in 0..20 {
        let folder = TempDir::new().expect("a folder");
        let names: Vec<String> = (0..4).map(|number| format!("{round} model {number}")).collect();
        let known: Vec<_> = thread::scope(|scope| {
            let each: Vec<_> =
                names.iter().map(|name| scope.spawn(|| owner(folder.path(), name))).collect();
            each.into_iter().map(|one| one.join().expect("a thread")).collect()
        });
        let won: Vec<&String> = known.iter().flatten().flatten().collect();
        assert_eq!(won.len(), 1, "{known:?}");
        let told = format!("one of {}", won[0]);
        assert!(known.iter().filter_map(|one| one.as_ref().err()).all(|got| *got == told));
    }
}

#[test]
fn names_that_no_model_may_have_are_refused() {
    let folder = TempDir::new().expect("a folder");
    for name in ["", &*"m".repeat(5000)] {
        let error = open(folder.path(), Some(name)).err().expect("a refusal");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(owner(folder.path(), "one"), Ok(Some("one".into())));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A record of any text, its checksum right: taken, or refused by a kind of error that says so.
    #[test]
    fn hostile_records_are_refused(
        model in prop_oneof!["\\PC{0,40}", "m{4000,5000}"],
        before in "\\PC{0,4}",
        more in any::<bool>(),
    ) {
        let folder = TempDir::new().expect("a folder");
        written(folder.path(), &[]);
        let field = serde_json::to_string(&model).expect("text");
        let other = if more { ",\"more\":1" } else { "" };
        record(folder.path(), &format!(
            "{before}{{\"schema\":1,\"naming\":\"xxh3-128\",\"model\":{field}{other}}}"
        ));
        let named = (1..=4096).contains(&model.len());
        let sound = named && !more && before.bytes().all(|byte| byte == b' ');
        match open(folder.path(), Some("one")) {
            Ok(store) => prop_assert!(sound && store.model() == Some("one") && model == "one"),
            Err(error) if sound => prop_assert_eq!(error.kind(), ErrorKind::OtherModel),
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }
}
