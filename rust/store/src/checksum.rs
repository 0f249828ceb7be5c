//! Checksums of parts, such that chunks can be read and checked in any order and side by side.
//!
//! A part is cut into chunks of 1 MiB, each hashed by XXH3 (64 bits); the checksum is the hash of
//! these hashes and the part's length. It finds what a disk has spoiled; it is no signature.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes that are read, and hashed, at once.
pub const CHUNK: usize = 1 << 20;

/// The hash of one chunk.
pub fn of_chunk(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// The checksum of a part of `bytes` bytes from the hashes of its chunks.
pub fn of_hashes(hashes: &[u64], bytes: u64) -> u64 {
    let listed: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    xxh3_64_with_seed(&listed, bytes)
}

/// Whether a gap between parts holds nothing. By runs, which take one instruction for many bytes.
pub fn is_zero(gap: &[u8]) -> bool {
    gap.chunks(256).all(|run| run.iter().fold(0, |all, &byte| all | byte) == 0)
}

/// The checksum of a part.
pub fn of_part(bytes: &[u8]) -> u64 {
    let hashes: Vec<u64> = bytes.chunks(CHUNK).map(of_chunk).collect();
    of_hashes(&hashes, bytes.len() as u64)
}
