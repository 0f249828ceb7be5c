//! One shard: what was written comes back, and nothing else is ever taken for it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use kvweave_store::{
    Dtype, ErrorKind, Layout, Naming, Part, Provenance, ReadPath, ShardName, Store, StoreError,
    StoreOptions,
};
use proptest::prelude::*;
use tempfile::TempDir;

fn provenance() -> Provenance {
    Provenance {
        namespace: "tenant".into(),
        model: "model".into(),
        dtype: Dtype::Bf16,
        regime: u64::MAX,
        heads: "map".into(),
        layout: Layout { kind: "payload".into(), layers: 2, kv_heads: 3, head_dim: 64 },
    }
}

/// On the disk that the tree is on: memory file systems have no direct reads to speak of.
fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn opened(root: &Path) -> Store {
    Store::open(root, StoreOptions::default()).expect("a store")
}

fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at as u64 * 31 + at as u64 / 251) as u8 ^ seed).collect()
}

/// A store with one small shard, its name, its tokens and its part.
struct One {
    _folder: TempDir,
    root: PathBuf,
    name: ShardName,
    tokens: Vec<u32>,
    part: Vec<u8>,
}

impl One {
    fn new(size: usize) -> One {
        let folder = folder();
        let root = folder.path().join("store");
        let (tokens, part) = ((0..70).collect::<Vec<u32>>(), bytes(size, 1));
        let parts = [Part { name: "kv", bytes: &part }];
        let stored = opened(&root).put(&provenance(), &tokens, &parts, None, 5).expect("room");
        One { _folder: folder, root, name: stored.name, tokens, part }
    }

    fn file(&self) -> PathBuf {
        self.root.join("shards").join(format!("{}.kv", self.name))
    }

    /// What a process that starts now makes of it.
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        let shard = opened(&self.root).get(&provenance(), &self.tokens, 5)?;
        shard.map(|shard| shard.read_part("kv")).transpose()
    }

    fn kind(&self) -> ErrorKind {
        self.read().expect_err("a refusal").kind()
    }
}

#[test]
fn what_was_written_comes_back_whatever_memory_it_is_read_into() {
    let folder = folder();
    let store = opened(&folder.path().join("store"));
    for (place, size) in
        [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (5 << 20) + 77].into_iter().enumerate()
    {
        let (tokens, part) = (vec![place as u32, 9], bytes(size, place as u8));
        let other = bytes(100, 3);
        let parts = [Part { name: "kv", bytes: &part }, Part { name: "other", bytes: &other }];
        let stored = store.put(&provenance(), &tokens, &parts, None, 1).expect("room");
        assert!(stored.written);
        assert!(!store.put(&provenance(), &tokens, &parts, None, 2).expect("there").written);
        let shard = store.get(&provenance(), &tokens, 3).expect("whole").expect("there");
        let mut memory = vec![0; size + 8192];
        let aligned = memory.as_ptr().align_offset(4096);
        for begin in [aligned, aligned + 1] {
            let out = &mut memory[begin..begin + size];
            let path = shard.read("kv", out).expect("whole");
            assert_eq!(out, part);
            let direct =
                if begin == aligned || size < 4096 { ReadPath::Direct } else { ReadPath::Bounced };
            assert!(path == direct || path == ReadPath::Refused, "{path:?} of {size} bytes");
        }
        assert_eq!(shard.read_part("other").expect("whole"), other);
        assert_eq!(shard.tokens().expect("whole"), tokens);
        store.verify(&stored.name).expect("whole");
    }
    let plain = StoreOptions { direct: false, threads: 1, ..StoreOptions::default() };
    let store = Store::open(&folder.path().join("store"), plain).expect("a store");
    let shard = store.get(&provenance(), &[7, 9], 3).expect("whole").expect("there");
    let mut out = vec![0; (5 << 20) + 77];
    assert_eq!(shard.read("kv", &mut out).expect("whole"), ReadPath::Buffered);
    assert_eq!(out, bytes((5 << 20) + 77, 7));
}

