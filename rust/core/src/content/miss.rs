//! Why a prompt token is computed and not reused.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One reason a recomputed token; none of them depends on another namespace's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MissReason {
    /// Fresh text: in no marked segment, and discovery is off.
    Fresh,
    /// No block of this namespace has this content.
    NotCached,
    /// It was cached behind the same text and had to go, as far as that is remembered.
    Evicted,
    /// The marked segment is shorter than a block and was not cached as a whole.
    ShorterThanBlock,
    /// The marked segment's last, incomplete block is not cached.
    TailNotCached,
    /// The segment begins inside a donor block of which the beginning differs.
    MisalignedStart,
    /// Another text of the same namespace has the same digest; token ids told them apart.
    HashCollision,
    /// The prompt's last token: its logits are wanted, so it is always computed.
    LastToken,
    /// The request asked for no reuse at all.
    ReuseOff,
    /// The token is in a marked segment, but the request asked for prefix reuse only.
    SegmentsOff,
}

impl MissReason {
    /// All reasons, in the order of [`Self::index`].
    pub const ALL: [MissReason; 10] = [
        MissReason::Fresh,
        MissReason::NotCached,
        MissReason::Evicted,
        MissReason::ShorterThanBlock,
        MissReason::TailNotCached,
        MissReason::MisalignedStart,
        MissReason::HashCollision,
        MissReason::LastToken,
        MissReason::ReuseOff,
        MissReason::SegmentsOff,
    ];

    /// The place of this reason in [`Self::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// A stable name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MissReason::Fresh => "fresh",
            MissReason::NotCached => "not-cached",
            MissReason::Evicted => "evicted",
            MissReason::ShorterThanBlock => "shorter-than-block",
            MissReason::TailNotCached => "tail-not-cached",
            MissReason::MisalignedStart => "misaligned-start",
            MissReason::HashCollision => "hash-collision",
            MissReason::LastToken => "last-token",
            MissReason::ReuseOff => "reuse-off",
            MissReason::SegmentsOff => "segments-off",
        }
    }

    /// What it means, as a sentence.
    #[must_use]
    pub fn sentence(self) -> &'static str {
        match self {
            MissReason::Fresh => "fresh text: not marked, and discovery is off",
            MissReason::NotCached => "no block of this namespace has this content",
            MissReason::Evicted => "it was cached and had to make room",
            MissReason::ShorterThanBlock => "a segment shorter than a block, not cached as a whole",
            MissReason::TailNotCached => "the segment's incomplete last block is not cached",
            MissReason::MisalignedStart => "the donor block begins with other text",
            MissReason::HashCollision => "another text has the same digest",
            MissReason::LastToken => "the last token's logits are wanted",
            MissReason::ReuseOff => "the request asked for no reuse",
            MissReason::SegmentsOff => "a marked segment, but only prefix reuse was asked for",
        }
    }
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_json_form_and_places_are_in_order() {
        for (place, reason) in MissReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), place);
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
            assert!(!reason.sentence().is_empty());
        }
    }
}
