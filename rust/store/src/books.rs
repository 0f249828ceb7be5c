//! What a process knows of the folder: read when it opens, and again when another has changed it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::UNIX_EPOCH;

use crate::document::Document;
use crate::error::{ErrorKind, StoreError};
use crate::folder::{Folder, listed};
use crate::header::ShardHeader;
use crate::identity::ShardName;
use crate::victims::{Resident, Victims};

/// Files of which more than one thread reads the heads.
const FEW: usize = 64;

/// One file among the shards.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What it says of itself, or why it says nothing.
    pub header: Result<Arc<ShardHeader>, StoreError>,
    /// Bytes of the file.
    pub bytes: u64,
    /// Milliseconds since 1970 when it was last written or read.
    pub used: u64,
    inode: u64,
}

/// What may be held: bytes in all, and of a namespace.
#[derive(Clone, Debug, Default)]
pub struct Budget {
    /// Of the whole store; `None`: as much as the disk has.
    pub capacity: Option<u64>,
    /// Of every namespace that has none of its own.
    pub quota: Option<u64>,
    /// Of single namespaces.
    pub quotas: HashMap<String, u64>,
}

impl Budget {
    /// The quota of a namespace.
    #[must_use]
    pub fn of(&self, namespace: &str) -> Option<u64> {
        self.quotas.get(namespace).copied().or(self.quota)
    }
}

/// The files of a folder, and sums over them.
#[derive(Debug, Default)]
pub struct Books {
    changes: Option<u64>,
    shards: BTreeMap<ShardName, Entry>,
    documents: BTreeMap<(String, String), ShardName>,
    named: HashMap<ShardName, usize>,
    held: HashMap<String, u64>,
    total: u64,
}

impl Books {
    /// All files, by name.
    pub fn shards(&self) -> impl Iterator<Item = (&ShardName, &Entry)> {
        self.shards.iter()
    }