#[test]
fn every_single_byte_is_looked_at() {
    let one = One::new(300);
    let whole = fs::read(one.file()).expect("the file");
    assert_eq!(whole.len(), 3 * 4096);
    let file = fs::File::options().write(true).open(one.file()).expect("the file");
    let store = opened(&one.root);
    for (at, byte) in whole.iter().enumerate() {
        file.write_all_at(&[byte ^ (1 << (at % 8))], at as u64).expect("written");
        let shard = store.get(&provenance(), &one.tokens, 5);
        let read = shard.and_then(|shard| shard.expect("a file").read_part("kv"));
        let kind = read.expect_err("a refusal").kind();
        file.write_all_at(&[*byte], at as u64).expect("written");
        let known = [ErrorKind::Corrupt, ErrorKind::Truncated, ErrorKind::OtherSchema];
        assert!(known.contains(&kind), "byte {at}: {kind:?}");
    }
    assert_eq!(one.read().expect("whole"), Some(one.part.clone()));
}

#[test]
fn files_that_end_early_or_go_on_are_refused() {
    let one = One::new(9000);
    let whole = fs::read(one.file()).expect("the file");
    for end in (0..64).chain((64..whole.len()).step_by(509)) {
        fs::write(one.file(), &whole[..end]).expect("written");
        assert_eq!(one.kind(), ErrorKind::Truncated, "{end} bytes");
    }
    for more in [1, 4096, whole.len()] {
        fs::write(one.file(), [&*whole, &vec![0; more]].concat()).expect("written");
        assert_eq!(one.kind(), ErrorKind::Corrupt, "{more} more bytes");
    }
}

#[test]
fn other_schemas_are_named_newer_and_older() {
    let one = One::new(10);
    let whole = fs::read(one.file()).expect("the file");
    for (schema, says) in [(0u32, "an older one, 0"), (2, "a newer one, 2")] {
        let mut other = whole.clone();
        other[8..12].copy_from_slice(&schema.to_le_bytes());
        fs::write(one.file(), &other).expect("written");
        let error = one.read().expect_err("a refusal");
        assert_eq!((error.kind(), error.got()), (ErrorKind::OtherSchema, says));
        // It is nobody's to remove: the version that wrote it may come back.
        opened(&one.root).collect(9).expect("collected");
        assert!(one.file().exists());
    }
}

/// The file with another text in its head, every checksum and size right: no accident made it.
fn resealed(whole: &[u8], change: impl Fn(String) -> String) -> Vec<u8> {
    let length = u32::from_le_bytes(whole[12..16].try_into().expect("four bytes")) as usize;
    let text = change(String::from_utf8(whole[32..32 + length].to_vec()).expect("JSON"));
    let mut head = whole[..12].to_vec();
    head.extend((text.len() as u32).to_le_bytes());
    let padded = (32 + text.len()).next_multiple_of(4096);
    let old = (32 + length).next_multiple_of(4096);
    head.extend(((whole.len() - old + padded) as u64).to_le_bytes());
    let sealed = [&*head, text.as_bytes()].concat();
    head.extend(xxhash_rust::xxh3::xxh3_64(&sealed).to_le_bytes());
    head.extend(text.bytes());
    head.resize(padded, 0);
    [head, whole[old..].to_vec()].concat()
}

#[test]
fn sizes_and_fields_that_lie_are_refused() {
    let one = One::new(5000);
    let whole = fs::read(one.file()).expect("the file");
    let lies: [(&str, &str); 12] = [
        ("\"bytes\":5000", "\"bytes\":5001"),
        ("\"bytes\":5000", "\"bytes\":50000000000000"),
        ("\"bytes\":5000", "\"bytes\":18446744073709551615"),
        ("\"bytes\":5000", "\"bytes\":-1"),
        ("\"tokens\":70,", "\"tokens\":71,"),
        ("\"tokens\":70,", "\"tokens\":4611686018427387974,"),
        ("\"tokens\":70,", "\"tokens\":0,"),
        ("\"name\":\"kv\"", "\"name\":\"tokens\""),
        ("\"name\":\"kv\"", "\"name\":\"\""),
        ("\"layers\":2", "\"layers\":0"),
        ("\"dtype\":\"bf16\"", "\"dtype\":\"f64\""),
        ("\"expires\":null", "\"expires\":null,\"more\":1"),
    ];
    for (old, new) in lies {
        fs::write(one.file(), resealed(&whole, |text| text.replacen(old, new, 1)))
            .expect("written");
        assert_ne!(fs::read(one.file()).expect("the file"), whole, "{old} is not in the text");
        assert_eq!(one.kind(), ErrorKind::Corrupt, "{new}");
    }
    for text in ["", "{", "null", "[[[[[[[[", "\u{0}"] {
        fs::write(one.file(), resealed(&whole, |_| text.to_owned())).expect("written");
        assert_eq!(one.kind(), ErrorKind::Corrupt, "{text}");
    }
    fs::write(one.file(), resealed(&whole, |text| text)).expect("written");
    assert!(one.read().expect("whole").is_some());
}

