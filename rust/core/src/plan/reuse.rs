//! `ReusePlan`: every prompt token reused by prefix, reused by segment, or recomputed (law 2).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::content::MissReason;
use crate::error::Error;

/// Where a reused segment's KV comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "from", content = "name")]
pub enum SegmentSource {
    /// A knowledge base, by the name of the frozen segment.
    Frozen(String),
    /// The blocks of an earlier request or generation.
    Request,
}

/// What happens to the tokens of a span.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Outcome {
    /// Exact KV of the same prefix.
    Prefix,
    /// KV of the same text elsewhere.
    Segment {
        /// New position − position at which the stored K was rotated.
        delta: i32,
        /// Whose KV it is.
        source: SegmentSource,
        /// Whether the donor computed it exactly, in its own context.
        exact: bool,
        /// Whether the donor's text is the marked segment's from its first token on: the segment's
        /// own encoding. If not, blocks of another text are read that only have equal tokens; so it
        /// is with discovered text, of which nobody says where it begins.
        own: bool,
    },
    /// Computed by this request.
    Recompute {
        /// Why it was not reused.
        reason: MissReason,
    },
}

/// A run of tokens with one outcome; half-open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSpan {
    /// First position.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// What happens to it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

impl PlanSpan {
    /// Reads a span that was written as JSON.
    ///
    /// # Errors
    /// `InvalidArgument` for anything that is no span, or an empty one.
    pub fn from_json(text: &str) -> Result<PlanSpan, Error> {
        let read: PlanSpan = serde_json::from_str(text)
            .map_err(|error| Error::invalid("span", "a span of a plan as JSON", error))?;
        if read.start >= read.end {
            let got = format!("{}..{}", read.start, read.end);
            return Err(Error::invalid("span", "start < end", got));
        }
        Ok(read)
    }

    /// The span as JSON.
    ///
    /// # Errors
    /// None that is known: names and numbers have a form there.
    pub fn to_json(&self) -> Result<String, Error> {
        serde_json::to_string(self).map_err(|error| Error::inconsistent("span", "JSON", error))
    }
}

/// A partition of a prompt's tokens by what happens to them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReusePlan {
    /// T, the prompt's tokens.
    pub tokens: usize,
    /// Sorted, gap-free over [0, T), neighbours of different outcome.
    pub spans: Vec<PlanSpan>,
}

impl ReusePlan {
    /// Builds a plan from spans in any order; neighbours of one outcome are joined.
    pub(crate) fn new(tokens: usize, mut spans: Vec<PlanSpan>) -> ReusePlan {
        spans.sort_unstable_by_key(|span| span.start);
        let mut joined: Vec<PlanSpan> = Vec::with_capacity(spans.len().min(64));
        for span in spans.into_iter().filter(|span| span.start < span.end) {
            match joined.last_mut() {
                Some(last) if last.end == span.start && last.outcome == span.outcome => {
                    last.end = span.end;
                }
                _ => joined.push(span),
            }
        }
        ReusePlan { tokens, spans: joined }
    }

    /// Reads a plan that was written as JSON.
    ///
    /// # Errors
    /// `InvalidArgument` for anything that is no plan, or one whose spans leave tokens out.
    pub fn from_json(text: &str) -> Result<ReusePlan, Error> {
        let read: ReusePlan = serde_json::from_str(text)
            .map_err(|error| Error::invalid("plan", "a reuse plan as JSON", error))?;
        let mut at = 0;
        for span in &read.spans {
            if span.start != at || span.end <= at {
                let expected = format!("a span of tokens from {at} on");
                return Err(Error::invalid(
                    "plan",
                    expected,
                    format!("{}..{}", span.start, span.end),
                ));
            }
            at = span.end;
        }
        // Positions are i32.
        if at != read.tokens || i32::try_from(at).is_err() {
            let expected = format!("spans of all {} tokens, at most 2147483647", read.tokens);
            return Err(Error::invalid("plan", expected, format!("spans of {at}")));
        }
        Ok(read)
    }

    /// The plan as JSON.
    ///
    /// # Errors
    /// None that is known: names and numbers have a form there.
    pub fn to_json(&self) -> Result<String, Error> {
        serde_json::to_string(self).map_err(|error| Error::inconsistent("plan", "JSON", error))
    }

    fn count(&self, wanted: impl Fn(&Outcome) -> bool) -> usize {
        self.spans.iter().filter(|s| wanted(&s.outcome)).map(|s| s.end - s.start).sum()
    }

    /// Tokens reused by exact prefix.
    #[must_use]
    pub fn prefix_tokens(&self) -> usize {
        self.count(|outcome| *outcome == Outcome::Prefix)
    }

