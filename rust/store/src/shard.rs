//! One shard that is open for reading. It stays readable, whole, when it is evicted meanwhile.

use std::fs::File;
use std::path::Path;

use crate::checksum::CHUNK;
use crate::error::{ErrorKind, StoreError};
use crate::header::{PartEntry, ShardHeader, TOKENS};
use crate::identity::{Naming, ShardName, brief};
use crate::read::{PartFile, ReadPath};

/// A shard's header, checked, and the way to its parts.
#[derive(Debug)]
pub struct Shard {
    header: ShardHeader,
    file: PartFile,
    bytes: u64,
}

impl Shard {
    /// Opens a file: `None` where there is none.
    ///
    /// # Errors
    /// As for [`ShardHeader::read`].
    pub(crate) fn open(
        path: &Path,
        threads: usize,
        direct: bool,
    ) -> Result<Option<Shard>, StoreError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(StoreError::io("shard", "to be opened", &error)),
        };
        let found = file.metadata();
        let found = found.map_err(|error| StoreError::io("shard", "to be opened", &error))?;
        let header = ShardHeader::read(&file, &found)?;
        let file = PartFile::new(file, threads, direct);
        Ok(Some(Shard { header, file, bytes: found.len() }))
    }

    /// What it says of itself.
    #[must_use]
    pub fn header(&self) -> &ShardHeader {
        &self.header
    }

    /// Bytes of its file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.bytes
    }

    /// The part of a name, with its size.
    ///
    /// # Errors
    /// `Unknown`.
    pub fn part(&self, name: &str) -> Result<&PartEntry, StoreError> {
        Ok(self.placed(name)?.1)
    }

    /// Reads a part into memory of its size.
    ///
    /// # Errors
    /// `Unknown` part, `InvalidArgument` for memory of another size, `Corrupt`, `Io`; what the
    /// memory holds is worth nothing then.
    pub fn read(&self, name: &str, out: &mut [u8]) -> Result<ReadPath, StoreError> {
        let (begin, part) = self.placed(name)?;
        if out.len() as u64 != part.bytes {
            let expected = format!("{} bytes of memory", part.bytes);
            return Err(StoreError::invalid(
                format!("shard part {}", part.name),
                expected,
                out.len(),
            ));
        }
        self.file.read(begin, part, out)
    }

    /// Reads some of a part, from byte `from` of it on, and returns the hashes of its chunks of
    /// 1 MiB. Nothing is held to a checksum before [`Self::check`] has all of them.
    ///
    /// # Errors
    /// `Unknown` part, `InvalidArgument` for bytes that are no whole chunks, or that it has not;
    /// `Corrupt`, `Io`.
    pub fn read_some(&self, name: &str, from: u64, out: &mut [u8]) -> Result<Vec<u64>, StoreError> {
        let (begin, part) = self.placed(name)?;
        let end = from.saturating_add(out.len() as u64);
        let whole = |at: u64| at.is_multiple_of(CHUNK as u64) || at == part.bytes;
        if !whole(from) || !whole(end) || end > part.bytes {
            let expected = format!("whole chunks of its {} bytes", part.bytes);
            let got = format!("[{from}, {end})");
            return Err(StoreError::invalid(format!("shard part {}", part.name), expected, got));
        }
        self.file.read_chunks(begin + from, part, out)
    }

    /// Holds a part to its checksum, by the hashes of all of its chunks in order.
    ///
    /// # Errors
    /// `Unknown` part, `Corrupt`.
    pub fn check(&self, name: &str, hashes: &[u64]) -> Result<(), StoreError> {
        self.part(name)?.check_hashes(hashes)
    }

    /// A part in memory of its own. No size is larger than the file, which has been checked.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn read_part(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let mut out = vec![0; self.part(name)?.bytes as usize];
        self.read(name, &mut out)?;
        Ok(out)
    }

    /// The token ids [T].
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn tokens(&self) -> Result<Vec<u32>, StoreError> {
        let bytes = self.read_part(TOKENS)?;
        Ok(bytes.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect())
    }

    /// Reads all of it and holds it to its name.
    ///
    /// # Errors
    /// `Corrupt` for any byte that is not what was written, `Foreign` for the whole shard of
    /// something else under this name, `Io`.
    pub fn verify(&self, name: &ShardName, naming: Naming) -> Result<(), StoreError> {
        let tokens = self.tokens()?;
        for part in &self.header.parts[1..] {
            self.read_part(&part.name)?;
        }
        let own = self.header.provenance.name(naming, &tokens);
        if own != *name {
            return Err(StoreError::new(ErrorKind::Foreign, "shard name", own.as_str(), name));
        }
        Ok(())
    }

    fn placed(&self, name: &str) -> Result<(u64, &PartEntry), StoreError> {
        self.header.part(name).ok_or_else(|| {
            let names: Vec<&str> = self.header.parts.iter().map(|part| &*part.name).collect();
            let expected = format!("one of {}", brief(&names.join(", ")));
            StoreError::new(ErrorKind::Unknown, "shard part", expected, brief(name))
        })
    }
}
