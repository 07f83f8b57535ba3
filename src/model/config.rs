//! What a decoder looks like, read from `config.json` or from GGUF metadata. Whatever would change the maths and is
//! not handled is refused by the name of its key.

use serde_json::{Map, Value};

use super::rope::{Rope, RopeScaling};
use crate::{Error, Result};

/// Geometry and numeric knobs of a decoder, whatever its family.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // each is a key of `config.json`
pub struct Config {
    /// `llama`, `mistral`, `qwen2` or `qwen3`.
    pub model_type: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    /// The longest prompt in tokens: the model's context, or its sliding window where that is shorter, since within
    /// one window attention is plainly causal.
    pub max_position_embeddings: usize,
    /// q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub output_bias: bool,
    /// Each head of q and k passes an RMS norm before RoPE.
    pub qk_norm: bool,
    /// The language-model head is the embedding table.
    pub tie_word_embeddings: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

/// Families that the decoder computes.
const MODEL_TYPES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

/// Sizes past these are taken for damage; the largest dense models stay far below.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 12;
const MAX_POSITIONS: usize = 1 << 27;

/// Keys of `config.json` that change the maths, and the only values (besides null) with which they change nothing.
const NEUTRAL: &[(&str, &[&str])] = &[
    ("attention_multiplier", &[]),
    ("attn_logit_softcapping", &[]),
    ("attn_temperature_tuning", &["false", "0"]),
    ("auto_map", &[]),
    ("clip_qkv", &[]),
    ("embedding_multiplier", &["1", "1.0"]),
    ("final_logit_softcapping", &[]),
    ("hidden_act", &["\"silu\"", "\"swish\""]),
    ("hidden_activation", &["\"silu\"", "\"swish\""]),
    ("is_encoder_decoder", &["false"]),
    ("logit_scale", &["1", "1.0"]),
    ("logits_scaling", &["1", "1.0"]),
    ("mlp_bias", &["false"]),
    ("moe_intermediate_size", &[]),
    ("n_routed_experts", &["0"]),
    ("no_rope_layers", &["[]"]),
    ("no_rope_layer_interval", &["0"]),
    ("num_experts", &["0"]),
    ("num_experts_per_tok", &["0"]),
    ("num_local_experts", &["0"]),
    ("partial_rotary_factor", &["1", "1.0"]),
    ("query_pre_attn_scalar", &[]),
    ("residual_multiplier", &["1", "1.0"]),
    ("rope_interleaved", &["false"]),
    ("rotary_pct", &["1", "1.0"]),
    ("scale_attn_by_inverse_layer_idx", &["false"]),
    ("use_mrope", &["false"]),
];

impl Config {
    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Reads a Hugging Face `config.json`; `place` is its path for messages.
    pub(super) fn from_json(place: &str, text: &str) -> Result<Self> {
        let json: Map<String, Value> = serde_json::from_str(text)
            .map_err(|e| Error::invalid(place, format!("not a JSON object: {e}")))?;
        let keys = Keys {
            place,
            prefix: "",
            map: &json,
        };
        let model_type = match json.get("model_type") {
            Some(Value::String(name)) => name.clone(),
            Some(other) => return Err(keys.wrong("model_type", other, "a string")),
            None => return Err(keys.missing("model_type")),
        };
        known_family(place, "model_type", &model_type)?;
        for (key, neutral) in NEUTRAL {
            keys.only(key, neutral)?;
        }
        quantization(&keys)?;

        let num_attention_heads = keys.size("num_attention_heads")?;
        let hidden_size = keys.size("hidden_size")?;
        let num_key_value_heads = match keys.optional_size("num_key_value_heads")? {
            Some(n) => n,
            // Configs of before grouped queries.
            None if model_type == "llama" => num_attention_heads,
            None => return Err(keys.missing("num_key_value_heads")),
        };
        let head_dim = match keys.optional_size("head_dim")? {
            Some(n) => n,
            None if model_type == "qwen3" => return Err(keys.missing("head_dim")),
            None if num_attention_heads == 0
                || !hidden_size.is_multiple_of(num_attention_heads) =>
            {
                return Err(Error::invalid(
                    place,
                    format!(
                        "`hidden_size` {hidden_size} is not divisible by `num_attention_heads` {num_attention_heads}"
                    ),
                ));
            }
            None => hidden_size / num_attention_heads,
        };
        let attention_bias = keys.flag("attention_bias")?;
        let config = Self {
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: keys.size("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: keys.size("vocab_size")?,
            rms_norm_eps: keys.number("rms_norm_eps")?,
            rope: rope_from_json(&keys)?,
            max_position_embeddings: windowed(&keys, &model_type)?,
            qkv_bias: attention_bias.unwrap_or(false) || model_type == "qwen2",
            output_bias: attention_bias.unwrap_or(false) && model_type != "qwen2",
            qk_norm: model_type == "qwen3",
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            bos_token_id: keys.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: keys.token_ids("eos_token_id")?,
            model_type,
        };
        config.check(place)?;
        Ok(config)
    }

    /// What holds for a config from any source.
    pub(super) fn check(&self, place: &str) -> Result<()> {
        for (name, value, most) in [
            ("hidden_size", self.hidden_size, MAX_WIDTH),
            ("intermediate_size", self.intermediate_size, 4 * MAX_WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, 1 << 14),
            ("num_key_value_heads", self.num_key_value_heads, 1 << 14),
            ("head_dim", self.head_dim, 1 << 12),
            ("vocab_size", self.vocab_size, 1 << 24),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                MAX_POSITIONS,
            ),
        ] {
            if value == 0 || value > most {
                return Err(Error::invalid(
                    place,
                    format!("`{name}` is {value}, which is not in 1..={most}"),
                ));
            }
        }
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            return Err(Error::invalid(
                place,
                format!(
                    "`num_attention_heads` {} is not divisible by `num_key_value_heads` {}",
                    self.num_attention_heads, self.num_key_value_heads
                ),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::invalid(
                place,
                format!(
                    "`head_dim` {} is odd, which RoPE cannot turn",
                    self.head_dim
                ),
            ));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(Error::invalid(
                place,
                format!("`rms_norm_eps` {} is not in (0, 1)", self.rms_norm_eps),
            ));
        }
        self.rope.check(place, self.head_dim)
    }
}

pub(super) fn known_family(place: &str, key: &str, name: &str) -> Result<()> {
    if MODEL_TYPES.contains(&name) {
        return Ok(());
    }
    Err(Error::invalid(
        place,
        format!("`{key}` is `{name}`, a family that is not supported"),
    )
    .hint(format!("supported are {}", MODEL_TYPES.join(", "))))
}

/// A JSON object and where it stands.
struct Keys<'a> {
    place: &'a str,
    /// Of nested objects, with its dot.
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn missing(&self, key: &str) -> Error {
        Error::invalid(self.place, format!("key `{}{key}` is missing", self.prefix))
    }

