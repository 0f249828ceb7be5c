//! The store: shards that are found by what they are of, kept within a budget, and survive.
//!
//! What a call has acknowledged is on the disk: a process that is killed loses none of it, and
//! leaves nothing torn. Any number of processes may work on one folder. Reading takes no lock; who
//! changes the folder does so alone, and brings its books up to date first, so that budgets hold
//! for all.

use std::collections::HashMap;
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use crate::books::{Books, Budget};
use crate::document::Document;
use crate::error::{ErrorKind, StoreError};
use crate::folder::{Beside, Changing, Folder, sync};
use crate::header::{Part, ShardHeader, Terms, check_tokens, ids_of};
use crate::identity::{Naming, Provenance, ShardName, check_name};
use crate::record::{claim, expect_ours, record};
use crate::shard::Shard;
use crate::victims::{Lru, Victims};

/// How a store is opened.
pub struct StoreOptions {
    /// How names are made; `None`: as the folder has it, XXH3 for a new one.
    pub naming: Option<Naming>,
    /// Whether a folder is made where there is none.
    pub create: bool,
    /// The model that the folder is to belong to; `None`: it is used whomever it belongs to.
    pub model: Option<String>,
    /// What may be held.
    pub budget: Budget,
    /// What goes first where room is wanted.
    pub victims: Box<dyn Victims>,
    /// Whether parts are read past the page cache, where that can be had.
    pub direct: bool,
    /// Threads that read one part side by side.
    pub threads: usize,
}

impl Default for StoreOptions {
    fn default() -> StoreOptions {
        StoreOptions {
            naming: None,
            create: true,
            model: None,
            budget: Budget::default(),
            victims: Box::new(Lru),
            direct: true,
            threads: 4,
        }
    }
}

/// What became of a shard that was put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub name: ShardName,
    /// Whether it was written: it may have been there already.
    pub written: bool,
    /// What was evicted for it.
    pub evicted: Vec<ShardName>,
}

/// One line of what a store holds.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Its name.
    pub name: ShardName,
    /// What it says of itself, or why it says nothing.
    pub header: Result<Arc<ShardHeader>, StoreError>,
    /// Bytes of its file.
    pub bytes: u64,
    /// Milliseconds since 1970 when it was last written or read.
    pub used: u64,
    /// How many documents name it.
    pub documents: usize,
}

/// A folder of shards. See the head of this file.
pub struct Store {
    pub(crate) folder: Folder,
    naming: Naming,
    model: Option<String>,
    budget: Mutex<Budget>,
    victims: Box<dyn Victims>,
    direct: bool,
    pub(crate) threads: usize,
    books: Mutex<Books>,
}

impl Store {
    /// Opens a folder, and removes what writers left there that are no more.
    ///
    /// # Errors
    /// `InvalidArgument` for a folder of other things or another naming, `Unknown` where there is
    /// none and none is to be made, `OtherModel`, `Corrupt`, `OtherSchema`, `DiskFull`, `Io`.
    pub fn open(root: &Path, options: StoreOptions) -> Result<Store, StoreError> {
        expect_ours(root, options.create)?;
        let folder = Folder::make(root)?;
        let threads = options.threads.max(1);
        let mut books = Books::default();
        let known = {
            let alone = folder.change()?;
            let mut known = record(&folder, options.naming)?;
            if let Some(model) = &options.model {
                books.refresh(&folder, alone.changes, threads)?;
                claim(&folder, &mut known, model, books.models())?;
            }
            known
        };
        folder.collect_leftovers()?;
        let store = Store {
            folder,
            naming: known.naming,
            model: known.model,
            budget: Mutex::new(options.budget),
            victims: options.victims,
            direct: options.direct,
            threads,
            books: Mutex::new(books),
        };
        drop(store.books()?);
        Ok(store)
    }

