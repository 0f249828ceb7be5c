//! A prompt, and what may be done with it: what a caller says when it asks for admission.

use crate::error::{Error, ErrorKind};

/// What an admission may reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Nothing.
    None,
    /// The exact prefix.
    Prefix,
    /// The exact prefix, then segments.
    #[default]
    Segments,
}

/// How reused segments are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Copied into private blocks, K rotated to the new position.
    #[default]
    Materialise,
    /// Where they are, with the query rotated back.
    Share,
}

/// A token range that may be reused from a namespace wherever it stands.
#[derive(Clone, Copy, Debug)]
pub struct MarkedSegment<'a> {
    /// First position.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// The namespace it may come from.
    pub namespace: &'a str,
}

/// A prompt and what may be done with it.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// The namespace of the prompt itself: its prefix, discovery, and what it leaves behind.
    pub namespace: &'a str,
    /// Reusable ranges, in any order, not overlapping.
    pub marked: &'a [MarkedSegment<'a>],
    /// Whether unmarked text is searched for cached content too.
    pub discover: bool,
    /// What may be reused.
    pub reuse: Reuse,
    /// How segments are read.
    pub mode: Mode,
    /// Room for this many tokens after the prompt.
    pub reserve_tokens: usize,
    /// Fingerprint of the RoPE parameters: part of every key.
    pub regime: u64,
    /// Rows that are computed at once, for window groups to have room for no more than these and
    /// what they see; 0 for the whole prompt. See [`Request::advance`].
    pub chunk_tokens: usize,
    /// Whether what is computed of a mark is found again in the mark's namespace. If not, it is in
    /// the prompt's own: who may read a namespace then leaves nothing there.
    pub publish: bool,
}

impl<'a> Admission<'a> {
    /// A prompt in the empty namespace with no marks, no discovery, copies and no reserve.
    #[must_use]
    pub fn new(tokens: &'a [u32]) -> Admission<'a> {
        Admission {
            tokens,
            namespace: "",
            marked: &[],
            discover: false,
            reuse: Reuse::default(),
            mode: Mode::default(),
            reserve_tokens: 0,
            regime: 0,
            chunk_tokens: 0,
            publish: true,
        }
    }

    /// The marks in order of position.
    pub(super) fn sorted_marks(&self) -> Result<Vec<MarkedSegment<'a>>, Error> {
        let total = self.tokens.len();
        if total == 0 {
            return Err(Error::invalid("prompt", "at least one token", 0));
        }
        let room = total.checked_add(self.reserve_tokens).and_then(|n| i32::try_from(n).ok());
        if room.is_none() {
            let got = format!("{total} + {} reserved", self.reserve_tokens);
            return Err(Error::invalid("prompt", "at most 2147483647 positions", got));
        }
        let mut marks = self.marked.to_vec();
        for mark in &marks {
            if mark.start >= mark.end || mark.end > total {
                let expected = format!("a non-empty range inside [0, {total})");
                let got = format!("[{}, {})", mark.start, mark.end);
                return Err(Error::out_of_range("marked segment", expected, got));
            }
        }
        marks.sort_unstable_by_key(|mark| (mark.start, mark.end));
        let overlap = marks.windows(2).find(|pair| pair[1].start < pair[0].end);
        match overlap {
            Some(pair) => Err(overlapping(&pair[0], &pair[1])),
            None => Ok(marks),
        }
    }
}

fn overlapping(first: &MarkedSegment<'_>, second: &MarkedSegment<'_>) -> Error {
    let named = |mark: &MarkedSegment<'_>| {
        format!("[{}, {}) of {:?}", mark.start, mark.end, mark.namespace)
    };
    let got = format!("{} and {}", named(first), named(second));
    let same = first.namespace == second.namespace;
    let kind = if same { ErrorKind::InvalidArgument } else { ErrorKind::NamespaceConflict };
    Error::new(kind, "marked segments", "segments that do not overlap", got)
}
