//! The store's folder: where files lie, how one gets there whole, and who may change what is there.
//!
//! ```text store.json      schema and naming lock            held by whoever changes the folder;
//! how often it was changed shards/         <name>.kv documents/      <hash of namespace and
//! name>.json writing/        files that are being written, each locked by its writer ``` A file is
//! written beside, synced, renamed, and its folder synced: then it is acknowledged. Whoever reads
//! takes no lock. A writer that died left a file in `writing` that nobody has locked.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

use crate::error::StoreError;
use crate::header::ALIGN;
use crate::identity::ShardName;

/// Paths of a store.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
}

/// The right to change the folder, among all processes, until dropped.
pub struct Changing {
    lock: File,
    /// How often the folder had been changed when the right was given.
    pub changes: u64,
}

impl Changing {
    /// Tells other processes that the folder has changed.
    pub fn changed(&mut self) -> Result<(), StoreError> {
        self.changes += 1;
        let told = self.lock.write_all_at(&self.changes.to_le_bytes(), 0);
        told.map_err(|error| StoreError::io("store lock", "to be written", &error))
    }
}

impl Folder {
    /// The folder of a store, made where it is missing.
    pub fn make(root: &Path) -> Result<Folder, StoreError> {
        let folder = Folder { root: root.to_owned() };
        // Whoever copied a store may have left out folders that were empty.
        for path in [&folder.shards(), &folder.documents(), &folder.writing()] {
            fs::create_dir_all(path).map_err(|error| made(path, &error))?;
        }
        if !folder.record().exists() {
            folder.open_lock()?;
            sync(root)?;
        }
        Ok(folder)
    }

    /// Where it lies.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn shards(&self) -> PathBuf {
        self.root.join("shards")
    }

    pub fn documents(&self) -> PathBuf {
        self.root.join("documents")
    }

    /// The file of the store's own record.
    pub fn record(&self) -> PathBuf {
        self.root.join("store.json")
    }

    pub fn shard(&self, name: &ShardName) -> PathBuf {
        self.shards().join(format!("{name}.kv"))
    }

    fn writing(&self) -> PathBuf {
        self.root.join("writing")
    }

    /// Waits for the right to change the folder. A process that dies gives it back.
    pub fn change(&self) -> Result<Changing, StoreError> {
        // Opened anew: a process that was forked shares what its parent had open, and its locks.
        let lock = self.open_lock()?;
        lock.lock().map_err(|error| StoreError::io("store lock", "to be had", &error))?;
        let changes = changes_of(&lock)?;
        Ok(Changing { lock, changes })
    }

    /// How often the folder has been changed.
    pub fn changes(&self) -> Result<u64, StoreError> {
        changes_of(&self.open_lock()?)
    }

    fn open_lock(&self) -> Result<File, StoreError> {
        let path = self.root.join("lock");
        let opened =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        opened.map_err(|error| made(&path, &error))
    }

    /// Writes a file of `size` bytes beside the others and syncs it; nobody finds it yet.
    pub fn write_beside(
        &self,
        size: u64,
        write: impl FnOnce(&mut Writing<'_>) -> io::Result<()>,
    ) -> Result<Beside, StoreError> {
        let beside = self.claim()?;
        let failed = |error: &io::Error| StoreError::io("shard", "to be written", error);
        if let Err(error) = fallocate(&beside.file, FallocateFlags::empty(), 0, size.max(1)) {
            let error = io::Error::from(error);
            // File systems that cannot reserve room say so when the bytes come.
            if error.kind() != io::ErrorKind::Unsupported {
                return Err(failed(&error));
            }
        }
        let mut writing = Writing { file: &beside.file, at: 0 };
        let written = write(&mut writing).and_then(|()| beside.file.set_len(writing.at));
        written.and_then(|()| beside.file.sync_all()).map_err(|error| failed(&error))?;
        // Shards are read past the page cache, so what of it lies there serves nobody.
        let _ = fadvise(&beside.file, 0, None, Advice::DontNeed);
        Ok(beside)
    }

    /// A new file in `writing`, locked.
    fn claim(&self) -> Result<Beside, StoreError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let failed = |path: &Path, error: &io::Error| made(path, error);
        loop {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = self.writing().join(format!("{}-{number}", process::id()));
            let opened = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
            let file = match opened {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(|error| failed(&path, &error))?,
            };
            // Between the two calls a collector may have taken it for a leftover: then it is gone.
            if file.try_lock().is_ok() && path.exists() {
                return Ok(Beside { path, file, kept: false });
            }
        }
    }

    /// Removes what writers left that are no more; returns the number of files and their bytes.
    pub fn collect_leftovers(&self) -> Result<(u64, u64), StoreError> {
        let (mut files, mut bytes) = (0, 0);
        for path in listed(&self.writing())? {
            // Gone meanwhile, or its writer is alive.
            let Ok(file) = File::open(&path) else { continue };
            if let Err(TryLockError::WouldBlock) = file.try_lock() {
                continue;
            }
            let size = file.metadata().map_or(0, |found| found.len());
            if fs::remove_file(&path).is_ok() {
                (files, bytes) = (files + 1, bytes + size);
            }
        }
        Ok((files, bytes))
    }
}

/// A file that is written and synced, but not where anybody looks; removed when dropped.
pub struct Beside {
    path: PathBuf,
    pub file: File,
    kept: bool,
}

impl Beside {
    /// Where it lies meanwhile.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file where it is looked for, in place of what lies there, and syncs the folder.
    pub fn publish(mut self, to: &Path) -> Result<(), StoreError> {
        let moved = fs::rename(&self.path, to);
        moved.map_err(|error| StoreError::io("shard", "to be renamed", &error))?;
        self.kept = true;
        sync(to.parent().unwrap_or(to))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.kept {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A file that grows from its beginning on.
pub struct Writing<'a> {
    file: &'a File,
    at: u64,
}

impl Writing<'_> {
    /// Appends bytes, and zeros up to the next block.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let end = self.at + bytes.len() as u64;
        let zeros = vec![0; (end.next_multiple_of(ALIGN) - end) as usize];
        self.write_all(bytes)?;
        self.write_all(&zeros)
    }
}

impl Write for Writing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write_at(bytes, self.at)?;
        self.at += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The files of a folder.
pub fn listed(path: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let read = |error: io::Error| made(path, &error);
    let entries = fs::read_dir(path).map_err(read)?;
    entries.map(|entry| Ok(entry.map_err(read)?.path())).collect()
}

/// Has the names in a folder survive.
pub fn sync(folder: &Path) -> Result<(), StoreError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| StoreError::io("store folder", "to be synced", &error))
}

fn changes_of(lock: &File) -> Result<u64, StoreError> {
    let mut count = [0; 8];
    match lock.read_exact_at(&mut count, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        Err(error) => Err(StoreError::io("store lock", "to be read", &error)),
        Ok(()) => Ok(u64::from_le_bytes(count)),
    }
}

fn made(path: &Path, error: &io::Error) -> StoreError {
    StoreError::io(format!("store {}", path.display()), "a file or folder of ours", error)
}
