//! Real processes: writers that are killed at any moment, several at once, a disk that ends.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kvweave_store::{Budget, Part, ShardName, Store, StoreOptions};
use tempfile::TempDir;

use content::{content, provenance};

#[path = "../writer/content.rs"]
mod content;

const WRITER: &str = env!("CARGO_BIN_EXE_store-writer");

/// On the disk that the tree is on: what memory file systems lose is another matter.
fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn opened(root: &Path) -> Store {
    Store::open(root, StoreOptions::default()).expect("a store")
}

fn writer(root: &Path, words: &[&str]) -> Child {
    let mut command = Command::new(WRITER);
    command.arg(root).args(words).stdout(Stdio::piped());
    command.spawn().expect("a process")
}

/// Everything that a process has said, until its end.
fn said(child: &mut Child) -> Vec<String> {
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    // A line goes into the pipe whole or not at all.
    out.split(b'\n').map(|line| String::from_utf8(line.expect("a pipe")).expect("text")).collect()
}

/// What was acknowledged and not taken back, and what may or may not be there.
#[derive(Default)]
struct Acknowledged {
    held: HashSet<(u64, u64)>,
    named: HashSet<(u64, u64)>,
    open: HashSet<(u64, u64)>,
}

impl Acknowledged {
    fn hear(&mut self, lines: &[String]) {
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            let [verb, seed, number] = words[..] else { panic!("{line}") };
            let shard = (seed.parse().expect("a seed"), number.parse().expect("a number"));
            match verb {
                "put" => drop(self.held.insert(shard)),
                "named" => drop(self.named.insert(shard)),
                "deleting" => drop((self.held.remove(&shard), self.open.insert(shard))),
                "deleted" => drop(self.open.remove(&shard)),
                _ => panic!("{line}"),
            }
        }
    }

    /// All that was acknowledged is there, whole; what is there besides is whole, too.
    fn expect_kept(&self, store: &Store) {
        for &(seed, number) in &self.held {
            let (tokens, bytes) = content(seed, number);
            let shard = store.get(&provenance(), &tokens, 0).expect("whole");
            let shard = shard.unwrap_or_else(|| panic!("{seed} {number} was lost"));
            assert!(shard.read_part("kv").expect("whole") == bytes, "{seed} {number}");
        }
        for &(seed, number) in &self.named {
            let found = store.document("writer", &format!("{seed}/{number}"), 0).expect("whole");
            let (name, _) = found.unwrap_or_else(|| panic!("{seed}/{number} was lost"));
            assert_eq!(name, provenance().name(store.naming(), &content(seed, number).0));
        }
    }
}

/// Nothing in the folder is torn, whoever wrote it and whether or not he could say so.
fn expect_whole(store: &Store) -> HashSet<ShardName> {
    let listed = store.list(None).expect("a list");
    let names: HashSet<ShardName> = listed.into_iter().map(|listed| listed.name).collect();
    for name in &names {
        store.verify(name).expect("whole");
        let shard = store.open_shard(name).expect("whole").expect("there");
        let tokens = shard.tokens().expect("whole");
        let (_, bytes) = content(tokens[0].into(), tokens[1].into());
        assert!(shard.read_part("kv").expect("whole") == bytes, "{tokens:?}");
    }
    assert!(store.verify_documents().expect("a list").is_empty());
    names
}

/// What one shard takes to be written here: disks differ by hundreds in how they sync.
fn pace(root: &Path) -> Duration {
    let store = opened(root);
    let start = Instant::now();
    for number in 0..5 {
        let (tokens, bytes) = content(0, number);
        let parts = [Part { name: "kv", bytes: &bytes }];
        store.put(&provenance(), &tokens, &parts, None, 0).expect("room");
    }
    start.elapsed() / 5
}

/// Starts writers and kills each at a moment of its own. Returns how many lines were acknowledged
/// in all, and how many writers died while they wrote a file.
fn kill(times: u64) -> (usize, usize) {
    let folder = folder();
    let root = folder.path().join("store");
    let pace = pace(&folder.path().join("pace"));
    let (mut acknowledged, mut count, mut torn) = (Acknowledged::default(), 0, 0);
    for seed in 0..times {
        let mut child = writer(&root, &[&seed.to_string(), "1000000"]);
        // From before the store is open on to some shards.
        thread::sleep(pace.mul_f64((seed * 7919 % 1000) as f64 / 125.0));
        child.kill().expect("killed");
        let lines = said(&mut child);
        child.wait().expect("ended");
        acknowledged.hear(&lines);
        count += lines.len();
        torn += root.join("writing").read_dir().map_or(0, Iterator::count);
        // All of one writer at once; all that is there every now and then, and then anew.
        let store = opened(&root);
        let mut own = Acknowledged::default();
        own.hear(&lines);
        own.expect_kept(&store);
        let writing = root.join("writing").read_dir().expect("a folder").count();
        assert_eq!(writing, 0, "leftovers stay");
        if seed % 50 == 49 || seed + 1 == times {
            acknowledged.expect_kept(&store);
            expect_whole(&store);
            std::fs::remove_dir_all(&root).expect("removed");
            acknowledged = Acknowledged::default();
        }
    }
    (count, torn)
}

#[test]
fn nothing_that_was_acknowledged_is_lost_and_nothing_torn_is_served() {
    let (count, torn) = kill(50);
    assert!(count > 20 && torn > 0, "{count} lines, {torn} files were cut off");
}

#[test]
#[ignore = "takes a minute or two: make kill-store"]
fn nothing_is_lost_in_a_thousand_kills() {
    let (count, torn) = kill(1000);
    println!("1000 kills: {count} lines acknowledged, {torn} files cut off");
    assert!(count > 1000 && torn > 100);
}

