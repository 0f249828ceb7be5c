//! Parts of a file into a caller's memory: past the page cache where the file system allows it.
//!
//! Direct reads take whole blocks into aligned memory. Chunks of a part are read side by side, by
//! threads that hash what they have read; where the caller's memory is not aligned, and for the
//! last block of a part, the bytes go through a buffer that is.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::checksum::{CHUNK, is_zero, of_chunk};
use crate::error::StoreError;
use crate::header::{ALIGN, PartEntry};

/// What memory has to be aligned to for a device to write into it: the largest that is usual.
const MEMORY_ALIGN: usize = 512;
const BLOCK: usize = ALIGN as usize;

/// How a part came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadPath {
    /// From the device into the caller's memory, but for the last block.
    Direct,
    /// From the device, through an aligned buffer: the caller's memory is not aligned to 512 bytes.
    Bounced,
    /// Through the page cache: direct reads were not asked for.
    Buffered,
    /// Through the page cache: the file system or the device refused direct reads.
    Refused,
}

impl ReadPath {
    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ReadPath::Direct => "direct",
            ReadPath::Bounced => "bounced",
            ReadPath::Buffered => "buffered",
            ReadPath::Refused => "refused",
        }
    }
}

/// A file whose parts are read, and how.
#[derive(Debug)]
pub struct PartFile {
    file: File,
    threads: usize,
    wanted: bool,
    direct: AtomicBool,
}

impl PartFile {
    /// `threads` read side by side; `direct`: past the page cache, if that can be had.
    pub fn new(file: File, threads: usize, direct: bool) -> PartFile {
        let granted = direct && set_direct(&file, true);
        let threads = threads.max(1);
        PartFile { file, threads, wanted: direct, direct: AtomicBool::new(granted) }
    }

    /// Fills `out`, which has the part's size, from `begin` of the file on.
    ///
    /// # Errors
    /// `Corrupt` where the bytes are not those of the checksum, `Io`; `out` holds anything then.
    pub fn read(
        &self,
        begin: u64,
        part: &PartEntry,
        out: &mut [u8],
    ) -> Result<ReadPath, StoreError> {
        let hashes = self.read_chunks(begin, part, out)?;
        part.check_hashes(&hashes)?;
        Ok(match (self.wanted, self.is_direct()) {
            (false, _) => ReadPath::Buffered,
            (true, false) => ReadPath::Refused,
            (true, true) if out.len() < BLOCK || is_aligned(out) => ReadPath::Direct,
            (true, true) => ReadPath::Bounced,
        })
    }

    /// Fills `out` with bytes of a part from `at` of the file on, and returns the hashes of its
    /// chunks: nothing is held to a checksum, see [`PartEntry::check_hashes`].
    ///
    /// # Errors
    /// `Corrupt` for other bytes than zeros behind the part, `Io`.
    pub fn read_chunks(
        &self,
        at: u64,
        part: &PartEntry,
        out: &mut [u8],
    ) -> Result<Vec<u64>, StoreError> {
        let failed = |error: io::Error| {
            let what = format!("shard part {}", part.name);
            if error.kind() == io::ErrorKind::InvalidData {
                return StoreError::corrupt(what, "zeros behind it", "others");
            }
            StoreError::io(what, "to be read", &error)
        };
        match self.chunks(at, out) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && self.is_direct() => {
                set_direct(&self.file, false);
                self.direct.store(false, Ordering::Relaxed);
                self.chunks(at, out).map_err(failed)
            }
            other => other.map_err(failed),
        }
    }

    fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Reads all chunks of a part, and returns their hashes.
    fn chunks(&self, begin: u64, out: &mut [u8]) -> io::Result<Vec<u64>> {
        let mut hashes = vec![0; out.len().div_ceil(CHUNK)];
        let threads = self.threads.min(hashes.len());
        let chunks = Mutex::new(out.chunks_mut(CHUNK).zip(&mut hashes).enumerate());
        let work = || -> io::Result<()> {
            let mut bounce = Aligned::default();
            loop {
                let next = chunks.lock().map_or(None, |mut chunks| chunks.next());
                let Some((place, (chunk, hash))) = next else { return Ok(()) };
                self.chunk(begin + (place * CHUNK) as u64, chunk, &mut bounce)?;
                *hash = of_chunk(chunk);
            }
        };
        if threads <= 1 {
            work()?;
        } else {
            thread::scope(|scope| {
                let readers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
                let ended = readers.into_iter().map(|reader| {
                    reader.join().unwrap_or_else(|_| Err(io::Error::other("a reader that ended")))
                });
                ended.collect::<Vec<_>>().into_iter().collect::<io::Result<Vec<()>>>()
            })?;
        }
        Ok(hashes)
    }

    /// Reads one chunk; behind the end of a part there are zeros up to the next block.
    fn chunk(&self, at: u64, out: &mut [u8], bounce: &mut Aligned) -> io::Result<()> {
        let whole = out.len() / BLOCK * BLOCK;
        let (blocks, rest) = out.split_at_mut(whole);
        if !self.is_direct() || is_aligned(blocks) {
            self.file.read_exact_at(blocks, at)?;
        } else {
            let held = bounce.bytes(whole);
            self.file.read_exact_at(held, at)?;
            blocks.copy_from_slice(held);
        }
        if rest.is_empty() {
            return Ok(());
        }
        let held = bounce.bytes(BLOCK);
        self.file.read_exact_at(held, at + whole as u64)?;
        let (bytes, zeros) = held.split_at(rest.len());
        rest.copy_from_slice(bytes);
        if !is_zero(zeros) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }
}

fn is_aligned(bytes: &[u8]) -> bool {
    (bytes.as_ptr() as usize).is_multiple_of(MEMORY_ALIGN)
}

/// Turns direct reads on or off for an open file; says whether that could be had.
fn set_direct(file: &File, on: bool) -> bool {
    let set = |flags: OFlags| {
        let flags = if on { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT };
        fcntl_setfl(file, flags)
    };
    fcntl_getfl(file).and_then(set).is_ok()
}

/// Memory that direct reads may go to.
#[derive(Default)]
struct Aligned(Vec<u8>);

impl Aligned {
    fn bytes(&mut self, length: usize) -> &mut [u8] {
        if self.0.len() < length + BLOCK {
            self.0.resize(length + BLOCK, 0);
        }
        let begin = self.0.as_ptr().align_offset(BLOCK);
        &mut self.0[begin..begin + length]
    }
}