    /// What whole shards say of their models.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        let whole = self.shards.values().filter_map(|entry| entry.header.as_ref().ok());
        whole.map(|header| &*header.provenance.model)
    }

    /// One of them.
    pub fn entry(&self, name: &ShardName) -> Option<&Entry> {
        self.shards.get(name)
    }

    /// Bytes of all files, and of those of a namespace.
    pub fn held(&self, namespace: &str) -> (u64, u64) {
        (self.total, self.held.get(namespace).copied().unwrap_or(0))
    }

    /// Bytes of each namespace that has any.
    pub fn namespaces(&self) -> &HashMap<String, u64> {
        &self.held
    }

    /// Documents, by namespace and name.
    pub fn documents(&self) -> impl Iterator<Item = Document> {
        self.documents.iter().map(|((namespace, name), shard)| Document {
            namespace: namespace.clone(),
            name: name.clone(),
            shard: shard.clone(),
        })
    }

    /// The shard that a document names.
    pub fn document(&self, namespace: &str, name: &str) -> Option<&ShardName> {
        self.documents.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// How many documents name a shard.
    pub fn names(&self, shard: &ShardName) -> usize {
        self.named.get(shard).copied().unwrap_or(0)
    }

    /// Reads the folder where others have changed it since; `changes` says how often it was.
    pub fn refresh(
        &mut self,
        folder: &Folder,
        changes: u64,
        threads: usize,
    ) -> Result<(), StoreError> {
        if self.changes != Some(changes) {
            self.read_shards(folder, threads)?;
            self.read_documents(folder)?;
            self.changes = Some(changes);
        }
        Ok(())
    }

    /// The next change is one that these books know of.
    pub fn follow(&mut self, changes: u64) {
        self.changes = Some(changes);
    }

    /// Enters a file that lies in the folder now.
    pub fn enter(
        &mut self,
        name: ShardName,
        header: Result<Arc<ShardHeader>, StoreError>,
        found: &Metadata,
    ) {
        self.remove(&name);
        let entry = Entry { header, bytes: found.len(), used: stamp(found), inode: found.ino() };
        self.total += entry.bytes;
        if let Ok(header) = &entry.header {
            *self.held.entry(header.provenance.namespace.clone()).or_default() += entry.bytes;
        }
        self.shards.insert(name, entry);
    }

    /// Strikes out a file that is gone.
    pub fn remove(&mut self, name: &ShardName) {
        let Some(entry) = self.shards.remove(name) else { return };
        self.total -= entry.bytes;
        let Ok(header) = entry.header else { return };
        let namespace = &header.provenance.namespace;
        if let Some(held) = self.held.get_mut(namespace) {
            *held -= entry.bytes;
            if *held == 0 {
                self.held.remove(namespace);
            }
        }
    }

    /// Notes when a shard was used.
    pub fn touch(&mut self, name: &ShardName, now: u64) {
        if let Some(entry) = self.shards.get_mut(name) {
            entry.used = now;
        }
    }

    /// Reads anew when some shards were used; says whether that was another time for any.
    pub fn restamp(&mut self, folder: &Folder, names: &[ShardName]) -> bool {
        let mut others = false;
        for name in names {
            let found = fs::symlink_metadata(folder.shard(name)).ok();
            if let (Some(found), Some(entry)) = (found, self.shards.get_mut(name)) {
                others |= entry.used != stamp(&found);
                entry.used = stamp(&found);
            }
        }
        others
    }

    /// Notes that a file is not what it says: its place may be taken, and it goes first.
    pub fn spoil(&mut self, name: &ShardName, why: StoreError) {
        if let Some(entry) = self.shards.get(name) {
            let Entry { bytes, used, inode, .. } = *entry;
            self.remove(name);
            self.total += bytes;
            self.shards.insert(name.clone(), Entry { header: Err(why), bytes, used, inode });
        }
    }

    /// Enters a document.
    pub fn enter_document(&mut self, document: Document) {
        let Document { namespace, name, shard } = document;
        self.remove_document(&namespace, &name);
        *self.named.entry(shard.clone()).or_default() += 1;
        self.documents.insert((namespace, name), shard);
    }

    /// Strikes out a document.
    pub fn remove_document(&mut self, namespace: &str, name: &str) {
        let removed = self.documents.remove(&(namespace.to_owned(), name.to_owned()));
        let Some(shard) = removed else { return };
        if let Some(count) = self.named.get_mut(&shard) {
            *count -= 1;
            if *count == 0 {
                self.named.remove(&shard);
            }
        }
    }

    /// Which files have to go so that `needed` more bytes of a namespace keep to the budget, in
    /// place of the file `replaced`. Its own go where its quota asks for it, anybody's where the
    /// store is full; none that a document names, nor what a newer version wrote.
    ///
    /// # Errors
    /// `QuotaExceeded`, `Full`.
    pub fn room(
        &self,
        budget: &Budget,
        victims: &dyn Victims,
        (namespace, needed, replaced): (&str, u64, &ShardName),
        now: u64,
    ) -> Result<Vec<ShardName>, StoreError> {
        let (mut total, mut own) = self.held(namespace);
        if let Some(entry) = self.shards.get(replaced) {
            total -= entry.bytes;
            let same = |h: &Arc<ShardHeader>| h.provenance.namespace == namespace;
            own -= if entry.header.as_ref().is_ok_and(same) { entry.bytes } else { 0 };
        }
        let candidates = self.candidates(victims, replaced, now);
        let mut going = Vec::new();
        let mut gone = HashSet::new();
        if let Some(quota) = budget.of(namespace) {
            for &(name, entry) in &candidates {
                let own_file = |h: &Arc<ShardHeader>| h.provenance.namespace == namespace;
                if own.saturating_add(needed) <= quota {
                    break;
                }
                if entry.header.as_ref().is_ok_and(own_file) {
                    (own, total) = (own - entry.bytes, total - entry.bytes);
                    going.push(name.clone());
                    gone.insert(name);
                }
            }
            let free = quota.saturating_sub(own);
            if needed > free {
                let kind = ErrorKind::QuotaExceeded { needed, free };
                let expected = format!("{needed} bytes in the quota of the namespace");
                return Err(StoreError::new(kind, "store", expected, format!("{free} free")));
            }
        }
        if let Some(capacity) = budget.capacity {
            for &(name, entry) in &candidates {
                if total.saturating_add(needed) <= capacity {
                    break;
                }
                if gone.insert(name) {
                    total -= entry.bytes;
                    going.push(name.clone());
                }
            }
            let free = capacity.saturating_sub(total);
            if needed > free {
                let expected = format!("{needed} bytes in the store");
                let kind = ErrorKind::Full { needed, free };
                return Err(StoreError::new(kind, "store", expected, format!("{free} free")));
            }
        }
        Ok(going)
    }

    /// What may go, in order: spoiled files, what has expired, then as `victims` says.
    fn candidates<'a>(
        &'a self,
        victims: &dyn Victims,
        replaced: &ShardName,
        now: u64,
    ) -> Vec<(&'a ShardName, &'a Entry)> {
        let free = |name: &ShardName| name != replaced && self.names(name) == 0;
        let all = || self.shards.iter().filter(|(name, _)| free(name));
        let spoiled =
            all().filter(|(_, entry)| entry.header.as_ref().is_err_and(|e| e.is_damage()));
        let mut residents: Vec<Resident<'_>> = all()
            .filter_map(|(name, entry)| {
                let header = entry.header.as_ref().ok()?;
                Some(Resident { name, header, bytes: entry.bytes, used: entry.used })
            })
            .collect();
        victims.order(&mut residents, now);
        residents.sort_by_key(|resident| !resident.header.is_expired(now));
        let ordered = residents.iter().map(|resident| resident.name);
        let whole = ordered.filter_map(|name| self.shards.get_key_value(name));
        spoiled.chain(whole).collect()
    }

    fn read_shards(&mut self, folder: &Folder, threads: usize) -> Result<(), StoreError> {
        let mut gone: HashSet<ShardName> = self.shards.keys().cloned().collect();
        let mut unread = Vec::new();
        for path in listed(&folder.shards())? {
            let Some(name) = name_of(&path) else { continue };
            if let Some(entry) = self.shards.get_mut(&name) {
                // Gone since it was listed.
                let Ok(found) = fs::symlink_metadata(&path) else { continue };
                if entry.inode == found.ino() && entry.bytes == found.len() {
                    entry.used = stamp(&found);
                    gone.remove(&name);
                    continue;
                }
            }
            unread.push((name, path));
        }
        gone.iter().for_each(|name| self.remove(name));
        for (name, header, found) in read_heads(&unread, threads) {
            self.enter(name, header, &found);
        }
        Ok(())
    }

    fn read_documents(&mut self, folder: &Folder) -> Result<(), StoreError> {
        (self.documents, self.named) = (BTreeMap::new(), HashMap::new());
        for path in listed(&folder.documents())? {
            // One that cannot be read names nothing; `Store::verify_documents` says so.
            if let Ok(Ok(document)) = fs::read(&path).map(|bytes| Document::decode(&bytes)) {
                self.enter_document(document);
            }
        }
        Ok(())
    }
}

