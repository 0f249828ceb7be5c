//! What a folder says of itself as a store, and that it is one.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::document::{expect_schema, sealed, unsealed};
use crate::error::{ErrorKind, StoreError};
use crate::folder::Folder;
use crate::header::SCHEMA;
use crate::identity::{Naming, brief, check_name, is_of};

/// What lies in the folder's own file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    schema: u32,
    /// How names are made.
    pub naming: Naming,
    /// The model that the folder belongs to; none where nobody has asked for it, as before there
    /// were owners, or where several models may use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

impl Record {
    fn write(&self, folder: &Folder) -> Result<(), StoreError> {
        let bytes = sealed(&serde_json::to_string(self).unwrap_or_default());
        let beside = folder.write_beside(bytes.len() as u64, |file| file.write_all(&bytes))?;
        beside.publish(&folder.record())
    }
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

/// The folder's own record, made where it is missing. Whoever asks may change the folder.
pub fn record(folder: &Folder, wanted: Option<Naming>) -> Result<Record, StoreError> {
    let bytes = match fs::read(folder.record()) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let naming = wanted.unwrap_or_default();
            let made = Record { schema: SCHEMA, naming, model: None };
            made.write(folder)?;
            return Ok(made);
        }
        other => other.map_err(|error| StoreError::io("store record", "to be read", &error))?,
    };
    let found: Record = unsealed(&bytes, "store record")?;
    expect_schema("store", found.schema, SCHEMA)?;
    if let Some(model) = &found.model {
        let damage = |e: StoreError| StoreError::corrupt("store record", e.expected(), e.got());
        check_name("model", model, 1).map_err(damage)?;
    }
    match wanted {
        Some(naming) if naming != found.naming => {
            let expected = format!("{}, as the store has it", found.naming.name());
            Err(StoreError::invalid("hash", expected, naming.name()))
        }
        _ => Ok(found),
    }
}

/// Refuses a folder that is another model's, and makes one that is nobody's the model's own.
///
/// `held`: the models of its shards. A folder of before there were owners belongs to the one model
/// whose shards it holds. Where several models have written, it goes on to belong to none of them.
/// Whoever asks may change the folder, so that of two models that start at once one has it.
///
/// # Errors
/// `InvalidArgument` for a name that no model may have, `OtherModel`, `DiskFull`, `Io`.
pub fn claim<'a>(
    folder: &Folder,
    record: &mut Record,
    model: &str,
    held: impl Iterator<Item = &'a str>,
) -> Result<(), StoreError> {
    check_name("model", model, 1)?;
    let refused = |got: &str| {
        let what = format!("store {}", folder.root().display());
        let expected = format!("a folder of model {}, or a new one", brief(model));
        Err(StoreError::new(
            ErrorKind::OtherModel,
            what,
            expected,
            format!("one of {}", brief(got)),
        ))
    };
    match &record.model {
        Some(owner) if owner == model => return Ok(()),
        Some(owner) => return refused(owner),
        None => {}
    }
    let (mut own, mut other) = (false, None);
    for found in held {
        if is_of(found, model) {
            own = true;
        } else {
            other = Some(found);
        }
    }
    match other {
        Some(_) if own => Ok(()),
        Some(found) => refused(found),
        None => {
            record.model = Some(model.to_owned());
            record.write(folder)
        }
    }
}