#[test]
fn a_shard_of_anything_else_is_foreign_by_the_field_that_differs() {
    let one = One::new(100);
    type Change = fn(&mut Provenance);
    let others: [(&str, Change); 7] = [
        ("shard namespace", |p| p.namespace = "stranger".into()),
        ("shard model", |p| p.model = "other".into()),
        ("shard dtype", |p| p.dtype = Dtype::F16),
        ("shard rope regime", |p| p.regime = 0),
        ("shard head map", |p| p.heads.clear()),
        ("shard layout", |p| p.layout.kind = "packed".into()),
        ("shard layout", |p| p.layout.head_dim = 128),
    ];
    for (what, change) in others {
        let mut asked = provenance();
        change(&mut asked);
        let store = opened(&one.root);
        // Nobody finds it by asking for something else …
        assert!(store.get(&asked, &one.tokens, 5).expect("a miss").is_none());
        // … and where it lies under the other's name, it is seen for what it is.
        let name = asked.name(store.naming(), &one.tokens);
        let planted = one.root.join("shards").join(format!("{name}.kv"));
        fs::copy(one.file(), &planted).expect("copied");
        let error = store.get(&asked, &one.tokens, 5).expect_err("a refusal");
        assert_eq!((error.kind(), error.what()), (ErrorKind::Foreign, what));
        assert!(!error.to_string().contains("tenant"), "{error}");
        assert_eq!(store.verify(&name).expect_err("a refusal").kind(), ErrorKind::Foreign);
    }
    // The same field by field, other tokens.
    let store = opened(&one.root);
    let other: Vec<u32> = one.tokens.iter().map(|token| token ^ 1).collect();
    let name = provenance().name(store.naming(), &other);
    fs::copy(one.file(), one.root.join("shards").join(format!("{name}.kv"))).expect("copied");
    let error = store.get(&provenance(), &other, 5).expect_err("a refusal");
    assert_eq!((error.kind(), error.what()), (ErrorKind::Foreign, "shard tokens"));
}

#[test]
fn what_is_spoiled_is_replaced_by_the_next_that_computes_it() {
    let one = One::new(9000);
    let mut spoiled = fs::read(one.file()).expect("the file");
    let last = spoiled.len() - 4096;
    spoiled[last] ^= 1;
    fs::write(one.file(), &spoiled).expect("written");
    let store = opened(&one.root);
    let shard = store.get(&provenance(), &one.tokens, 5).expect("a good head").expect("there");
    assert_eq!(shard.read_part("kv").expect_err("a refusal").kind(), ErrorKind::Corrupt);
    assert_eq!(store.verify(&one.name).expect_err("a refusal").kind(), ErrorKind::Corrupt);
    let parts = [Part { name: "kv", bytes: &one.part }];
    assert!(store.put(&provenance(), &one.tokens, &parts, None, 6).expect("room").written);
    assert_eq!(one.read().expect("whole"), Some(one.part.clone()));
    store.verify(&one.name).expect("whole");
}