    /// Tokens reused by segment.
    #[must_use]
    pub fn segment_tokens(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Segment { .. }))
    }

    /// Tokens computed by this request.
    #[must_use]
    pub fn recomputed_tokens(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Recompute { .. }))
    }

    /// Positions of the recomputed tokens, sorted.
    #[must_use]
    pub fn rows(&self) -> Vec<i32> {
        let recomputed = |span: &&PlanSpan| matches!(span.outcome, Outcome::Recompute { .. });
        let spans = self.spans.iter().filter(recomputed);
        spans.flat_map(|span| span.start as i32..span.end as i32).collect()
    }
}

impl fmt::Display for ReusePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tokens: {} by prefix, {} by segment, {} recomputed",
            self.tokens,
            self.prefix_tokens(),
            self.segment_tokens(),
            self.recomputed_tokens()
        )?;
        for span in &self.spans {
            write!(f, "\n  [{}, {}) ", span.start, span.end)?;
            match &span.outcome {
                Outcome::Prefix => write!(f, "prefix")?,
                Outcome::Segment { delta, source, exact, own } => {
                    let quality = if *exact { "exact" } else { "approximate" };
                    let whose = if *own { "" } else { ", equal tokens of another text" };
                    match source {
                        SegmentSource::Frozen(name) => write!(f, "segment of {name:?}")?,
                        SegmentSource::Request => write!(f, "segment of an earlier request")?,
                    }
                    write!(f, ", delta {delta:+}, {quality}{whose}")?;
                }
                Outcome::Recompute { reason } => {
                    write!(f, "recompute ({reason}): {}", reason.sentence())?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> ReusePlan {
        let span = |start, end, outcome| PlanSpan { start, end, outcome };
        let source = SegmentSource::Request;
        let segment = Outcome::Segment { delta: 3, source, exact: true, own: true };
        ReusePlan::new(
            10,
            vec![
                span(9, 10, Outcome::Recompute { reason: MissReason::LastToken }),
                span(4, 6, segment.clone()),
                span(0, 4, Outcome::Prefix),
                span(6, 9, segment),
            ],
        )
    }

    #[test]
    fn neighbours_of_one_outcome_are_joined_and_counted() {
        let plan = sample();
        assert_eq!(plan.spans.len(), 3);
        assert_eq!((plan.prefix_tokens(), plan.segment_tokens()), (4, 5));
        assert_eq!((plan.recomputed_tokens(), plan.rows()), (1, vec![9]));
    }

    #[test]
    fn a_plan_reads_as_text_and_as_json() {
        let text = sample().to_string();
        assert!(text.contains("[4, 9) segment of an earlier request, delta +3, exact"));
        assert!(text.contains("[9, 10) recompute (last-token)"));
        let json = serde_json::to_value(sample()).unwrap();
        assert_eq!(json["spans"][1]["kind"], "segment");
        assert_eq!(json["spans"][2]["reason"], "last-token");
    }

    #[test]
    fn a_plan_that_was_written_is_read_again() {
        let plan = sample();
        assert_eq!(ReusePlan::from_json(&plan.to_json().unwrap()).unwrap(), plan);
        let none = ReusePlan::new(0, Vec::new());
        assert_eq!(ReusePlan::from_json(&none.to_json().unwrap()).unwrap(), none);
        for span in plan.spans {
            assert_eq!(PlanSpan::from_json(&span.to_json().unwrap()).unwrap(), span);
        }
    }

    #[test]
    fn what_is_no_plan_is_refused() {
        let span = |range: &str| format!(r#"{{"kind":"prefix",{range}}}"#);
        let of = |tokens: usize, spans: &[&str]| {
            let spans: Vec<String> = spans.iter().map(|range| span(range)).collect();
            format!(r#"{{"tokens":{tokens},"spans":[{}]}}"#, spans.join(","))
        };
        let whole = r#""start":0,"end":4"#;
        assert!(ReusePlan::from_json(&of(4, &[whole])).is_ok());
        let huge = format!(r#""start":0,"end":{}"#, u32::MAX);
        for bad in [
            String::new(),
            "[]".into(),
            of(5, &[whole]),
            of(4, &[]),
            of(4, &[r#""start":0,"end":2"#, r#""start":3,"end":4"#]),
            of(4, &[r#""start":0,"end":3"#, r#""start":2,"end":4"#]),
            of(4, &[r#""start":0,"end":0"#, whole]),
            of(u32::MAX as usize, &[&huge]),
            of(4, &[whole]).replace("prefix", "postfix"),
            of(4, &[whole]).replace("4}", "-4}"),
        ] {
            let error = ReusePlan::from_json(&bad).unwrap_err();
            assert_eq!(error.kind(), crate::error::ErrorKind::InvalidArgument, "{bad}");
        }
    }
}
