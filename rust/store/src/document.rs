//! Documents: names, of a namespace each, for shards that are kept until the name is taken away.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{ErrorKind, StoreError};
use crate::identity::{Naming, ShardName, brief, check_name};

const SCHEMA: u32 = 1;
const MOST_BYTES: usize = 1 << 16;

/// One document.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Document {
    /// Whose it is.
    pub namespace: String,
    /// Its name there.
    pub name: String,
    /// What it names.
    pub shard: ShardName,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    schema: u32,
    namespace: String,
    name: String,
    shard: String,
}

impl Document {
    /// The name of its file. Slashes, and whatever else a name may have, stay inside.
    pub fn file_name(naming: Naming, namespace: &str, name: &str) -> String {
        let mut named = (namespace.len() as u64).to_le_bytes().to_vec();
        named.extend(namespace.as_bytes());
        named.extend(name.as_bytes());
        format!("{}.json", naming.hex(&named))
    }

    /// Refuses names that no document may have.
    pub fn check(namespace: &str, name: &str) -> Result<(), StoreError> {
        check_name("namespace", namespace, 0)?;
        check_name("document name", name, 1)
    }

    /// Its file: a checksum, and the JSON that it is of.
    pub fn encode(&self) -> Vec<u8> {
        let record = Record {
            schema: SCHEMA,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            shard: self.shard.to_string(),
        };
        sealed(&serde_json::to_string(&record).unwrap_or_default())
    }

    /// A document from a file of unknown origin.
    ///
    /// # Errors
    /// `Corrupt`, `OtherSchema`.
    pub fn decode(bytes: &[u8]) -> Result<Document, StoreError> {
        let record: Record = unsealed(bytes, "document")?;
        expect_schema("document", record.schema, SCHEMA)?;
        let as_damage = |error: StoreError| {
            StoreError::corrupt(error.what(), error.expected(), error.got().to_owned())
        };
        Document::check(&record.namespace, &record.name).map_err(as_damage)?;
        let shard = ShardName::parse(&record.shard).map_err(as_damage)?;
        Ok(Document { namespace: record.namespace, name: record.name, shard })
    }
}

/// A text behind its checksum.
pub fn sealed(text: &str) -> Vec<u8> {
    format!("{:016x} {text}\n", xxh3_64(text.as_bytes())).into_bytes()
}

/// What JSON behind its checksum says.
pub fn unsealed<T: for<'a> Deserialize<'a>>(bytes: &[u8], what: &str) -> Result<T, StoreError> {
    let spoiled = || StoreError::corrupt(what, "JSON behind its checksum", "something else");
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= MOST_BYTES);
    let (seal, text) =
        text.and_then(|t| t.strip_suffix('\n')?.split_once(' ')).ok_or_else(spoiled)?;
    if seal != format!("{:016x}", xxh3_64(text.as_bytes())) {
        return Err(spoiled());
    }
    serde_json::from_str(text)
        .map_err(|error| StoreError::corrupt(what, "its fields", brief(&error.to_string())))
}

/// Refuses a record of another schema.
pub fn expect_schema(what: &str, found: u32, own: u32) -> Result<(), StoreError> {
    if found == own {
        return Ok(());
    }
    let age = if found > own { "a newer" } else { "an older" };
    let got = format!("{age} one, {found}");
    let what = format!("{what} schema");
    Err(StoreError::new(ErrorKind::OtherSchema, what, format!("schema {own}"), got))
}
