//! What a folder says of itself as a store, and that it is one.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::document::{expect_schema, sealed, unsealed};
use crate::error::{ErrorKind, StoreError};
use crate::folder::Folder;
use crate::header::SCHEMA;
use crate::identity::{Naming, brief};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    schema: u32,
    naming: Naming,
}

/// Refuses a folder that holds something else.
pub fn expect_ours(root: &Path, create: bool) -> Result<(), StoreError> {
    const OURS: [&str; 5] = ["store.json", "lock", "shards", "documents", "writing"];
    let what = || format!("store {}", root.display());
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && create => return Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(StoreError::new(ErrorKind::Unknown, what(), "a store", "no folder"));
        }
        other => other.map_err(|error| StoreError::io(what(), "a folder", &error))?,
    };
    let mut empty = true;
    for entry in entries {
        let entry = entry.map_err(|error| StoreError::io(what(), "a folder", &error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !OURS.contains(&&*name) {
            let got = brief(&name);
            return Err(StoreError::invalid(what(), "a store or an empty folder", got));
        }
        empty &= name != "store.json";
    }
    if empty && !create {
        return Err(StoreError::new(ErrorKind::Unknown, what(), "a store", "an empty folder"));
    }
    Ok(())
}

/// The folder's own record, made where it is missing.
pub fn record(folder: &Folder, wanted: Option<Naming>) -> Result<Naming, StoreError> {
    let path = folder.record();
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let naming = wanted.unwrap_or_default();
            let text = serde_json::to_string(&Record { schema: SCHEMA, naming });
            let bytes = sealed(&text.unwrap_or_default());
            let beside = folder.write_beside(bytes.len() as u64, |file| file.write_all(&bytes))?;
            beside.publish(&path)?;
            return Ok(naming);
        }
        other => other.map_err(|error| StoreError::io("store record", "to be read", &error))?,
    };
    let found: Record = unsealed(&bytes, "store record")?;
    expect_schema("store", found.schema, SCHEMA)?;
    match wanted {
        Some(naming) if naming != found.naming => {
            let expected = format!("{}, as the store has it", found.naming.name());
            Err(StoreError::invalid("hash", expected, naming.name()))
        }
        _ => Ok(found.naming),
    }
}
