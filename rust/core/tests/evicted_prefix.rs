//! A prefix of which an admission evicts what no row sees.

use kvweave_core::{
    Admission, CacheConfig, GroupId, HeadClass, HeadClassMap, KvCache, KvDtype, KvShape, RankedBy,
    Request,
};

const PAGE: usize = 4;

/// A cache of twelve blocks of two heads.
fn cache_of(classes: [HeadClass; 2]) -> KvCache {
    let shape = KvShape::new(1, 2, 8, PAGE as u32, KvDtype::F32).unwrap();
    let mut map = HeadClassMap::full(&shape, "m");
    for (entry, class) in map.heads.iter_mut().zip(classes) {
        entry.class = class;
    }
    let config = CacheConfig { heads: Some(map), ..CacheConfig::new(shape, 0) };
    KvCache::new(config.sized_for(12).unwrap()).unwrap()
}

fn text(from: u32, blocks: usize) -> Vec<u32> {
    (from..from + (blocks * PAGE) as u32).collect()
}

fn learnt(cache: &KvCache, tokens: &[u32]) -> Request {
    let mut request = cache.admit(&Admission::new(tokens)).unwrap();
    request.take_copies_of(GroupId(0)).unwrap();
    request.finish_copies();
    request.commit(tokens.len(), tokens.len()).unwrap();
    request
}

#[test]
fn what_made_room_is_no_hit_and_nobody_is_led_to_what_took_its_number() {
    let cache = cache_of([HeadClass::Window { sink: 4, recent: 8 }; 2]);
    learnt(&cache, &text(1, 1)).freeze("book", 0..PAGE).unwrap();
    let first = text(100, 8);
    drop(learnt(&cache, &first));
    assert_eq!(cache.stats().evictions, 0);
    // The sink and the last two blocks are held; of the five between some have to go.
    let longer = [&first[..], &text(500, 5)].concat();
    let mut request = cache.admit(&Admission::new(&longer)).unwrap();
    assert_eq!(request.plan().prefix_tokens(), first.len());
    assert!(cache.stats().evictions > 0, "nothing had to go");
    cache.check().unwrap();
    // Another text takes the numbers of what went.
    let other = text(900, 2);
    drop(learnt(&cache, &other));
    request.commit(longer.len(), longer.len()).unwrap();
    cache.check().unwrap();
    drop(request);
    let mixed = [&other[..], &longer[first.len()..]].concat();
    assert!(cache.lookup_prefix(&mixed, "") <= other.len(), "KV of another text is served");
    cache.check().unwrap();
}

#[test]
fn a_text_without_its_blocks_of_one_full_group_is_no_hit() {
    let cache = cache_of([
        HeadClass::Full,
        HeadClass::TopK { pages: 3, rerank_every: 4, score: RankedBy::MinMax, estimate: false },
    ]);
    let first = text(100, 7);
    drop(learnt(&cache, &first));
    // Slots take room of the second group alone.
    let mut other = cache.admit(&Admission::new(&text(500, 3))).unwrap();
    other.spill(GroupId(1), &[0], 8).unwrap();
    let evicted = cache.stats().evictions;
    assert!(evicted > 0, "nothing had to go");
    cache.check().unwrap();
    let found = cache.lookup_prefix(&first, "");
    assert_eq!(found, first.len() - evicted as usize * PAGE);
    drop(other);
    let request = cache.admit(&Admission::new(&first)).unwrap();
    assert_eq!(request.plan().prefix_tokens(), found);
    cache.check().unwrap();
}
