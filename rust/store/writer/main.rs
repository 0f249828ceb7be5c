//! A process that writes to a store until it is told to stop or killed, for tests. It says on its
//! standard output what was acknowledged, one line each, before it goes on.
//!
//! `store-writer ROOT SEED ROUNDS [CAPACITY]`: writes shards whose bytes follow from `SEED` and a
//! number, names every third, deletes some; with a capacity others are evicted.
//! `store-writer ROOT SEED fill`: writes until there is no room, and says how it was refused.

use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use content::{content, provenance};
use kvweave_store::{Budget, ErrorKind, Part, ShardName, Store, StoreOptions};

mod content;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [root, seed, rounds, capacity @ ..] = words.as_slice() else {
        return Err("expected ROOT SEED ROUNDS [CAPACITY]".into());
    };
    let budget = Budget {
        capacity: capacity.first().map(|text| text.parse()).transpose()?,
        ..Budget::default()
    };
    let store = Store::open(Path::new(root), StoreOptions { budget, ..StoreOptions::default() })?;
    let seed = seed.parse()?;
    if rounds == "fill" { fill(&store, seed) } else { work(&store, seed, rounds.parse()?) }
}

fn work(store: &Store, seed: u64, rounds: u64) -> Result<(), Box<dyn Error>> {
    let mut kept: Option<(u64, ShardName)> = None;
    for number in 0..rounds {
        let name = put(store, seed, number)?;
        say(&format!("put {seed} {number}"))?;
        if number % 3 == 0 {
            store.name("writer", &format!("{seed}/{number}"), &name)?;
            say(&format!("named {seed} {number}"))?;
        }
        if number % 5 == 4
            && let Some((number, name)) = kept.take()
        {
            // From here on it may be there or not, until the next line.
            say(&format!("deleting {seed} {number}"))?;
            store.delete(&name)?;
            say(&format!("deleted {seed} {number}"))?;
        }
        if number % 3 == 1 {
            kept = Some((number, name));
        }
    }
    Ok(())
}

fn fill(store: &Store, seed: u64) -> Result<(), Box<dyn Error>> {
    for number in 0..10_000 {
        if let Err(refused) = put(store, seed, number) {
            let error = refused.downcast::<kvweave_store::StoreError>()?;
            let full = error.kind() == ErrorKind::DiskFull;
            say(&format!("{} {error}", if full { "full" } else { "refused" }))?;
            return Ok(());
        }
        say(&format!("put {seed} {number}"))?;
    }
    Err("expected a disk that ends".into())
}

fn put(store: &Store, seed: u64, number: u64) -> Result<ShardName, Box<dyn Error>> {
    let (tokens, bytes) = content(seed, number);
    let parts = [Part { name: "kv", bytes: &bytes }];
    let now = 1_000 * number;
    Ok(store.put(&provenance(), &tokens, &parts, None, now)?.name)
}

fn say(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes())?;
    out.flush()
}
