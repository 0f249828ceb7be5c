//! How many bits each channel of a vector gets: exactly those that lose least within some bytes.

use kvweave_core::ops::{CHANNELS_TOGETHER, PLANE_BITS, PlaneWidths};

/// Of a normal number's variance, what a code of 8, 4 and 2 bits loses with the best equal steps.
const LOST: [f64; 3] = [1.0e-4, 0.01154, 0.1188];
/// Those steps, in standard deviations (Max, "Quantizing for minimum distortion", 1960, table II;
/// of 8 bits by the same sum).
const STEPS: [f64; 3] = [0.0308, 0.3352, 0.9957];

/// The bits of each channel, and its steps in standard deviations: 0 where it has no bits.
pub(crate) fn steps(widths: PlaneWidths) -> impl Iterator<Item = (f32, f64)> {
    let planes = widths.0.into_iter().zip(PLANE_BITS).zip(STEPS);
    planes
        .flat_map(|((width, bits), step)| (0..width).map(move |_| (bits as f32, step)))
        .chain(std::iter::repeat((0.0, 0.0)))
}

/// Shares so many bytes out between keys and values, whose channels lose a share of these weights,
/// the largest first. Every division is tried; of equal ones the first is taken: fewer channels
/// of 8 bits, then of 4, then fewer bytes of keys.
pub(crate) fn share_out(keys: &[f64], values: &[f64], bytes: usize) -> [PlaneWidths; 2] {
    let (keys, values) = (Least::within(keys, bytes), Least::within(values, bytes));
    let of_keys = (0..=bytes)
        .min_by(|&a, &b| {
            let lost = |of: usize| keys.lost[of] + values.lost[bytes - of];
            lost(a).total_cmp(&lost(b))
        })
        .unwrap_or(0);
    [keys.widths[of_keys], values.widths[bytes - of_keys]]
}

/// The least that channels lose within 0, 1, … bytes, and how.
struct Least {
    lost: Vec<f64>,
    widths: Vec<PlaneWidths>,
}

impl Least {
    fn within(weights: &[f64], bytes: usize) -> Self {
        let groups = weights.len() / CHANNELS_TOGETHER;
        let mut sums = vec![0.0];
        for group in weights.chunks_exact(CHANNELS_TOGETHER) {
            sums.push(sums[sums.len() - 1] + group.iter().sum::<f64>());
        }
        let mut least = Self {
            lost: vec![f64::INFINITY; bytes + 1],
            widths: vec![PlaneWidths::default(); bytes + 1],
        };
        for eight in 0..=groups {
            for four in eight..=groups {
                for two in four..=groups {
                    let counts = [eight, four - eight, two - four];
                    let widths = PlaneWidths(counts.map(|count| count * CHANNELS_TOGETHER));
                    if widths.bytes() > bytes {
                        break;
                    }
                    let parts = [sums[eight], sums[four] - sums[eight], sums[two] - sums[four]];
                    let kept: f64 = parts.iter().zip(LOST).map(|(part, lost)| part * lost).sum();
                    let lost = kept + sums[groups] - sums[two];
                    if lost < least.lost[widths.bytes()] {
                        least.lost[widths.bytes()] = lost;
                        least.widths[widths.bytes()] = widths;
                    }
                }
            }
        }
        // What fewer bytes lose, more do at most.
        for size in 1..=bytes {
            if least.lost[size - 1] <= least.lost[size] {
                least.lost[size] = least.lost[size - 1];
                least.widths[size] = least.widths[size - 1];
            }
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(weights: &[f64], widths: PlaneWidths) -> f64 {
        let losses = widths.0.into_iter().zip(LOST).flat_map(|(n, lost)| vec![lost; n]);
        let losses = losses.chain(std::iter::repeat(1.0));
        weights.iter().zip(losses).map(|(weight, lost)| weight * lost).sum()
    }

    #[test]
    fn no_division_loses_less() {
        let keys: Vec<f64> = (0..16).map(|i| 900.0 * 0.6f64.powi(i)).collect();
        let values: Vec<f64> = (0..16).map(|i| 3.0 / f64::from(i + 1)).collect();
        for bytes in 1..=32 {
            let found = share_out(&keys, &values, bytes);
            assert!(found[0].bytes() + found[1].bytes() <= bytes);
            let best = lost(&keys, found[0]) + lost(&values, found[1]);
            let all: Vec<PlaneWidths> = (0..125)
                .map(|n| PlaneWidths([n / 25, n / 5 % 5, n % 5].map(|count| 4 * count)))
                .filter(|widths| widths.channels() <= 16)
                .collect();
            for &one in &all {
                for &other in all.iter().filter(|of| of.bytes() + one.bytes() <= bytes) {
                    assert!(best <= lost(&keys, one) + lost(&values, other) + 1e-9);
                }
            }
        }
    }

    #[test]
    fn nothing_and_plenty_are_shared_out_too() {
        assert_eq!(share_out(&[0.0; 16], &[0.0; 16], 8), [PlaneWidths::default(); 2]);
        let all = share_out(&[2.0; 16], &[1.0; 16], 32);
        assert_eq!(all, [PlaneWidths([16, 0, 0]); 2]);
    }
}
