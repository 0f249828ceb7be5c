//! The head of a shard's file: what it holds, checked field by field before any of it is believed.
//!
//! ```text
//! 0   8  magic
//! 8   4  schema
//! 12  4  bytes of the text H
//! 16  8  bytes of the file
//! 24  8  XXH3 of the 24 bytes before and the text
//! 32  H  the text: JSON
//! …      zeros up to a multiple of 4096; then the parts, each followed by zeros up to a multiple
//! ```
//! Integers are little-endian. Magic and schema stay where they are in every schema.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::checksum::{is_zero, of_hashes, of_part};
use crate::error::{ErrorKind, StoreError};
use crate::identity::{MOST_TOKENS, Provenance, brief, check_name};

/// What files are aligned to, which direct reads ask for.
pub const ALIGN: u64 = 4096;
/// The schema that is written, and the one that is read.
pub const SCHEMA: u32 = 1;
/// The part that holds the token ids, u32 little-endian; always the first.
pub const TOKENS: &str = "tokens";

const MAGIC: [u8; 8] = *b"KVWSHARD";
const FIXED: usize = 32;
const MOST_TEXT: usize = 1 << 18;

/// A part to be written.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Its name; not [`TOKENS`], which is written of the tokens themselves.
    pub name: &'a str,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// One part: a run of bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartEntry {
    /// Its name, unlike that of any other part.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// See [`crate::checksum`].
    pub checksum: u64,
}

impl PartEntry {
    /// The entry of some bytes.
    #[must_use]
    pub fn of(name: &str, bytes: &[u8]) -> PartEntry {
        let checksum = of_part(bytes);
        PartEntry { name: name.to_owned(), bytes: bytes.len() as u64, checksum }
    }

    /// Refuses the hashes of all chunks of a part, in order, that are not those of its checksum.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn check_hashes(&self, hashes: &[u64]) -> Result<(), StoreError> {
        if of_hashes(hashes, self.bytes) == self.checksum {
            return Ok(());
        }
        let what = format!("shard part {}", self.name);
        Err(StoreError::corrupt(what, "the bytes of its checksum", "others"))
    }

    /// Refuses bytes that are not the part's, with the zeros behind it that a file has.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of bytes, `Corrupt`.
    pub fn check(&self, bytes: &[u8]) -> Result<(), StoreError> {
        let what = || format!("shard part {}", self.name);
        if bytes.len() as u64 != self.bytes.next_multiple_of(ALIGN) {
            let expected = format!("{} bytes and zeros up to a block", self.bytes);
            return Err(StoreError::invalid(what(), expected, bytes.len()));
        }
        let (part, zeros) = bytes.split_at(self.bytes as usize);
        if of_part(part) != self.checksum {
            return Err(StoreError::corrupt(what(), "the bytes of its checksum", "others"));
        }
        if !is_zero(zeros) {
            return Err(StoreError::corrupt(what(), "zeros behind it", "others"));
        }
        Ok(())
    }
}

/// On what terms a shard is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Milliseconds since 1970 from which on it is nobody's hit any more.
    pub expires: Option<u64>,
    /// FLOPs that its KV took, for an order of eviction that weighs them.
    pub cost: Option<u64>,
}

impl From<Option<u64>> for Terms {
    fn from(expires: Option<u64>) -> Terms {
        Terms { expires, cost: None }
    }
}

/// What a shard says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardHeader {
    /// What its KV is of.
    pub provenance: Provenance,
    /// T.
    pub tokens: u64,
    /// Milliseconds since 1970 from which on it is nobody's hit any more.
    pub expires: Option<u64>,
    /// FLOPs that its KV took, where whoever wrote it said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<u64>,
    /// The token ids first.
    pub parts: Vec<PartEntry>,
    /// Where the first part begins.
    #[serde(skip)]
    body: u64,
}

impl ShardHeader {
    /// A header to be written.
    ///
    /// # Errors
    /// `InvalidArgument` for names, tokens or parts that no shard may have.
    pub fn new(
        provenance: Provenance,
        tokens: u64,
        terms: Terms,
        parts: Vec<PartEntry>,
    ) -> Result<ShardHeader, StoreError> {
        let Terms { expires, cost } = terms;
        let mut header = ShardHeader { provenance, tokens, expires, cost, parts, body: 0 };
        let text = header.text().len();
        if text > MOST_TEXT {
            let expected = format!("at most {MOST_TEXT} bytes of names and parts");
            return Err(StoreError::invalid("shard header", expected, text));
        }
        header.body = body(text);
        header.check().map_err(|error| {
            StoreError::invalid(error.what(), error.expected(), error.got().to_owned())
        })?;
        Ok(header)
    }

