//! Caches of few blocks whose heads keep everything, or windows of two kinds.

use kvweave_core::{CacheConfig, HeadClass, HeadClassMap, KvCache, KvDtype, KvShape};

const P: usize = 4;

/// Two layers of three heads: one full, the others of two windows where `windows` says so.
pub fn cache_of(blocks: u64, windows: bool) -> KvCache {
    let shape = KvShape::new(2, 3, 8, P as u32, KvDtype::F32).unwrap();
    let mut map = HeadClassMap::full(&shape, "m");
    for (i, entry) in map.heads.iter_mut().enumerate() {
        if windows && i % 3 != 0 {
            let (sink, recent) = if i % 3 == 1 { (3, 7) } else { (0, 10) };
            entry.class = HeadClass::Window { sink, recent };
        }
    }
    let mut config = CacheConfig::new(shape, 0);
    config.heads = Some(map);
    KvCache::new(config.sized_for(blocks).unwrap()).unwrap()
}