#[test]
fn writers_and_readers_share_a_folder() {
    let folder = folder();
    let root = folder.path().join("store");
    let store = opened(&root);
    let mut children: Vec<Child> = ["1", "2"].map(|seed| writer(&root, &[seed, "40"])).into();
    // A third writes what the first does, and reads what it finds, all the while.
    let mut met = 0;
    for number in (0..40).cycle().take(400) {
        let (tokens, bytes) = content(1, number);
        if let Some(shard) = store.get(&provenance(), &tokens, 0).expect("whole or none") {
            assert!(shard.read_part("kv").expect("whole") == bytes);
            met += 1;
        }
        if number % 8 == 0 {
            let parts = [Part { name: "kv", bytes: &bytes }];
            store.put(&provenance(), &tokens, &parts, None, 0).expect("room");
        }
    }
    assert!(met > 0);
    let mut acknowledged = Acknowledged::default();
    for child in &mut children {
        acknowledged.hear(&said(child));
        assert!(child.wait().expect("ended").success());
    }
    // What the third put again after the first had deleted it may be there.
    acknowledged.expect_kept(&store);
    acknowledged.expect_kept(&opened(&root));
    assert_eq!(expect_whole(&store), expect_whole(&opened(&root)));
}

#[test]
fn a_budget_holds_for_all_processes_together() {
    let folder = folder();
    let root = folder.path().join("store");
    const CAPACITY: u64 = 1_500_000;
    let capacity = CAPACITY.to_string();
    // Names keep half of what two write within what both may hold.
    let words = |seed: &'static str| [seed, "12", &*capacity].map(str::to_owned);
    let mut children: Vec<Child> = ["1", "2"]
        .map(|seed| writer(&root, &words(seed).iter().map(|w| &**w).collect::<Vec<_>>()))
        .into();
    for child in &mut children {
        said(child);
        assert!(child.wait().expect("ended").success());
    }
    let budget = Budget { capacity: Some(CAPACITY), ..Budget::default() };
    let store = Store::open(&root, StoreOptions { budget, ..StoreOptions::default() });
    let store = store.expect("a store");
    let (held, _) = store.held().expect("books");
    assert!((CAPACITY / 2..=CAPACITY).contains(&held), "{held}");
    expect_whole(&store);
    assert_eq!(store.documents(None).expect("a list").len(), 8);
}

/// Runs the writer until it has no room, in a shell that makes room scarce first.
fn fill(root: &Path, shell: &str) -> Option<Vec<String>> {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-ec", shell, "sh"]);
    let done = command.arg(WRITER).arg(root).output().ok()?;
    let lines = String::from_utf8(done.stdout).expect("text");
    let lines: Vec<String> = lines.lines().map(str::to_owned).collect();
    done.status.success().then_some(lines)
}

fn expect_said_so(lines: &[String]) -> Acknowledged {
    let (last, before) = lines.split_last().expect("something was said");
    assert!(last.starts_with("full shard: expected to be written, got "), "{last}");
    assert!(before.len() > 2, "{lines:?}");
    let mut acknowledged = Acknowledged::default();
    acknowledged.hear(before);
    acknowledged
}

/// A disk of 2 MB, real though in memory: it fills up, says so, and what was acknowledged is read
/// by another process. Where this user may mount nothing, the limit of the next test stands alone.
#[test]
fn a_full_disk_says_so_and_loses_nothing() {
    let folder = folder();
    let root = folder.path().join("disk");
    std::fs::create_dir(&root).expect("made");
    let copied = folder.path().join("copied");
    let shell = format!(
        "mount -t tmpfs -o size=2m tmpfs \"$2\"; \"$1\" \"$2\" 5 fill; \"$1\" \"$2\" 5 fill; \
         cp -r \"$2\" \"{}\"",
        copied.display()
    );
    let Some(lines) = fill(&root, &shell) else {
        println!("no user namespaces with mounts here: a full disk was not tried");
        return;
    };
    let refused = lines.iter().position(|line| line.starts_with("full")).expect("a full disk");
    let acknowledged = expect_said_so(&lines[..=refused]);
    // Who tries again finds all that was there, and is refused at the same shard.
    assert_eq!(lines[refused + 1..], lines[..=refused]);
    let store = opened(&copied);
    acknowledged.expect_kept(&store);
    assert_eq!(expect_whole(&store).len(), acknowledged.held.len());
    assert_eq!(copied.join("writing").read_dir().expect("a folder").count(), 0);
}

/// No file beyond 100 kB, by the process's own limit.
#[test]
fn a_file_that_may_not_be_so_large_says_so_and_loses_nothing() {
    let folder = folder();
    let root = folder.path().join("store");
    let shell = "trap '' XFSZ; ulimit -f 200; exec \"$1\" \"$2\" 6 fill";
    let done = Command::new("sh").args(["-ec", shell, "sh", WRITER]).arg(&root).output();
    let done = done.expect("a shell");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let lines = String::from_utf8(done.stdout).expect("text");
    let lines: Vec<String> = lines.lines().map(str::to_owned).collect();
    let (last, before) = lines.split_last().expect("something was said");
    assert!(last.starts_with("full shard: expected to be written, got "), "{last}");
    let mut acknowledged = Acknowledged::default();
    acknowledged.hear(before);
    assert_eq!(root.join("writing").read_dir().expect("a folder").count(), 0);
    let store = opened(&root);
    acknowledged.expect_kept(&store);
    assert_eq!(expect_whole(&store).len(), acknowledged.held.len());
}