    /// How names are made here.
    #[must_use]
    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// The model that the folder belonged to when it was opened, if any.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// The folder that it is.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    /// Sets or takes away the quota of a namespace. What it holds beyond goes when it next puts.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that no namespace may have.
    pub fn set_quota(&self, namespace: &str, bytes: Option<u64>) -> Result<(), StoreError> {
        check_name("namespace", namespace, 0)?;
        let mut budget = locked(&self.budget);
        match bytes {
            Some(bytes) => budget.quotas.insert(namespace.to_owned(), bytes),
            None => budget.quotas.remove(namespace),
        };
        Ok(())
    }

    // ---- shards ---------------------------------------------------------------------------------

    /// Stores the KV of some tokens; when this returns, it survives. `terms`: when it expires, in
    /// milliseconds since 1970, and what it cost; `now` is that time.
    ///
    /// # Errors
    /// `InvalidArgument` for names, tokens or parts that no shard may have; `QuotaExceeded`,
    /// `Full`, `DiskFull`, `Io`. What was there before still is.
    pub fn put(
        &self,
        provenance: &Provenance,
        tokens: &[u32],
        parts: &[Part<'_>],
        terms: impl Into<Terms>,
        now: u64,
    ) -> Result<Stored, StoreError> {
        let header = ShardHeader::of(provenance, tokens, parts, terms.into())?;
        let head = header.encode()?;
        let name = provenance.name(self.naming, tokens);
        if self.is_there(&name, &header)? {
            sync(&self.folder.shards())?;
            self.touch(&name, now);
            return Ok(Stored { name, written: false, evicted: Vec::new() });
        }
        // What has no room is refused before it is written; that it still has is seen at the end.
        let books = self.books()?;
        self.room(&books, &header, &name, now)?;
        drop(books);
        let beside = self.folder.write_beside(header.file_bytes()?, |file| {
            file.append(&head)?;
            file.append(&ids_of(tokens))?;
            parts.iter().try_for_each(|part| file.append(part.bytes))
        })?;
        self.admit(name, header, beside, now)
    }

    /// Whether a shard of parts of these sizes has room here, and in the quota of its namespace,
    /// beside all that is there: nothing has to go for it.
    ///
    /// # Errors
    /// `InvalidArgument` for names, tokens or parts that no shard may have; `Io`.
    pub fn has_room(
        &self,
        provenance: &Provenance,
        tokens: u64,
        parts: &[(&str, u64)],
        terms: impl Into<Terms>,
    ) -> Result<bool, StoreError> {
        let needed = ShardHeader::most_file_bytes(provenance, tokens, parts, terms.into())?;
        let namespace = &provenance.namespace;
        let (total, own) = self.books()?.held(namespace);
        let budget = locked(&self.budget);
        let fits = |most: Option<u64>, held: u64| {
            most.is_none_or(|most| held.saturating_add(needed) <= most)
        };
        Ok(fits(budget.capacity, total) && fits(budget.of(namespace), own))
    }

    /// The shard of some tokens, its header and token ids compared. `None` where there is none, or
    /// one that has expired.
    ///
    /// # Errors
    /// `Foreign` for a shard of something else under this name, `Truncated`, `Corrupt`,
    /// `OtherSchema`, `Io`: all of them mean that the KV is to be computed.
    pub fn get(
        &self,
        provenance: &Provenance,
        tokens: &[u32],
        now: u64,
    ) -> Result<Option<Shard>, StoreError> {
        provenance.check()?;
        check_tokens(tokens)?;
        let name = provenance.name(self.naming, tokens);
        let Some(shard) = self.open_shard(&name)? else { return Ok(None) };
        provenance.expect(&shard.header().provenance)?;
        let found = self.noted(&name, shard.tokens())?;
        if found != tokens {
            let got = "other tokens under the same name";
            return Err(StoreError::new(
                ErrorKind::Foreign,
                "shard tokens",
                "those asked for",
                got,
            ));
        }
        Ok(self.unexpired(&name, shard, now))
    }

    /// Whether a shard of some tokens is there and has not expired, by its header alone.
    ///
    /// # Errors
    /// As for [`Self::get`].
    pub fn contains(
        &self,
        provenance: &Provenance,
        tokens: &[u32],
        now: u64,
    ) -> Result<bool, StoreError> {
        provenance.check()?;
        check_tokens(tokens)?;
        let shard = self.open_shard(&provenance.name(self.naming, tokens))?;
        let Some(shard) = shard else { return Ok(false) };
        provenance.expect(&shard.header().provenance)?;
        Ok(shard.header().tokens == tokens.len() as u64 && !shard.header().is_expired(now))
    }

    /// Opens a shard by its name, whoever's it is and whether or not it has expired; `None` where
    /// there is none. For those who keep the store, not for what a tenant asks.
    ///
    /// # Errors
    /// `Truncated`, `Corrupt`, `OtherSchema`, `Io`.
    pub fn open_shard(&self, name: &ShardName) -> Result<Option<Shard>, StoreError> {
        self.noted(name, self.opened(name))
    }

    /// Removes a shard; when this returns, that survives too. Says whether there was one.
    ///
    /// # Errors
    /// `InvalidArgument` for one that a document names, `Io`.
    pub fn delete(&self, name: &ShardName) -> Result<bool, StoreError> {
        let (mut books, mut changing) = self.changing()?;
        if books.names(name) > 0 {
            let expected = "a shard that no document names";
            return Err(StoreError::invalid("delete", expected, name));
        }
        if !self.unlink(&mut books, name)? {
            return Ok(false);
        }
        sync(&self.folder.shards())?;
        told(&mut books, &mut changing)?;
        Ok(true)
    }

    /// What the store holds, by name; of one namespace, or all.
    ///
    /// # Errors
    /// `Io`.
    pub fn list(&self, namespace: Option<&str>) -> Result<Vec<Listed>, StoreError> {
        let books = self.books()?;
        let of = |header: &Result<Arc<ShardHeader>, StoreError>| {
            let own = |n: &str| header.as_ref().is_ok_and(|h| h.provenance.namespace == n);
            namespace.is_none_or(own)
        };
        let listed = books.shards().filter(|(_, entry)| of(&entry.header));
        Ok(listed
            .map(|(name, entry)| Listed {
                name: name.clone(),
                header: entry.header.clone(),
                bytes: entry.bytes,
                used: entry.used,
                documents: books.names(name),
            })
            .collect())
    }

    /// Bytes of all files, and of those of each namespace.
    ///
    /// # Errors
    /// `Io`.
    pub fn held(&self) -> Result<(u64, HashMap<String, u64>), StoreError> {
        let books = self.books()?;
        Ok((books.held("").0, books.namespaces().clone()))
    }

    // ---- inside ---------------------------------------------------------------------------------

    /// Puts a file that was written beside in its place, and evicts what has to go for it.
    pub(crate) fn admit(
        &self,
        name: ShardName,
        header: ShardHeader,
        beside: Beside,
        now: u64,
    ) -> Result<Stored, StoreError> {
        let (mut books, mut changing) = self.changing()?;
        let mut going = self.room(&books, &header, &name, now)?;
        // Others may have read meanwhile what looks unused from here.
        while books.restamp(&self.folder, &going) {
            going = self.room(&books, &header, &name, now)?;
        }
        set_used(&beside.file, now);
        let found = beside.file.metadata();
        let found = found.map_err(|error| StoreError::io("shard", "to be measured", &error))?;
        beside.publish(&self.folder.shard(&name))?;
        books.enter(name.clone(), Ok(Arc::new(header)), &found);
        let mut evicted = Vec::new();
        for victim in going {
            if self.unlink(&mut books, &victim)? {
                evicted.push(victim);
            }
        }
        told(&mut books, &mut changing)?;
        Ok(Stored { name, written: true, evicted })
    }

    /// The books, brought up to date with what other processes have done.
    pub(crate) fn books(&self) -> Result<MutexGuard<'_, Books>, StoreError> {
        let mut books = locked(&self.books);
        let changes = self.folder.changes()?;
        books.refresh(&self.folder, changes, self.threads)?;
        Ok(books)
    }

