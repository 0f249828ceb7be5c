//! Names of content: what is cached has a number of its own, wherever its KV lies.

/// One block of tokens in one text: a node of the index. Numbers are given anew when content is
/// forgotten, so who keeps one for longer keeps a [`Link`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub(crate) struct ContentId(u32);

impl ContentId {
    /// No content.
    pub(crate) const NONE: ContentId = ContentId(u32::MAX);

    pub(crate) fn new(index: u32) -> ContentId {
        ContentId(index)
    }

    /// The index of this content in arrays of contents.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// Whether this names content at all.
    pub(crate) fn is_some(self) -> bool {
        self != ContentId::NONE
    }

    /// The same, as an option.
    pub(crate) fn some(self) -> Option<ContentId> {
        self.is_some().then_some(self)
    }
}

/// A block of a document: the document's number, which grows with time, and the place in it.
pub(crate) type DocumentBlock = (u64, u32);

/// What precedes a block in the prefix tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    /// Nothing: the block starts a prompt.
    Root,
    /// This content.
    Content(ContentId),
}

/// A reference to content that outlives it: void once the generation has moved on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(super) content: ContentId,
    pub(super) generation: u32,
}

impl Link {
    pub(super) const NONE: Link = Link { content: ContentId::NONE, generation: 0 };
}
