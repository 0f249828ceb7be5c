//! What the writer writes, which follows from two numbers.

use kvweave_store::{Dtype, Layout, Provenance};

/// The tokens and bytes of a shard, for whoever writes it and whoever compares.
pub fn content(seed: u64, number: u64) -> (Vec<u32>, Vec<u8>) {
    let mut state = (seed << 32 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let size = (next() % 200_000) as usize;
    let tokens = vec![seed as u32, number as u32];
    (tokens, (0..size).map(|_| next() as u8).collect())
}

/// What all of them are of.
pub fn provenance() -> Provenance {
    Provenance {
        namespace: "writer".into(),
        model: "model".into(),
        dtype: Dtype::Bf16,
        regime: 7,
        heads: String::new(),
        layout: Layout { kind: "bytes".into(), layers: 1, kv_heads: 1, head_dim: 64 },
    }
}