#[test]
fn arguments_that_cannot_be_are_refused_and_write_nothing() {
    let folder = folder();
    let root = folder.path().join("store");
    let store = opened(&root);
    let huge = "n/".repeat(5 << 20);
    let part = Part { name: "kv", bytes: b"x" };
    type Change = fn(&mut Provenance, String);
    let changes: [Change; 5] = [
        |p, huge| p.namespace = huge,
        |p, huge| p.model = huge,
        |p, _| p.model.clear(),
        |p, huge| p.heads = huge,
        |p, _| p.layout.layers = 0,
    ];
    for change in changes {
        let mut asked = provenance();
        change(&mut asked, huge.clone());
        let error = store.put(&asked, &[1], &[part], None, 1).expect_err("a refusal");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().len() < 500);
        assert!(store.get(&asked, &[1], 1).is_err());
    }
    let many: Vec<String> = (0..10_000).map(|number| format!("part {number}")).collect();
    let many: Vec<Part<'_>> = many.iter().map(|name| Part { name, bytes: b"" }).collect();
    for parts in [
        &[part, part][..],
        &[Part { name: "tokens", ..part }],
        &[Part { name: &huge, ..part }],
        &many,
    ] {
        let error = store.put(&provenance(), &[1], parts, None, 1).expect_err("a refusal");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert!(store.put(&provenance(), &[], &[part], None, 1).is_err());
    for name in ["", "..", "../../etc", "ABCDEF", &"a".repeat(33), &huge] {
        assert_eq!(ShardName::parse(name).expect_err("none").kind(), ErrorKind::InvalidArgument);
    }
    assert!(store.list(None).expect("a list").is_empty());
    assert_eq!(fs::read_dir(root.join("writing")).expect("a folder").count(), 0);
    // Slashes and the like are names as any other.
    let odd = Provenance { namespace: "../a/\0b".into(), ..provenance() };
    let stored = store.put(&odd, &[1], &[part], None, 1).expect("room");
    store.name("../a/\0b", "/etc/passwd\n", &stored.name).expect("named");
    let found = opened(&root).document("../a/\0b", "/etc/passwd\n", 1).expect("whole");
    assert_eq!(found.map(|(name, _)| name), Some(stored.name));
    assert_eq!(
        store
            .name("../a/\0b", &huge, &ShardName::parse(&"a".repeat(32)).expect("a name"))
            .expect_err("a refusal")
            .kind(),
        ErrorKind::InvalidArgument
    );
}

#[test]
fn a_store_keeps_its_naming() {
    let folder = folder();
    let root = folder.path().join("store");
    let hostile = || StoreOptions { naming: Some(Naming::Sha256), ..StoreOptions::default() };
    let store = Store::open(&root, hostile()).expect("a store");
    let part = Part { name: "kv", bytes: b"x" };
    let name = store.put(&provenance(), &[1], &[part], None, 1).expect("room").name;
    assert_eq!(name.as_str().len(), 64);
    assert_eq!(opened(&root).naming(), Naming::Sha256);
    let other = StoreOptions { naming: Some(Naming::Xxh3), ..StoreOptions::default() };
    let error = Store::open(&root, other).err().expect("a refusal");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    fs::write(root.join("store.json"), "{}").expect("written");
    assert_eq!(Store::open(&root, hostile()).err().expect("a refusal").kind(), ErrorKind::Corrupt);
}

/// A shard for all cases, and its file as it was written.
static SPOILED: LazyLock<(One, Vec<u8>)> = LazyLock::new(|| {
    let one = One::new(9000);
    let whole = fs::read(one.file()).expect("the file");
    (one, whole)
});

/// Where bytes are taken out, how many, and what is put there.
fn cut() -> impl Strategy<Value = (prop::sample::Index, usize, Vec<u8>)> {
    (any::<prop::sample::Index>(), 0usize..9000, prop::collection::vec(any::<u8>(), 0..20))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// However a file is spoiled, what is read of it is what was written, or nothing.
    #[test]
    fn spoiled_files_are_refused(
        cuts in prop::collection::vec(cut(), 1..4),
        head in any::<bool>(),
    ) {
        let (one, whole) = &*SPOILED;
        let mut spoiled = whole.clone();
        for (at, length, new) in cuts {
            let begin = at.index(if head { 600 } else { spoiled.len() }).min(spoiled.len());
            let end = (begin + length).min(spoiled.len());
            spoiled.splice(begin..end, new);
        }
        fs::write(one.file(), &spoiled).expect("written");
        match one.read() {
            Ok(found) => prop_assert!(found == Some(one.part.clone()) && spoiled == *whole),
            Err(error) => prop_assert!(error.kind() != ErrorKind::Io, "{error}"),
        }
    }
}
