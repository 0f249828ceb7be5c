//! What Python chooses by a word or a number, as the core has it.

use kvweave_core::ops::{
    KeptNumbers, PackedKind, PageScore, Pairing, ScaleDtype, SharedScore, TopR, Way,
};
use kvweave_core::{Advice, Eviction, HashKind, Hint, Mode, Past, Reuse};

use crate::arguments::count;
use crate::failure::Failure;
use crate::scalars::Number;

pub fn hash_kind(name: &str) -> Result<HashKind, Failure> {
    match name {
        "xxh3-128" => Ok(HashKind::Xxh3_128),
        "sha256" => Ok(HashKind::Sha256),
        _ => Err(Failure::invalid("hash", "xxh3-128 or sha256", format!("{name:?}"))),
    }
}

pub fn eviction_kind(name: &str) -> Result<Eviction, Failure> {
    match name {
        "lru" => Ok(Eviction::Lru),
        "cost-aware" => Ok(Eviction::CostAware),
        "s3-fifo" => Ok(Eviction::S3Fifo),
        "lfu" => Ok(Eviction::Lfu),
        _ => {
            let expected = "lru, cost-aware, s3-fifo or lfu";
            Err(Failure::invalid("eviction", expected, format!("{name:?}")))
        }
    }
}

pub fn reuse_kind(name: &str) -> Result<Reuse, Failure> {
    match name {
        "none" => Ok(Reuse::None),
        "prefix" => Ok(Reuse::Prefix),
        "segments" => Ok(Reuse::Segments),
        _ => Err(Failure::invalid("reuse", "none, prefix or segments", format!("{name:?}"))),
    }
}

pub fn pairing_kind(name: &str) -> Result<Pairing, Failure> {
    match name {
        "half" => Ok(Pairing::Half),
        "interleaved" => Ok(Pairing::Interleaved),
        _ => Err(Failure::invalid("pairing", "half or interleaved", format!("{name:?}"))),
    }
}

pub fn mode_kind(name: &str) -> Result<Mode, Failure> {
    match name {
        "materialise" => Ok(Mode::Materialise),
        "share" => Ok(Mode::Share),
        _ => Err(Failure::invalid("mode", "materialise or share", format!("{name:?}"))),
    }
}

pub fn page_score(name: &str) -> Result<PageScore, Failure> {
    match name {
        "min-max" => Ok(PageScore::MinMax),
        "mean" => Ok(PageScore::Mean),
        _ => Err(Failure::invalid("score", "min-max or mean", format!("{name:?}"))),
    }
}

pub fn way_of_pages(name: &str) -> Result<Way, Failure> {
    match name {
        "fetch" => Ok(Way::Fetch),
        "spill" => Ok(Way::Spill),
        _ => Err(Failure::invalid("way", "fetch or spill", format!("{name:?}"))),
    }
}

pub fn shared_score(name: &str) -> Result<SharedScore, Failure> {
    match name {
        "highest" => Ok(SharedScore::Highest),
        "sum" => Ok(SharedScore::Sum),
        _ => Err(Failure::invalid("shared", "highest or sum", format!("{name:?}"))),
    }
}

/// How much of a vector top-r pages keep, as Python says it: r, g, C and what numbers become; and
/// in how many bytes planes have a token.
pub struct Kept<'a> {
    pub kept: Option<Number>,
    pub group: Number,
    pub channels: Option<Number>,
    pub numbers: Option<&'a str>,
    pub token_bytes: Option<Number>,
}

