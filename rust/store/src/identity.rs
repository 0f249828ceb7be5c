//! What a shard's KV is of, and the name that follows from it.
//!
//! The name hashes the tokens and everything that their KV depends on, so whoever has the same text
//! for the same model finds the shard without asking an index. A name says where to look and never
//! what was found: who opens a shard compares all of it, the token ids included.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use crate::error::{ErrorKind, StoreError};

/// Bytes that a namespace, a fingerprint or a document's name may have.
pub const MOST_NAME_BYTES: usize = 4096;
/// Tokens that a shard may have.
pub const MOST_TOKENS: usize = 1 << 31;

/// Element type of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// e4m3 numbers, whose scales are the model's.
    #[serde(rename = "fp8_e4m3")]
    Fp8E4m3,
}

impl Dtype {
    const ALL: [Dtype; 4] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::Fp8E4m3];

    /// The name in headers and in Python.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::Fp8E4m3 => "fp8_e4m3",
        }
    }

    /// The dtype of a name.
    ///
    /// # Errors
    /// `InvalidArgument` for any other name.
    pub fn of(name: &str) -> Result<Dtype, StoreError> {
        let names = Dtype::ALL.map(Dtype::name).join(", ");
        let found = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| StoreError::invalid("dtype", format!("one of {names}"), brief(name)))
    }
}

/// How the parts of a shard are to be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// What the parts are, by the name of whoever makes them: `payload`, `packed-pages`, …
    pub kind: String,
    /// L.
    pub layers: u32,
    /// G.
    pub kv_heads: u32,
    /// D.
    pub head_dim: u32,
}

/// Everything but the tokens that K and V depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Whose text it is.
    pub namespace: String,
    /// Fingerprint of the weights; behind a space, what else of the model its KV depends on.
    pub model: String,
    /// Element type.
    pub dtype: Dtype,
    /// Fingerprint of the frequencies of RoPE that keys are rotated by.
    pub regime: u64,
    /// Fingerprint of the head map; empty where every head keeps everything.
    pub heads: String,
    /// How the parts are to be read.
    pub layout: Layout,
}

impl Provenance {
    /// Refuses names that no shard may have.
    ///
    /// # Errors
    /// `InvalidArgument` for a name of more than [`MOST_NAME_BYTES`], no model or no layout.
    pub fn check(&self) -> Result<(), StoreError> {
        check_name("namespace", &self.namespace, 0)?;
        check_name("model fingerprint", &self.model, 1)?;
        check_name("head map fingerprint", &self.heads, 0)?;
        check_name("layout kind", &self.layout.kind, 1)?;
        let Layout { layers, kv_heads, head_dim, .. } = self.layout;
        for (what, size) in [("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)] {
            if !(1..=1 << 20).contains(&size) {
                let expected = format!("1 to {}", 1 << 20);
                return Err(StoreError::invalid(format!("layout {what}"), expected, size));
            }
        }
        Ok(())
    }

    /// Refuses a shard of anything else, naming the first field that differs.
    ///
    /// # Errors
    /// `Foreign`.
    pub fn expect(&self, found: &Provenance) -> Result<(), StoreError> {
        let differs = |what: &str, wanted: &dyn fmt::Debug, got: &dyn fmt::Debug| {
            let (wanted, got) = (brief(&format!("{wanted:?}")), brief(&format!("{got:?}")));
            Err(StoreError::new(ErrorKind::Foreign, format!("shard {what}"), wanted, got))
        };
        if self.namespace != found.namespace {
            // One tenant is not told what another calls itself.
            return differs("namespace", &self.namespace, &"another");
        }
        if self.model != found.model {
            return differs("model", &self.model, &found.model);
        }
        if self.dtype != found.dtype {
            return differs("dtype", &self.dtype.name(), &found.dtype.name());
        }
        if self.regime != found.regime {
            return differs("rope regime", &self.regime, &found.regime);
        }
        if self.heads != found.heads {
            return differs("head map", &self.heads, &found.heads);
        }
        if self.layout != found.layout {
            return differs("layout", &self.layout, &found.layout);
        }
        Ok(())
    }

    /// The name of the shard of some tokens.
    #[must_use]
    pub fn name(&self, naming: Naming, tokens: &[u32]) -> ShardName {
        let Layout { kind, layers, kv_heads, head_dim } = &self.layout;
        let texts = [&*self.namespace, &self.model, self.dtype.name(), &self.heads, kind];
        let mut named = Vec::with_capacity(128 + 4 * tokens.len());
        for text in texts {
            named.extend((text.len() as u64).to_le_bytes());
            named.extend(text.as_bytes());
        }
        named.extend(self.regime.to_le_bytes());
        for size in [layers, kv_heads, head_dim] {
            named.extend(size.to_le_bytes());
        }
        named.extend((tokens.len() as u64).to_le_bytes());
        tokens.iter().for_each(|token| named.extend(token.to_le_bytes()));
        ShardName(naming.hex(&named))
    }
}

/// How names are made of what they name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Naming {
    /// XXH3, 128 bits: fast, not against an adversary, who could have his shard take the place of
    /// another's. It would still be refused to whoever asks for that.
    #[default]
    #[serde(rename = "xxh3-128")]
    Xxh3,
    /// SHA-256, for tenants that may be hostile.
    #[serde(rename = "sha256")]
    Sha256,
}

impl Naming {
    /// The name in Python and in the store's own record.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Naming::Xxh3 => "xxh3-128",
            Naming::Sha256 => "sha256",
        }
    }

    /// The naming of a name.
    ///
    /// # Errors
    /// `InvalidArgument` for any other name.
    pub fn of(name: &str) -> Result<Naming, StoreError> {
        let found = [Naming::Xxh3, Naming::Sha256].into_iter().find(|one| one.name() == name);
        found.ok_or_else(|| StoreError::invalid("hash", "xxh3-128 or sha256", brief(name)))
    }

    pub(crate) fn hex(self, bytes: &[u8]) -> String {
        match self {
            Naming::Xxh3 => format!("{:032x}", xxh3_128(bytes)),
            Naming::Sha256 => Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect(),
        }
    }
}

/// The name of a shard: 32 or 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardName(String);

impl ShardName {
    /// A name that somebody gives, which may be anything: what is no name is no path either.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn parse(text: &str) -> Result<ShardName, StoreError> {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if matches!(text.len(), 32 | 64) && text.bytes().all(digit) {
            return Ok(ShardName(text.to_owned()));
        }
        let expected = "32 or 64 hexadecimal digits in lower case";
        Err(StoreError::invalid("shard name", expected, brief(text)))
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ShardName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether what a shard says of its model is this one. Behind a space may stand what else of the
/// model its KV depends on.
pub(crate) fn is_of(found: &str, model: &str) -> bool {
    let rest = found.strip_prefix(model);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

pub(crate) fn check_name(what: &str, text: &str, least: usize) -> Result<(), StoreError> {
    if (least..=MOST_NAME_BYTES).contains(&text.len()) {
        return Ok(());
    }
    let expected = format!("{least} to {MOST_NAME_BYTES} bytes");
    Err(StoreError::invalid(what, expected, format!("{} bytes", text.len())))
}

/// A text of unknown origin in a few characters.
pub(crate) fn brief(text: &str) -> String {
    match text.char_indices().nth(100) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}