    fn wrong(&self, key: &str, value: &Value, wanted: &str) -> Error {
        Error::invalid(
            self.place,
            format!(
                "`{}{key}` is {}, where {wanted} is expected",
                self.prefix,
                brief(value)
            ),
        )
    }

    fn unsupported(&self, key: &str, value: &Value) -> Error {
        Error::invalid(
            self.place,
            format!(
                "`{}{key}` is {}, which is not supported",
                self.prefix,
                brief(value)
            ),
        )
        .hint("this key changes what the model computes, so it cannot be ignored")
    }

    /// Refuses a key whose value is none of `neutral` (JSON texts).
    fn only(&self, key: &str, neutral: &[&str]) -> Result<()> {
        match self.get(key) {
            Some(value) if !neutral.contains(&value.to_string().as_str()) => {
                Err(self.unsupported(key, value))
            }
            _ => Ok(()),
        }
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key)
            .map(|value| {
                value
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .ok_or_else(|| self.wrong(key, value, "a whole number"))
            })
            .transpose()
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key)
            .map(|value| {
                value
                    .as_f64()
                    .ok_or_else(|| self.wrong(key, value, "a number"))
            })
            .transpose()
    }

    fn number(&self, key: &str) -> Result<f64> {
        self.optional_number(key)?.ok_or_else(|| self.missing(key))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key)
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| self.wrong(key, value, "true or false"))
            })
            .transpose()
    }

    /// One id or a list of them.
    fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let one = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| self.wrong(key, value, "a token id"))
        };
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(one).collect(),
            Some(value) => Ok(vec![one(value)?]),
        }
    }

    fn object(&self, key: &str) -> Result<Option<&Map<String, Value>>> {
        self.get(key)
            .map(|value| {
                value
                    .as_object()
                    .ok_or_else(|| self.wrong(key, value, "an object"))
            })
            .transpose()
    }
}