pub fn packed_kind(name: &str, of: Kept<'_>, head_dim: usize) -> Result<PackedKind, Failure> {
    let whole = of.kept.is_none() && of.channels.is_none() && of.numbers.is_none();
    let group = of.group.whole("group")?;
    let whole = whole && group == 1;
    let got = || format!("{name:?}");
    match name {
        "int4" | "int8" | "planes" if !whole => {
            Err(Failure::invalid("kind", "top-r for kept channels", got()))
        }
        "int4" | "int8" | "top-r" if of.token_bytes.is_some() => {
            Err(Failure::invalid("kind", "planes for bytes of a token", got()))
        }
        "int4" => Ok(PackedKind::Int4),
        "int8" => Ok(PackedKind::Int8),
        "planes" => {
            let none = || Failure::invalid("token_bytes", "a number", "none");
            Ok(PackedKind::Planes(count("token_bytes", of.token_bytes.ok_or_else(none)?)?))
        }
        "top-r" => {
            let kept = of.kept.ok_or_else(|| Failure::invalid("kept", "a number", "none"))?;
            Ok(PackedKind::TopR(TopR {
                kept: count("kept", kept)?,
                group: count("group", group)?,
                channels: of.channels.map_or(Ok(head_dim), |some| count("channels", some))?,
                numbers: kept_numbers(of.numbers.unwrap_or("bf16"))?,
            }))
        }
        _ => Err(Failure::invalid("kind", "int4, int8, top-r or planes", got())),
    }
}

fn kept_numbers(name: &str) -> Result<KeptNumbers, Failure> {
    match name {
        "bf16" => Ok(KeptNumbers::Bf16),
        "fp8" => Ok(KeptNumbers::Fp8),
        "int4" => Ok(KeptNumbers::Int4),
        _ => Err(Failure::invalid("numbers", "bf16, fp8 or int4", format!("{name:?}"))),
    }
}

pub fn scale_dtype(name: &str) -> Result<ScaleDtype, Failure> {
    match name {
        "bf16" => Ok(ScaleDtype::Bf16),
        "f16" => Ok(ScaleDtype::F16),
        _ => Err(Failure::invalid("scales", "bf16 or f16", format!("{name:?}"))),
    }
}

/// What is known of a text: `past` is what it is from the time `until` on.
pub fn advice(
    priority: Number,
    cost: Number,
    (until, past): (Option<Number>, &str),
    hint: &str,
) -> Result<Advice, Failure> {
    let hint = match hint {
        "none" => Hint::None,
        "soon" => Hint::Soon,
        "done" => Hint::Done,
        _ => return Err(Failure::invalid("hint", "none, soon or done", format!("{hint:?}"))),
    };
    let past = match past {
        "first" => Past::First,
        "plain" => Past::Plain,
        _ => return Err(Failure::invalid("past", "first or plain", format!("{past:?}"))),
    };
    let outside = |what, most: u32, got| Failure::invalid(what, format!("0 to {most}"), got);
    let (priority, cost) = (priority.whole("priority")?, cost.whole("cost")?);
    Ok(Advice {
        priority: u8::try_from(priority)
            .map_err(|_| outside("priority", u8::MAX.into(), priority))?,
        cost: u32::try_from(cost).map_err(|_| outside("cost", u32::MAX, cost))?,
        until: until.map_or(Ok(u64::MAX), |until| count("until", until).map(|at| at as u64))?,
        past,
        hint,
    })
}

/// A quota in blocks, given in blocks or in bytes of blocks of `block_bytes`; none is none.
pub fn quota_blocks(
    blocks: Option<Number>,
    bytes: Option<Number>,
    block_bytes: u64,
) -> Result<Option<usize>, Failure> {
    match (blocks, bytes) {
        (Some(_), Some(_)) => Err(Failure::invalid("quota", "blocks or bytes", "both")),
        (Some(blocks), None) => count("blocks", blocks).map(Some),
        (None, Some(bytes)) => Ok(Some(count("bytes", bytes)? / block_bytes as usize)),
        (None, None) => Ok(None),
    }
}

/// A share from 0 to 1 in whole percent.
pub fn percent(what: &str, share: f64) -> Result<u8, Failure> {
    if (0.0..=1.0).contains(&share) {
        return Ok((share * 100.0).round() as u8);
    }
    Err(Failure::invalid(what, "a share from 0 to 1", share))
}
