//! What whoever keeps a store does to it: collecting, verifying, carrying shards in and out.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use crate::document::Document;
use crate::error::{ErrorKind, StoreError};
use crate::folder::{listed, sync};
use crate::identity::ShardName;
use crate::shard::Shard;
use crate::store::{Store, Stored, told};

/// What a collection has removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Files of writers that are no more.
    pub leftovers: u64,
    /// Shards that have expired, and names of them.
    pub expired: u64,
    /// Shards that are spoiled, and names of them.
    pub spoiled: u64,
    /// Bytes of all these files.
    pub bytes: u64,
}

impl Store {
    /// Removes leftovers, what has expired, and what is known to be spoiled: by its header, or
    /// because somebody has read it here ([`Self::verify`] reads everything).
    ///
    /// # Errors
    /// `Io`.
    pub fn collect(&self, now: u64) -> Result<Collected, StoreError> {
        let (leftovers, bytes) = self.folder.collect_leftovers()?;
        let mut collected = Collected { leftovers, bytes, ..Collected::default() };
        let (mut books, mut changing) = self.changing()?;
        let mut going = Vec::new();
        for (name, entry) in books.shards() {
            let expired = entry.header.as_ref().is_ok_and(|header| header.is_expired(now));
            if expired || entry.header.as_ref().is_err_and(StoreError::is_damage) {
                going.push((name.clone(), expired, entry.bytes));
            }
        }
        let documents: Vec<Document> = books.documents().collect();
        for (name, expired, bytes) in going {
            for document in documents.iter().filter(|document| document.shard == name) {
                let path = self.document_file(&document.namespace, &document.name);
                let removed = fs::remove_file(path);
                removed.map_err(|error| StoreError::io("document", "to be removed", &error))?;
                books.remove_document(&document.namespace, &document.name);
            }
            if self.unlink(&mut books, &name)? {
                collected.bytes += bytes;
                let count = if expired { &mut collected.expired } else { &mut collected.spoiled };
                *count += 1;
            }
        }
        sync(&self.folder.documents())?;
        sync(&self.folder.shards())?;
        told(&mut books, &mut changing)?;
        Ok(collected)
    }

    /// Reads every byte of a shard and holds it to its name. What is spoiled is noted: its place
    /// may be taken.
    ///
    /// # Errors
    /// `Unknown`, `Truncated`, `Corrupt`, `OtherSchema`, `Foreign`, `Io`.
    pub fn verify(&self, name: &ShardName) -> Result<(), StoreError> {
        let Some(shard) = self.open_shard(name)? else {
            return Err(StoreError::unknown(name.as_str()));
        };
        self.noted(name, shard.verify(name, self.naming()))
    }

    /// Reads every document's record: those that name nothing, with why.
    ///
    /// # Errors
    /// `Io` where the folder cannot be read.
    pub fn verify_documents(&self) -> Result<Vec<(String, StoreError)>, StoreError> {
        let mut wrong = Vec::new();
        for path in listed(&self.folder.documents())? {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let found = fs::read(&path)
                .map_err(|error| StoreError::io("document", "to be read", &error))
                .and_then(|bytes| Document::decode(&bytes))
                .and_then(|document| self.expect_named(&document, &path));
            if let Err(error) = found {
                wrong.push((name.unwrap_or_default(), error));
            }
        }
        wrong.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(wrong)
    }

    fn expect_named(&self, document: &Document, path: &Path) -> Result<(), StoreError> {
        if self.document_file(&document.namespace, &document.name) != path {
            let expected = "the file of its name";
            return Err(StoreError::new(ErrorKind::Foreign, "document", expected, "another"));
        }
        let shard = self.open_shard(&document.shard)?;
        let Some(shard) = shard else {
            return Err(StoreError::unknown(document.shard.as_str()));
        };
        if shard.header().provenance.namespace != document.namespace {
            let got = "one of another";
            return Err(StoreError::new(ErrorKind::Foreign, "shard", "one of the namespace", got));
        }
        Ok(())
    }

    /// Writes a shard, verified, to a file of its own that does not exist yet.
    ///
    /// # Errors
    /// As for [`Self::verify`]; `InvalidArgument` where there is such a file, `DiskFull`, `Io`.
    pub fn export(&self, name: &ShardName, to: &Path) -> Result<(), StoreError> {
        self.verify(name)?;
        let what = || format!("file {}", to.display());
        let failed = |error: io::Error| StoreError::io(what(), "to be written", &error);
        let from = File::open(self.folder.shard(name)).map_err(failed)?;
        let mut out = match File::create_new(to) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(StoreError::invalid(
                    what(),
                    "one that does not exist",
                    "one that does",
                ));
            }
            other => other.map_err(failed)?,
        };
        let copied = io::copy(&mut &from, &mut out).and_then(|_| out.sync_all());
        if let Err(error) = copied {
            let _ = fs::remove_file(to);
            return Err(failed(error));
        }
        Ok(())
    }

    /// Takes in a shard from a file of any origin: it is copied beside, verified there, and
    /// admitted like any other.
    ///
    /// # Errors
    /// `Truncated`, `Corrupt`, `OtherSchema` for what is no whole shard; `QuotaExceeded`, `Full`,
    /// `DiskFull`, `Io`.
    pub fn import(&self, from: &Path, now: u64) -> Result<Stored, StoreError> {
        let failed = |error: io::Error| {
            StoreError::io(format!("file {}", from.display()), "to be read", &error)
        };
        let mut source = File::open(from).map_err(failed)?;
        let length = source.metadata().map_err(failed)?.len();
        let beside = self.folder.write_beside(length, |file| {
            let mut chunk = vec![0; crate::checksum::CHUNK];
            loop {
                match source.read(&mut chunk)? {
                    0 => return Ok(()),
                    read => file.write_all(&chunk[..read])?,
                }
            }
        })?;
        let shard = Shard::open(beside.path(), self.threads, false)?;
        let shard = shard.ok_or_else(|| StoreError::corrupt("shard", "a file", "none"))?;
        let name = shard.header().provenance.name(self.naming(), &shard.tokens()?);
        shard.verify(&name, self.naming())?;
        let header = shard.header().clone();
        self.admit(name, header, beside, now)
    }
}