type Head = (ShardName, Result<Arc<ShardHeader>, StoreError>, Metadata);

/// The heads of files, read side by side where they are many; without those that are gone.
fn read_heads(files: &[(ShardName, PathBuf)], threads: usize) -> Vec<Head> {
    let read = |(name, path): &(ShardName, PathBuf)| -> Option<Head> {
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let Ok((found, file)) = opened else {
            let found = fs::symlink_metadata(path).ok()?;
            let why = StoreError::new(ErrorKind::Io, "shard", "to be opened", "a refusal");
            return Some((name.clone(), Err(why), found));
        };
        let header = ShardHeader::read(&file, &found).map(Arc::new);
        Some((name.clone(), header, found))
    };
    if files.len() <= FEW || threads <= 1 {
        return files.iter().filter_map(read).collect();
    }
    let heads = Mutex::new(Vec::with_capacity(files.len()));
    thread::scope(|scope| {
        for share in files.chunks(files.len().div_ceil(threads)) {
            let heads = &heads;
            scope.spawn(move || {
                let found: Vec<Head> = share.iter().filter_map(read).collect();
                if let Ok(mut heads) = heads.lock() {
                    heads.extend(found);
                }
            });
        }
    });
    heads.into_inner().unwrap_or_default()
}

/// The shard that a path is the file of.
fn name_of(path: &Path) -> Option<ShardName> {
    let name = path.file_name()?.to_str()?.strip_suffix(".kv")?;
    ShardName::parse(name).ok()
}

fn stamp(found: &Metadata) -> u64 {
    let since = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_millis() as u64)
}
