//! What pages are chosen by.

/// What a page's score is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageScore {
    /// No key of the page scores higher: `Σ_d max(q_d · min_d, q_d · max_d)` (Quest; FlexiCache,
    /// section 3.2).
    MinMax,
    /// What the page's mean key scores (MosaicKV, section 5.1).
    Mean,
}
