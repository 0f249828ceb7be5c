//! A few values of the weights that a map was made for, checked before anybody compares them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::refusal::corrupt;
use crate::error::Error;

/// Tensors that a map may have values of.
const MOST_TENSORS: usize = 1 << 14;
/// Bytes of a tensor's name.
const MOST_NAME_BYTES: usize = 256;
/// Values of a tensor.
const MOST_VALUES: usize = 64;
/// Axes of a tensor.
const MOST_AXES: usize = 4;
/// Elements of a tensor: positions of values are counted in integers of 64 bits.
const MOST_ELEMENTS: u64 = 1 << 48;

/// What values were rounded to in the model that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampledDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

/// Values of one tensor of a model's weights.
///
/// Of S elements in row-major order, value i of n is element (2i + 1)·S / 2n, rounded down.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightSample {
    /// What the values are in.
    pub dtype: SampledDtype,
    /// The tensor's axes.
    pub shape: Vec<u64>,
    /// Its values.
    pub values: Vec<f32>,
}

/// Refuses samples that no weights could have, or that are too large to be one.
///
/// # Errors
/// `CorruptHeadMap` naming the tensor and what is wrong.
pub(super) fn check_samples(samples: &BTreeMap<String, WeightSample>) -> Result<(), Error> {
    if samples.len() > MOST_TENSORS {
        let expected = format!("at most {MOST_TENSORS} tensors");
        return Err(corrupt("head map weights", expected, samples.len()));
    }
    samples.iter().try_for_each(|(name, sample)| sample.check(name))
}

impl WeightSample {
    fn check(&self, name: &str) -> Result<(), Error> {
        if !(1..=MOST_NAME_BYTES).contains(&name.len()) {
            let expected = format!("names of 1 to {MOST_NAME_BYTES} bytes");
            return Err(corrupt("head map weights", expected, format!("{} bytes", name.len())));
        }
        let what = |field: &str| format!("head map weights {name}: {field}");
        if !(1..=MOST_AXES).contains(&self.shape.len()) {
            let expected = format!("1 to {MOST_AXES} axes");
            return Err(corrupt(what("shape"), expected, self.shape.len()));
        }
        let size = self.shape.iter().try_fold(1u64, |size, axis| size.checked_mul(*axis));
        let size = size.filter(|size| (1..=MOST_ELEMENTS).contains(size)).ok_or_else(|| {
            let expected = format!("1 to {MOST_ELEMENTS} elements");
            corrupt(what("shape"), expected, format!("{:?}", self.shape))
        })?;
        let most = MOST_VALUES.min(usize::try_from(size).unwrap_or(MOST_VALUES));
        if !(1..=most).contains(&self.values.len()) {
            let expected = format!("1 to {most} values");
            return Err(corrupt(what("values"), expected, self.values.len()));
        }
        match self.values.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(corrupt(what("values"), "finite numbers", value)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::HeadClassMap;
    use super::*;
    use crate::error::ErrorKind;
    use crate::shape::{KvDtype, KvShape};

    fn sample(shape: &[u64], values: &[f32]) -> WeightSample {
        WeightSample { dtype: SampledDtype::Bf16, shape: shape.into(), values: values.into() }
    }

    fn with(name: &str, sample: WeightSample) -> HeadClassMap {
        let shape = KvShape::new(1, 1, 8, 4, KvDtype::F32).unwrap();
        let mut map = HeadClassMap::full(&shape, "m");
        map.weights.insert(name.into(), sample);
        map
    }

    #[test]
    fn samples_round_trip_and_none_are_left_out() {
        let map = with("norm.weight", sample(&[8, 4], &[0.1, -2.5e-8, 1.0]));
        let text = map.to_json().unwrap();
        assert!(text.contains("0.1,") && text.contains("\"bf16\""), "{text}");
        assert_eq!(HeadClassMap::from_json(&text).unwrap(), map);
        let none = HeadClassMap { weights: BTreeMap::new(), ..map };
        assert!(!none.to_json().unwrap().contains("weights"));
    }

    #[test]
    fn hostile_samples_say_what_is_wrong() {
        let long = "n".repeat(MOST_NAME_BYTES + 1);
        let cases = [
            with("", sample(&[8], &[0.0])),
            with(&long, sample(&[8], &[0.0])),
            with("a", sample(&[], &[0.0])),
            with("a", sample(&[1; 5], &[0.0])),
            with("a", sample(&[8, 0], &[0.0])),
            with("a", sample(&[1 << 40, 1 << 40], &[0.0])),
            with("a", sample(&[8], &[])),
            with("a", sample(&[2], &[0.0; 3])),
            with("a", sample(&[1 << 20], &[0.0; MOST_VALUES + 1])),
        ];
        for map in cases {
            let text = serde_json::to_string(&map).unwrap();
            let error = HeadClassMap::from_json(&text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CorruptHeadMap);
            assert!(error.to_string().contains("weights"), "{error}");
        }
        let text = serde_json::to_string(&with("a", sample(&[8], &[0.25]))).unwrap();
        for other in ["NaN", "1e39", "-1e300", "1e999", "null", "\"0.25\""] {
            let error = HeadClassMap::from_json(&text.replace("0.25", other)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CorruptHeadMap, "{other}");
        }
    }

    #[test]
    fn there_are_only_so_many() {
        let mut map = with("a", sample(&[8], &[0.0]));
        for number in 0..MOST_TENSORS {
            map.weights.insert(number.to_string(), sample(&[8], &[0.0]));
        }
        assert!(map.validate().unwrap_err().to_string().contains("tensors"));
    }
}
