//! Documents of a store: names that keep shards from being evicted.

use std::fs;
use std::io::{self, Write};

use crate::document::Document;
use crate::error::{ErrorKind, StoreError};
use crate::folder::sync;
use crate::identity::ShardName;
use crate::shard::Shard;
use crate::store::{Store, told};

impl Store {
    /// Names a shard of a namespace: it is not evicted while it has a name. A name that exists
    /// comes to mean this shard; when this returns, that survives.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that no document may have, `Unknown` shard, `Foreign` for one
    /// of another namespace, `DiskFull`, `Io`.
    pub fn name(&self, namespace: &str, name: &str, shard: &ShardName) -> Result<(), StoreError> {
        Document::check(namespace, name)?;
        let (mut books, mut changing) = self.changing()?;
        let Some(found) = self.opened(shard)? else {
            return Err(StoreError::unknown(shard.as_str()));
        };
        expect_own(&found, namespace)?;
        let document =
            Document { namespace: namespace.into(), name: name.into(), shard: shard.clone() };
        let bytes = document.encode();
        let beside = self.folder.write_beside(bytes.len() as u64, |file| file.write_all(&bytes))?;
        beside.publish(&self.document_file(namespace, name))?;
        books.enter_document(document);
        told(&mut books, &mut changing)
    }

    /// The shard that a document of a namespace names. `None` where there is no such document, or
    /// what it names has expired.
    ///
    /// # Errors
    /// As for [`Self::open_shard`]; `Unknown` where the name stays and the shard is gone, `Foreign`
    /// where it is another namespace's.
    pub fn document(
        &self,
        namespace: &str,
        name: &str,
        now: u64,
    ) -> Result<Option<(ShardName, Shard)>, StoreError> {
        Document::check(namespace, name)?;
        let Some(named) = self.books()?.document(namespace, name).cloned() else {
            return Ok(None);
        };
        let Some(shard) = self.open_shard(&named)? else {
            return Err(StoreError::unknown(named.as_str()));
        };
        expect_own(&shard, namespace)?;
        Ok(self.unexpired(&named, shard, now).map(|shard| (named, shard)))
    }

    /// Takes a name away; the shard may then be evicted. Says whether there was one.
    ///
    /// # Errors
    /// `InvalidArgument`, `Io`.
    pub fn forget(&self, namespace: &str, name: &str) -> Result<bool, StoreError> {
        Document::check(namespace, name)?;
        let (mut books, mut changing) = self.changing()?;
        match fs::remove_file(self.document_file(namespace, name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            other => other.map_err(|e| StoreError::io("document", "to be removed", &e))?,
        }
        sync(&self.folder.documents())?;
        books.remove_document(namespace, name);
        told(&mut books, &mut changing)?;
        Ok(true)
    }

    /// Documents of a namespace, or all, sorted.
    ///
    /// # Errors
    /// `Io`.
    pub fn documents(&self, namespace: Option<&str>) -> Result<Vec<Document>, StoreError> {
        let of = |document: &Document| namespace.is_none_or(|own| document.namespace == own);
        Ok(self.books()?.documents().filter(of).collect())
    }
}

/// Refuses a shard of another namespace.
fn expect_own(shard: &Shard, namespace: &str) -> Result<(), StoreError> {
    if shard.header().provenance.namespace == namespace {
        return Ok(());
    }
    let got = "one of another";
    Err(StoreError::new(ErrorKind::Foreign, "shard", "one of the namespace", got))
}
