//! What a cache is built from.

use crate::content::HashKind;
use crate::error::{Error, ErrorKind};
use crate::heads::{HeadClassMap, HeadGroups, LocalWindow};
use crate::pool::{BlockGroup, Eviction, GroupKind, Pool};
use crate::shape::KvShape;

/// Geometry, memory and policy of a cache.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// The model's KV geometry.
    pub shape: KvShape,
    /// Head classes; without them every head is full and there is one group.
    pub heads: Option<HeadClassMap>,
    /// Pages of the arena, the null block included.
    pub arena_pages: u64,
    /// Pages of a slab; chosen from the arena if not given.
    pub slab_pages: Option<u32>,
    /// How content is hashed.
    pub hash: HashKind,
    /// Share of the arena that knowledge bases may pin, in percent.
    pub frozen_share: u8,
    /// Which cached blocks go first where room is wanted.
    pub eviction: Eviction,
    /// Share of the arena in use above which knowledge bases shrink, in percent.
    pub watermark: u8,
}

impl CacheConfig {
    /// One group, XXH3, half of the arena for knowledge bases, watermark at 90 percent.
    #[must_use]
    pub fn new(shape: KvShape, arena_pages: u64) -> CacheConfig {
        CacheConfig {
            shape,
            heads: None,
            arena_pages,
            slab_pages: None,
            hash: HashKind::default(),
            frozen_share: 50,
            watermark: 90,
            eviction: Eviction::default(),
        }
    }

    /// The same with an arena that holds `blocks` blocks of every head group at the same time: any
    /// prompts of that many blocks, whatever the heads' classes.
    ///
    /// # Errors
    /// `CorruptHeadMap` for a head map that does not fit the shape, `InvalidArgument` if page
    /// numbers would not fit an i32.
    pub fn sized_for(mut self, blocks: u64) -> Result<CacheConfig, Error> {
        let groups = self.validated_groups()?;
        let blocks_of = block_groups(groups.pages(), &groups.windows());
        self.arena_pages = Pool::pages_for(&blocks_of, blocks)?;
        Ok(self)
    }

    pub(super) fn validated_groups(&self) -> Result<HeadGroups, Error> {
        for (name, value) in [("frozen_share", self.frozen_share), ("watermark", self.watermark)] {
            if value > 100 {
                return Err(Error::invalid(name, "0 <= percent <= 100", value));
            }
        }
        let Some(map) = &self.heads else { return Ok(HeadGroups::single(&self.shape)) };
        let (layers, heads) = (self.shape.layers(), self.shape.kv_heads());
        if (map.layers, map.kv_heads) != (layers, heads) {
            let expected = format!("{layers} layers of {heads} KV heads");
            let got = format!("{} layers of {}", map.layers, map.kv_heads);
            return Err(Error::new(ErrorKind::CorruptHeadMap, "head map", expected, got));
        }
        let groups = map.groups()?;
        let page = self.shape.page_tokens() as usize;
        if let Some(window) = groups.windows().into_iter().flatten().find(|w| w.recent < page) {
            let expected = format!("window.recent of at least a page, {page} tokens");
            let kind = ErrorKind::CorruptHeadMap;
            return Err(Error::new(kind, "head map", expected, window.recent));
        }
        Ok(groups)
    }
}

/// The pool's groups: those of the heads, then single pages for heads that are promoted, if there
/// is a window group to promote them from.
pub(super) fn block_groups(pages: &[u32], windows: &[Option<LocalWindow>]) -> Vec<BlockGroup> {
    let kind = |window: &Option<LocalWindow>| match window {
        Some(_) => GroupKind::Window,
        None => GroupKind::Full,
    };
    let heads = pages.iter().zip(windows);
    let mut groups: Vec<BlockGroup> =
        heads.map(|(&pages, window)| BlockGroup { pages, kind: kind(window) }).collect();
    if windows.iter().any(Option::is_some) {
        groups.push(BlockGroup { pages: 1, kind: GroupKind::SinglePage });
    }
    groups
}
