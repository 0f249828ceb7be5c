//! What each (layer, KV head) of a model keeps and reads, as JSON and checked.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::refusal::corrupt;
use super::sample::{WeightSample, check_samples};
use crate::error::Error;
use crate::shape::KvShape;

/// The schema of the JSON form that this version reads and writes.
pub const SCHEMA_VERSION: u32 = 1;

/// What pages are ranked by.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum RankedBy {
    /// What none of a page's keys scores above, by its least and greatest key (Quest; FlexiCache,
    /// section 3.2).
    #[default]
    MinMax,
    /// What its mean key scores (MosaicKV, section 5.1).
    Mean,
}

impl RankedBy {
    /// As maps have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RankedBy::MinMax => "min-max",
            RankedBy::Mean => "mean",
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
    fn is_default(&self) -> bool {
        *self == RankedBy::default()
    }
}

/// What a (layer, KV head) keeps and reads.
///
/// What is said beside `pages` and `rerank_every` may be left out, and is left out where it is what
/// leaving it out means: maps that do not use it are those of versions that did not know it, and
/// these refuse the others by the name of the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum HeadClass {
    /// Every token.
    Full,
    /// The first `sink` tokens and the latest `recent`.
    Window {
        /// Tokens at the start of the sequence that are always kept.
        sink: u32,
        /// Tokens before the present one that are kept.
        recent: u32,
    },
    /// Every token is kept, the best `pages` pages are read.
    TopK {
        /// Pages that are read a step.
        pages: u32,
        /// Steps between two rankings; 1 ranks at every step.
        rerank_every: u32,
        /// What they are ranked by.
        #[serde(default, skip_serializing_if = "RankedBy::is_default")]
        score: RankedBy,
        /// Whether the mean key and value of each other page enter attention as one term.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        estimate: bool,
    },
}

/// Whether a head attends over the whole context or only near the present token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredReach {
    /// Over the whole context.
    Global,
    /// Sink and recent tokens only.
    Local,
}

/// Whether the pages that a head finds important stay the same from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stability {
    /// Seldom change.
    Stable,
    /// Change at every step.
    Unstable,
}

/// One (layer, KV head) of a map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadEntry {
    /// Layer, from 0.
    pub layer: u32,
    /// KV head, from 0.
    pub head: u32,
    /// What is kept and read.
    pub class: HeadClass,
    /// Measured reach.
    pub reach: MeasuredReach,
    /// Measured stability.
    pub stability: Stability,
}

/// The class of every (layer, KV head) of one model, with the evidence for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadClassMap {
    /// Equal to [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Names the weights that were measured.
    pub model_fingerprint: String,
    /// L.
    pub layers: u32,
    /// G.
    pub kv_heads: u32,
    /// Each (layer, KV head) once, in any order.
    pub heads: Vec<HeadEntry>,
    /// How the classes were found: dataset, thresholds, figures.
    #[serde(default)]
    pub evidence: BTreeMap<String, serde_json::Value>,
    /// Some values of the weights that were measured, by the name of their tensor: whoever has
    /// weights can tell whether the map is of them. Maps may have none, and versions that do not
    /// know them refuse the others by the name of the field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<String, WeightSample>,
}

impl HeadClassMap {
    /// The map in which every head is full: one group.
    #[must_use]
    pub fn full(shape: &KvShape, model_fingerprint: &str) -> HeadClassMap {
        let heads = (0..shape.layers())
            .flat_map(|layer| (0..shape.kv_heads()).map(move |head| (layer, head)))
            .map(|(layer, head)| HeadEntry {
                layer,
                head,
                class: HeadClass::Full,
                reach: MeasuredReach::Global,
                stability: Stability::Stable,
            })
            .collect();
        HeadClassMap {
            schema_version: SCHEMA_VERSION,
            model_fingerprint: model_fingerprint.to_owned(),
            layers: shape.layers(),
            kv_heads: shape.kv_heads(),
            heads,
            evidence: BTreeMap::new(),
            weights: BTreeMap::new(),
        }
    }

    /// Reads and validates the JSON form.
    ///
    /// # Errors
    /// `CorruptHeadMap` naming what is wrong.
    pub fn from_json(text: &str) -> Result<HeadClassMap, Error> {
        let map: HeadClassMap =
            serde_json::from_str(text).map_err(|error| match seems_a_path(text) {
                true => {
                    let got = format!("what seems to be the path of a file: {text:?}");
                    corrupt("head map", "JSON text", got)
                }
                false => corrupt("head map", "the head map JSON schema", error),
            })?;
        map.validate()?;
        Ok(map)
    }

    /// The JSON form.
    ///
    /// # Errors
    /// `CorruptHeadMap` if the map does not validate.
    pub fn to_json(&self) -> Result<String, Error> {
        self.validate()?;
        serde_json::to_string_pretty(self)
            .map_err(|error| corrupt("head map", "serialisable evidence", error))
    }

    /// Checks that the schema is known and each (layer, KV head) stands there exactly once.
    ///
    /// # Errors
    /// `CorruptHeadMap` naming what is wrong.
    pub fn validate(&self) -> Result<(), Error> {
        if self.schema_version != SCHEMA_VERSION {
            let want = SCHEMA_VERSION.to_string();
            return Err(corrupt("head map schema_version", want, self.schema_version));
        }
        if self.model_fingerprint.is_empty() {
            return Err(corrupt("head map model_fingerprint", "a non-empty string", "\"\""));
        }
        let want = u64::from(self.layers) * u64::from(self.kv_heads);
        if want == 0 || want != self.heads.len() as u64 {
            let expected = format!("{} x {} entries, at least one", self.layers, self.kv_heads);
            return Err(corrupt("head map heads", expected, self.heads.len()));
        }
        let mut seen = vec![false; self.heads.len()];
        for entry in &self.heads {
            self.validate_entry(entry, &mut seen)?;
        }
        check_samples(&self.weights)
    }