    /// The same, and the right to change the folder.
    pub(crate) fn changing(&self) -> Result<(MutexGuard<'_, Books>, Changing), StoreError> {
        let mut books = locked(&self.books);
        let changing = self.folder.change()?;
        books.refresh(&self.folder, changing.changes, self.threads)?;
        Ok((books, changing))
    }

    /// Removes a file and strikes it out; says whether it was there.
    pub(crate) fn unlink(&self, books: &mut Books, name: &ShardName) -> Result<bool, StoreError> {
        let removed = fs::remove_file(self.folder.shard(name));
        if let Err(error) = &removed
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(StoreError::io("shard", "to be removed", error));
        }
        books.remove(name);
        Ok(removed.is_ok())
    }

    pub(crate) fn document_file(&self, namespace: &str, name: &str) -> PathBuf {
        self.folder.documents().join(Document::file_name(self.naming, namespace, name))
    }

    fn room(
        &self,
        books: &Books,
        header: &ShardHeader,
        name: &ShardName,
        now: u64,
    ) -> Result<Vec<ShardName>, StoreError> {
        let wanted = (&*header.provenance.namespace, header.file_bytes()?, name);
        books.room(&locked(&self.budget), &*self.victims, wanted, now)
    }

    pub(crate) fn opened(&self, name: &ShardName) -> Result<Option<Shard>, StoreError> {
        Shard::open(&self.folder.shard(name), self.threads, self.direct)
    }

    /// Whether a shard that says the same of itself lies there and is not known to be spoiled.
    fn is_there(&self, name: &ShardName, header: &ShardHeader) -> Result<bool, StoreError> {
        if self.books()?.entry(name).is_some_and(|entry| entry.header.is_err()) {
            return Ok(false);
        }
        let Ok(Some(shard)) = self.open_shard(name) else { return Ok(false) };
        let found = shard.header();
        let same = found.provenance == header.provenance
            && found.expires == header.expires
            && found.parts[0] == header.parts[0];
        Ok(same && shard.tokens().is_ok())
    }

    /// Notes that a shard was found to be spoiled: what is put next in its place is written, and it
    /// is collected.
    pub fn note_damage(&self, name: &ShardName, why: &StoreError) {
        locked(&self.books).spoil(name, why.clone());
    }

    /// The outcome of reading a shard; that it is spoiled is noted.
    pub(crate) fn noted<T>(
        &self,
        name: &ShardName,
        outcome: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if let Err(error) = &outcome
            && error.is_damage()
        {
            self.note_damage(name, error);
        }
        outcome
    }

    /// The shard, used now, unless it has expired.
    pub(crate) fn unexpired(&self, name: &ShardName, shard: Shard, now: u64) -> Option<Shard> {
        if shard.header().is_expired(now) {
            return None;
        }
        self.touch(name, now);
        Some(shard)
    }

    fn touch(&self, name: &ShardName, now: u64) {
        // A file that is not ours to touch is read all the same; its order of use is lost then.
        if let Ok(file) = File::open(self.folder.shard(name)) {
            set_used(&file, now);
        }
        // Whoever reads does not wait for one who changes the folder: the file's stamp is the
        // truth, and is looked at before anything is evicted.
        if let Ok(mut books) = self.books.try_lock() {
            books.touch(name, now);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn told(books: &mut Books, changing: &mut Changing) -> Result<(), StoreError> {
    changing.changed()?;
    books.follow(changing.changes);
    Ok(())
}

fn set_used(file: &File, now: u64) {
    let time = UNIX_EPOCH.checked_add(Duration::from_millis(now));
    let _ = time.map(|time| file.set_times(FileTimes::new().set_modified(time)));
}