    /// The header of the shard of some tokens, whose ids are the first part.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn of(
        provenance: &Provenance,
        tokens: &[u32],
        parts: &[Part<'_>],
        terms: Terms,
    ) -> Result<ShardHeader, StoreError> {
        check_tokens(tokens)?;
        let ids = PartEntry::of(TOKENS, &ids_of(tokens));
        let parts = parts.iter().map(|part| PartEntry::of(part.name, part.bytes));
        let entries = [ids].into_iter().chain(parts).collect();
        Self::new(provenance.clone(), tokens.len() as u64, terms, entries)
    }

    /// Bytes that the file of such a shard has at most: names and sizes are known, no checksum.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn most_file_bytes(
        provenance: &Provenance,
        tokens: u64,
        parts: &[(&str, u64)],
        terms: Terms,
    ) -> Result<u64, StoreError> {
        let ids = (TOKENS, tokens.saturating_mul(4));
        let entry = |&(name, bytes): &(&str, u64)| PartEntry {
            name: name.to_owned(),
            bytes,
            checksum: u64::MAX,
        };
        let entries = [ids].iter().chain(parts).map(entry).collect();
        Self::new(provenance.clone(), tokens, terms, entries)?.file_bytes()
    }

    /// The part of a name, and where it begins in the file.
    #[must_use]
    pub fn part(&self, name: &str) -> Option<(u64, &PartEntry)> {
        self.placed().find(|(_, part)| part.name == name)
    }

    /// All parts, and where they begin. The sizes have been checked.
    pub fn placed(&self) -> impl Iterator<Item = (u64, &PartEntry)> {
        let mut at = self.body;
        self.parts.iter().map(move |part| {
            let begin = at;
            at += part.bytes.next_multiple_of(ALIGN);
            (begin, part)
        })
    }

    /// Whether it is nobody's hit any more.
    #[must_use]
    pub fn is_expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|end| now >= end)
    }

    /// The head of the file, zeros behind the text included.
    ///
    /// # Errors
    /// `Corrupt` for parts that are larger than any file.
    pub fn encode(&self) -> Result<Vec<u8>, StoreError> {
        let text = self.text();
        let mut head = Vec::with_capacity(FIXED + text.len());
        head.extend(MAGIC);
        head.extend(SCHEMA.to_le_bytes());
        head.extend((text.len() as u32).to_le_bytes());
        head.extend(self.file_bytes()?.to_le_bytes());
        head.extend(seal(&head, &text).to_le_bytes());
        head.extend(text);
        head.resize(head.len().next_multiple_of(ALIGN as usize), 0);
        Ok(head)
    }

    /// Bytes of the whole file.
    ///
    /// # Errors
    /// `Corrupt` for parts that are larger than any file.
    pub fn file_bytes(&self) -> Result<u64, StoreError> {
        let sum = self.parts.iter().try_fold(self.body, |sum, part| {
            sum.checked_add(part.bytes.checked_next_multiple_of(ALIGN)?)
        });
        let fits = sum.filter(|&sum| i64::try_from(sum).is_ok());
        fits.ok_or_else(|| StoreError::corrupt("shard parts", "sizes of a file", "larger ones"))
    }

    /// Reads and checks the head of a file, of which nothing is believed: no more is allocated than
    /// the file has.
    ///
    /// # Errors
    /// `Truncated`, `Corrupt`, `OtherSchema`, or `Io`.
    pub fn read(file: &File, found: &Metadata) -> Result<ShardHeader, StoreError> {
        let read = |error: io::Error| StoreError::io("shard", "to be read", &error);
        if !found.is_file() {
            let kind = ErrorKind::Foreign;
            return Err(StoreError::new(kind, "shard", "a file", "something else"));
        }
        let length = found.len();
        let mut head = vec![0; length.min(ALIGN) as usize];
        file.read_exact_at(&mut head, 0).map_err(read)?;
        let whole = Self::head_bytes(&head, length)?;
        if whole > head.len() {
            let begin = head.len();
            head.resize(whole, 0);
            file.read_exact_at(&mut head[begin..], begin as u64).map_err(read)?;
        }
        Self::of_head(&head, length)
    }

    /// How many bytes the head of a file of `length` bytes has, from the first of them.
    ///
    /// # Errors
    /// `Truncated`, `Corrupt`, `OtherSchema`.
    pub fn head_bytes(head: &[u8], length: u64) -> Result<usize, StoreError> {
        let whole = body(text_bytes(head, length)?);
        if length < whole {
            return Err(StoreError::truncated(whole, length));
        }
        Ok(whole as usize)
    }

    /// The header in the head of a file of `length` bytes, checked as by [`Self::read`].
    ///
    /// # Errors
    /// `Truncated`, `Corrupt`, `OtherSchema`.
    pub fn of_head(head: &[u8], length: u64) -> Result<ShardHeader, StoreError> {
        let whole = Self::head_bytes(head, length)?;
        if head.len() < whole {
            return Err(StoreError::truncated(whole as u64, head.len() as u64));
        }
        Self::decode(&head[..whole], text_bytes(head, length)?, length)
    }

    fn decode(head: &[u8], text: usize, length: u64) -> Result<ShardHeader, StoreError> {
        let (sealed, zeros) = (&head[FIXED..FIXED + text], &head[FIXED + text..]);
        if word(&head[24..32]) != seal(&head[..24], sealed) {
            return Err(StoreError::corrupt("shard header", "its checksum", "another"));
        }
        if !is_zero(zeros) {
            return Err(StoreError::corrupt("shard header", "zeros behind it", "others"));
        }
        let said = word(&head[16..24]);
        if length < said {
            return Err(StoreError::truncated(said, length));
        }
        let mut header: ShardHeader = serde_json::from_slice(sealed).map_err(|error| {
            StoreError::corrupt("shard header", "its JSON", brief(&error.to_string()))
        })?;
        header.body = body(text);
        header.check()?;
        let sizes = header.file_bytes()?;
        if sizes != said || said != length {
            let expected = format!("{said} bytes, as its header says");
            let got = format!("parts of {sizes} in a file of {length}");
            return Err(StoreError::corrupt("shard sizes", expected, got));
        }
        Ok(header)
    }

    fn check(&self) -> Result<(), StoreError> {
        let as_damage = |error: StoreError| {
            StoreError::corrupt(error.what(), error.expected(), error.got().to_owned())
        };
        self.provenance.check().map_err(as_damage)?;
        if !(1..=MOST_TOKENS as u64).contains(&self.tokens) {
            return Err(StoreError::corrupt("shard tokens", "1 to 2^31", self.tokens));
        }
        let listed = self.parts.first().filter(|part| part.name == TOKENS);
        if listed.map(|part| part.bytes) != Some(4 * self.tokens) {
            let expected = format!("{} bytes of ids in its first part", 4 * self.tokens);
            return Err(StoreError::corrupt("shard tokens", expected, "another part"));
        }
        for (place, part) in self.parts.iter().enumerate() {
            check_name("shard part", &part.name, 1).map_err(as_damage)?;
            if self.parts[..place].iter().any(|other| other.name == part.name) {
                return Err(StoreError::corrupt("shard parts", "names of their own", &part.name));
            }
        }
        self.file_bytes().map(|_| ())
    }

    fn text(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Bytes of the text that the fixed fields speak of.
fn text_bytes(head: &[u8], length: u64) -> Result<usize, StoreError> {
    if head.len() < FIXED {
        return Err(StoreError::truncated(ALIGN, length));
    }
    if head[..8] != MAGIC {
        return Err(StoreError::corrupt("shard", "a kvweave shard", "a file of another kind"));
    }
    let schema = word(&head[8..12]) as u32;
    if schema != SCHEMA {
        let age = if schema > SCHEMA { "a newer" } else { "an older" };
        let got = format!("{age} one, {schema}");
        let expected = format!("schema {SCHEMA}");
        return Err(StoreError::new(ErrorKind::OtherSchema, "shard schema", expected, got));
    }
    let text = word(&head[12..16]) as usize;
    if text > MOST_TEXT {
        let expected = format!("at most {MOST_TEXT} bytes");
        return Err(StoreError::corrupt("shard header", expected, text));
    }
    Ok(text)
}

/// Where the first part begins behind a text of so many bytes.
fn body(text: usize) -> u64 {
    ((FIXED + text) as u64).next_multiple_of(ALIGN)
}

fn seal(fixed: &[u8], text: &[u8]) -> u64 {
    xxh3_64(&[fixed, text].concat())
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// The bytes of the first part.
pub(crate) fn ids_of(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

pub(crate) fn check_tokens(tokens: &[u32]) -> Result<(), StoreError> {
    if (1..=MOST_TOKENS).contains(&tokens.len()) {
        return Ok(());
    }
    Err(StoreError::invalid("tokens", format!("1 to {MOST_TOKENS}"), tokens.len()))
}