    fn validate_entry(&self, entry: &HeadEntry, seen: &mut [bool]) -> Result<(), Error> {
        let name = format!("head map entry (layer {}, head {})", entry.layer, entry.head);
        if entry.layer >= self.layers || entry.head >= self.kv_heads {
            let expected = format!("layer < {} and head < {}", self.layers, self.kv_heads);
            return Err(corrupt(name, expected, "an index out of range"));
        }
        let at = entry.layer as usize * self.kv_heads as usize + entry.head as usize;
        if std::mem::replace(&mut seen[at], true) {
            return Err(corrupt(name, "one entry a head", "a second one"));
        }
        match entry.class {
            HeadClass::Window { recent: 0, .. } => {
                Err(corrupt(name, "window.recent of at least 1", 0))
            }
            HeadClass::TopK { pages: 0, .. } => Err(corrupt(name, "top_k.pages of at least 1", 0)),
            HeadClass::TopK { rerank_every: 0, .. } => {
                Err(corrupt(name, "top_k.rerank_every of at least 1", 0))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a text that is no map may have been meant as the name of the file that has it.
fn seems_a_path(text: &str) -> bool {
    let other = text.contains(['{', '[', '"', '\n']);
    !other && (text.ends_with(".json") || text.contains(['/', '\\']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::ids::GroupId;
    use crate::shape::KvDtype;

    fn top_k(pages: u32) -> HeadClass {
        let score = RankedBy::MinMax;
        HeadClass::TopK { pages, rerank_every: 1, score, estimate: false }
    }

    fn mixed() -> HeadClassMap {
        let shape = KvShape::new(2, 3, 8, 4, KvDtype::F32).unwrap();
        let mut map = HeadClassMap::full(&shape, "m");
        map.heads[1].class = HeadClass::Window { sink: 4, recent: 8 };
        map.heads[4].class = HeadClass::Window { sink: 4, recent: 8 };
        map.heads[5].class = top_k(2);
        map
    }

    #[test]
    fn groups_rank_heads_layer_major() {
        let groups = mixed().groups().unwrap();
        assert_eq!(groups.pages(), &[3, 2, 1]);
        assert_eq!(groups.rank(0, 0).unwrap(), (GroupId(0), 0));
        assert_eq!(groups.rank(0, 1).unwrap(), (GroupId(1), 0));
        assert_eq!(groups.rank(1, 1).unwrap(), (GroupId(1), 1));
        assert_eq!(groups.rank(1, 0).unwrap(), (GroupId(0), 2));
        assert!(groups.rank(2, 0).is_err());
        assert!(groups.rank(0, 3).is_err());
    }

    #[test]
    fn json_round_trips() {
        let map = mixed();
        assert_eq!(HeadClassMap::from_json(&map.to_json().unwrap()).unwrap(), map);
    }

    #[test]
    fn what_is_not_said_of_a_ranking_is_what_it_always_was() {
        let plain = serde_json::to_string(&top_k(2)).unwrap();
        assert_eq!(plain, r#"{"kind":"top_k","pages":2,"rerank_every":1}"#);
        let class =
            HeadClass::TopK { pages: 2, rerank_every: 1, score: RankedBy::Mean, estimate: true };
        let text = serde_json::to_string(&class).unwrap();
        let said = r#","score":"mean","estimate":true}"#;
        assert_eq!(text, format!("{}{said}", plain.strip_suffix('}').unwrap()));
        for class in [class, top_k(2)] {
            let text = serde_json::to_string(&class).unwrap();
            assert_eq!(serde_json::from_str::<HeadClass>(&text).unwrap(), class);
        }
        assert!(class > top_k(2));
    }

    #[test]
    fn corrupt_maps_say_what_is_wrong() {
        let good = mixed();
        let mut cases = Vec::new();
        let mut change = |edit: &dyn Fn(&mut HeadClassMap), word: &str| {
            let mut map = good.clone();
            edit(&mut map);
            cases.push((serde_json::to_string(&map).unwrap(), word.to_owned()));
        };
        change(&|m| m.schema_version = 9, "schema_version");
        change(&|m| m.model_fingerprint.clear(), "model_fingerprint");
        change(&|m| m.heads.truncate(5), "entries");
        change(&|m| m.heads[0].layer = 7, "layer 7");
        change(&|m| m.heads[0].head = 1, "second");
        change(&|m| m.heads[1].class = HeadClass::Window { sink: 0, recent: 0 }, "recent");
        change(&|m| m.heads[1].class = top_k(0), "pages");
        cases.push(("{".into(), "schema".into()));
        cases.push((String::new(), "schema".into()));
        for path in ["heads.json", "maps/heads", "C:\\maps\\heads"] {
            cases.push((
                path.into(),
                format!("JSON text, got what seems to be the path of a file: {path:?}"),
            ));
        }
        for (text, word) in cases {
            let error = HeadClassMap::from_json(&text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CorruptHeadMap);
            assert!(error.to_string().contains(&word), "{error} does not name {word}");
        }
    }
}