/// A value short enough for a message.
fn brief(value: &Value) -> String {
    let mut text = value.to_string();
    if text.len() > 80 {
        let cut = (0..=77).rev().find(|&i| text.is_char_boundary(i));
        text.truncate(cut.unwrap_or(0));
        text.push_str("...");
    }
    format!("`{text}`")
}

/// Float8 weights with a scale a block of 128 x 128 are decoded; whatever else quantizes weights is refused.
fn quantization(keys: &Keys) -> Result<()> {
    let Some(map) = keys.object("quantization_config")? else {
        return Ok(());
    };
    let inner = Keys {
        place: keys.place,
        prefix: "quantization_config.",
        map,
    };
    inner.only("quant_method", &["\"fp8\""])?;
    if inner.get("quant_method").is_none() {
        return Err(inner.missing("quant_method"));
    }
    inner.only("fmt", &["\"e4m3\""])?;
    inner.only("activation_scheme", &["\"dynamic\""])?;
    inner.only("weight_block_size", &["[128,128]"])?;
    if inner.get("weight_block_size").is_none() {
        return Err(inner.missing("weight_block_size"));
    }
    Ok(())
}

/// The longest prompt whose attention is plainly causal.
fn windowed(keys: &Keys, model_type: &str) -> Result<usize> {
    let context = keys.size("max_position_embeddings")?;
    let mut sliding = match keys.flag("use_sliding_window")? {
        Some(used) => used,
        None => model_type == "mistral" && keys.get("sliding_window").is_some(),
    };
    if let Some(types) = keys.get("layer_types") {
        let Some(types) = types.as_array() else {
            return Err(keys.wrong("layer_types", types, "a list"));
        };
        for kind in types {
            match kind.as_str() {
                Some("full_attention") => {}
                Some("sliding_attention") => sliding = true,
                _ => return Err(keys.unsupported("layer_types", kind)),
            }
        }
    }
    if sliding {
        return Ok(context.min(keys.size("sliding_window")?));
    }
    Ok(context)
}

/// `rope_theta` and `rope_scaling`, or `rope_parameters`, which holds both.
fn rope_from_json(keys: &Keys) -> Result<Rope> {
    let (prefix, map) = match keys.object("rope_parameters")? {
        Some(map) => ("rope_parameters.", Some(map)),
        None => ("rope_scaling.", keys.object("rope_scaling")?),
    };
    let empty = Map::new();
    let inner = Keys {
        place: keys.place,
        prefix,
        map: map.unwrap_or(&empty),
    };
    // Where a config names no base, transformers takes this one.
    let theta = match inner.optional_number("rope_theta")? {
        Some(theta) => theta,
        None => keys.optional_number("rope_theta")?.unwrap_or(10_000.0),
    };
    inner.only("partial_rotary_factor", &["1", "1.0"])?;
    let key = if inner.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    let kind = match inner.get(key) {
        None => "default",
        Some(Value::String(kind)) => kind.as_str(),
        Some(other) => return Err(inner.wrong(key, other, "a string")),
    };
    let (scaling, known): (_, &[&str]) = match kind {
        "default" => (RopeScaling::None, &[]),
        "linear" => (
            RopeScaling::Linear {
                factor: inner.number("factor")?,
            },
            &["factor"],
        ),
        "llama3" => (
            RopeScaling::Llama3 {
                factor: inner.number("factor")?,
                low_freq_factor: inner.number("low_freq_factor")?,
                high_freq_factor: inner.number("high_freq_factor")?,
                original_max_position_embeddings: inner.size("original_max_position_embeddings")?,
            },
            &[
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ],
        ),
        _ => return Err(inner.unsupported(key, &Value::from(kind))),
    };
    let common = ["rope_theta", "rope_type", "type", "partial_rotary_factor"];
    for (key, value) in inner.map.iter().filter(|(_, value)| !value.is_null()) {
        if !known.contains(&key.as_str()) && !common.contains(&key.as_str()) {
            return Err(inner.unsupported(key, value));
        }
    }
    Ok(Rope { theta, scaling })
}
