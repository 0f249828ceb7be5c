//! Scores of pages by their bounds.

use kvweave_core::ops::{Element, Entry, OpError, PageScore, ScorePages, SharedScore};

use crate::rotate::rotate;

/// See [`ScorePages`].
///
/// # Errors
/// What [`ScorePages::validate`] refuses.
pub fn score_pages<T: Element>(params: ScorePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let ScorePages { queries, kv, scoring, entry_offsets, bounds, score, shared, .. } = params;
    let ScorePages { scores, width, counts, .. } = params;
    let (kv_heads, dim) = (kv.geometry.kv_heads, kv.geometry.head_dim);
    let group = queries.vectors.heads / kv_heads;
    for at in 0..counts.len() {
        let (request, head) = (at / kv_heads, at % kv_heads);
        let reach = kv.head(head, &scoring);
        let entries = &kv.entries[kv.span(entry_offsets, request, reach.table)];
        counts[at] = entries.len() as i32;
        for (place, &row) in scores[at * width..].iter_mut().zip(entries) {
            let entry = Entry::new(row);
            let mut room = Vec::new();
            let of_page = bounds.of_page(entry.block + reach.rank, (dim, score), &mut room);
            let scale = f64::from(scoring.scale);
            let heads = (head * group..(head + 1) * group).map(|head| {
                let q = queries.vectors.vector(request, head);
                let mut q: Vec<f64> = q.iter().map(|x| x.to_f64()).collect();
                rotate(&mut q, scoring.rope, kv.layer, -i64::from(entry.delta));
                let logit = dot_of(&q, of_page, score) * scale;
                let capped = |cap: f32| f64::from(cap) * (logit / f64::from(cap)).tanh();
                scoring.softcap.map_or(logit, capped)
            });
            let whole = match shared {
                SharedScore::Sum => heads.sum(),
                SharedScore::Highest => heads.fold(f64::NEG_INFINITY, greater),
            };
            *place = f32::from_f64(whole);
        }
    }
    Ok(())
}

/// Of a query and the bounds that its score is made of.
fn dot_of(q: &[f64], bounds: &[f32], score: PageScore) -> f64 {
    let dim = q.len();
    let bound = |which: usize, d: usize| f64::from(bounds[which * dim + d]);
    let parts = q.iter().enumerate().map(|(d, &q)| match score {
        PageScore::Mean => q * bound(0, d),
        PageScore::MinMax => greater(q * bound(0, d), q * bound(1, d)),
    });
    parts.sum()
}

/// The greater of two numbers, NaN where one is.
fn greater(one: f64, other: f64) -> f64 {
    if one.is_nan() || one > other { one } else { other }
}
