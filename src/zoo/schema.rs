//! What `rotations.safetensors` says about itself: the value of its one metadata key, `oscar`.

use std::collections::BTreeMap;

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Version of the entry format that this code writes; a reader refuses a newer one.
pub const SCHEMA: u32 = 1;

macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name in files and flags.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::ALL.iter().copied().find(|x| x.as_str() == text).ok_or_else(|| {
                    let known: Vec<_> = Self::ALL.iter().map(|x| x.as_str()).collect();
                    format!("`{text}` is none of {}", known.join(", "))
                })
            }
        }
    };
}

names! {
    /// How keys and values are transformed before rounding.
    Method {
        /// A non-orthogonal transform that balances what queries read against how keys spread.
        Balanced = "balanced",
        /// The paper's R = U·H·P.
        Oscar = "oscar",
        /// A Walsh–Hadamard matrix, without data.
        Hadamard = "hadamard",
        /// None: naive INT2.
        Identity = "identity",
    }
}

names! {
    /// What one transform serves.
    Scope {
        /// One KV head.
        Head = "head",
        /// All KV heads of a layer.
        Layer = "layer",
    }
}

names! {
    /// How codes are chosen.
    Rounding {
        /// Channel by channel, each error pushed into the channels after it.
        Feedback = "feedback",
        /// Each channel to its nearest level.
        Nearest = "nearest",
    }
}

names! {
    /// The moment that the transform of keys comes from.
    KMoment {
        /// Second moment of queries.
        Qq = "qq",
    }
}

names! {
    /// The moment that the transform of values comes from.
    VMoment {
        /// Second moment of attention's output, VᵀSᵀSV.
        Oo = "oo",
        /// Σ over tokens of attention weight squared times vᵀv.
        Vsv = "vsv",
        /// vᵀv weighted by k·qq·kᵀ, as in the released OSCAR code.
        Vwv = "vwv",
        /// Second moment of values.
        Vv = "vv",
    }
}

/// Provenance and geometry of an entry. Unknown keys are ignored, so that fields can be added within a schema.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    pub schema: u32,
    pub method: Method,
    pub scope: Scope,
    /// `None`: made without data.
    pub k_moment: Option<KMoment>,
    pub v_moment: Option<VMoment>,
    pub quantizer: Quantizer,
    pub windows: Windows,
    pub model: ModelInfo,
    pub calibration: Calibration,
    pub tool: Tool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
    /// `None`: fitted by this tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<Imported>,
    /// SHA-256 over tensor names, shapes and bytes. [`super::Entry::write`] fills it in.
    #[serde(default)]
    pub content_sha256: String,
}

/// The codec that clip ratios and feedback were fitted for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantizer {
    pub bits: u32,
    /// Channels that share a scale and a zero; divides every layer's head_dim.
    pub group: usize,
    /// `uniform`.
    pub codec: String,
    /// `bfloat16`.
    pub scale_dtype: String,
}

/// Tokens kept in full precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// The first tokens of a sequence.
    #[serde(rename = "sink")]
    pub sink_tokens: usize,
    /// The last tokens of a sequence.
    #[serde(rename = "recent")]
    pub recent_tokens: usize,
}

impl Windows {
    /// More than any context; sums of windows stay far from overflow.
    pub const MAX_TOKENS: usize = 1 << 30;

    /// # Errors
    /// A window of more than [`Self::MAX_TOKENS`].
    pub fn check(&self) -> Result<()> {
        for (name, tokens) in [("sink", self.sink_tokens), ("recent", self.recent_tokens)] {
            if tokens > Self::MAX_TOKENS {
                return Err(Error::invalid(
                    format!("window `{name}`"),
                    format!(
                        "{tokens} tokens are more than the most, {}",
                        Self::MAX_TOKENS
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The model an entry belongs to. Lists have one item a layer of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfo {
    pub id: String,
    #[serde(default)]
    pub revision: Option<String>,
    pub architecture: String,
    pub config_sha256: String,
    pub weights_fingerprint: String,
    pub layers: usize,
    pub heads: Vec<usize>,
    pub kv_heads: Vec<usize>,
    pub head_dim: Vec<usize>,
}

/// The data and the arithmetic that moments came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    pub tokens: usize,
    pub prompts: usize,
    pub seq_len: usize,
    pub token_ids_sha256: String,
    pub tokenizer_sha256: String,
    pub seed: u64,
    /// Of activations.
    pub dtype: String,
    pub device: String,
}

/// What wrote the entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    pub name: String,
    pub version: String,
    /// Counts changes that alter an entry's numbers.
    pub algorithm: u32,
}

/// The files of another tool that an entry was made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Imported {
    pub k: ImportedFile,
    pub v: ImportedFile,
}

/// What a file of rotations says about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImportedFile {
    pub name: String,
    pub sha256: String,
    pub format_version: Option<i64>,
    pub objective: Option<String>,
    /// Its `calibration` dict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<serde_json::Value>,
}

/// How the transforms were chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    pub k_rounding: Rounding,
    pub v_rounding: Rounding,
    pub k_centered: bool,
    pub v_centered: bool,
    /// By layer.
    #[serde(default)]
    pub k: BTreeMap<usize, FitSide>,
    #[serde(default)]
    pub v: BTreeMap<usize, FitSide>,
}

/// One side (keys or values) of one layer; lists have one item a transform.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FitSide {
    /// Exponent p of `balanced`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exponent: Vec<f32>,
    /// Relative error of attention's output on held-out sequences, root mean square, with this side alone quantized.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub output_error: Vec<f32>,
}
