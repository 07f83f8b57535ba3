//! GGUF headers: every count, length and offset is checked against the file before anything is allocated by it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use memmap2::Mmap;

use super::config::{Config, known_family};
use super::rope::{Rope, RopeScaling};
use super::weights::{Encoding, Stored, Weights, map};
use crate::{Error, Result, files};

/// Nothing in a header, nor any string, has more entries.
const MAX_COUNT: usize = 1 << 24;
/// Arrays of arrays go no deeper.
const MAX_DEPTH: usize = 4;
/// What a header may take beyond twice the size of its file: the vocabulary of a model without weights.
const ALLOWANCE: usize = 1 << 20;
/// Memory of a key or of a tensor's place in a file, besides its name.
const ENTRY_BYTES: usize = 256;
/// No tensor of ggml has more dimensions.
const MAX_DIMENSIONS: u32 = 4;

/// A GGUF file whose header is read.
pub(super) struct Gguf {
    pub path: PathBuf,
    pub metadata: HashMap<String, Value>,
    /// SHA-256 of the bytes of the metadata.
    pub metadata_sha256: String,
    pub weights: Weights,
}

impl Gguf {
    pub fn open(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let header = Reader::new(&map, path).header()?;
        Ok(Self {
            path: path.to_path_buf(),
            metadata: header.metadata,
            metadata_sha256: header.metadata_sha256,
            weights: Weights::new(vec![(path.to_path_buf(), map)], header.tensors),
        })
    }
}

/// Where the parts of a GGUF file lie, for a copy of it, and the geometry of its model.
#[derive(Clone, Debug)]
pub struct Layout {
    pub architecture: String,
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Every head of q and k has its halves interleaved.
    pub interleaved: bool,
    pub tensors: BTreeSet<String>,
    pub alignment: usize,
    /// From the start of the file: the first byte after the tensors' names, the first of their data, and the first
    /// after it.
    pub infos_end: usize,
    pub data_start: usize,
    pub data_end: usize,
    pub file_bytes: usize,
}

impl Layout {
    /// Reads and checks the header of the file at `path`.
    pub fn read(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let mut reader = Reader::new(&map, path);
        let header = reader.header()?;
        let infos_end = reader.at;
        let file_bytes = map.len();
        let tensors = header.tensors.keys().cloned().collect();
        let data_end = header.tensors.values().map(|t| t.start + t.bytes).max();
        let gguf = Gguf {
            path: path.to_path_buf(),
            metadata: header.metadata,
            metadata_sha256: header.metadata_sha256,
            weights: Weights::new(vec![(path.to_path_buf(), map)], header.tensors),
        };
        let config = gguf.config()?;
        Ok(Self {
            interleaved: config.model_type == "llama",
            architecture: config.model_type,
            layers: config.num_hidden_layers,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            tensors,
            alignment: header.alignment,
            infos_end,
            data_start: header.data_start,
            data_end: data_end.unwrap_or(header.data_start),
            file_bytes,
        })
    }
}

struct Header {
    alignment: usize,
    data_start: usize,
    metadata: HashMap<String, Value>,
    metadata_sha256: String,
    tensors: BTreeMap<String, Stored>,
}

struct Reader<'a> {
    bytes: &'a Mmap,
    at: usize,
    path: &'a Path,
    /// Bytes that what is read may still take.
    room: usize,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a Mmap, path: &'a Path) -> Self {
        Self {
            bytes,
            at: 0,
            path,
            room: 2 * bytes.len() + ALLOWANCE,
        }
    }
}

impl Reader<'_> {
    /// Counts what is about to be allocated: a list of one-byte numbers grows to 32 bytes each.
    fn charge(&mut self, bytes: usize) -> Result<()> {
        self.room = self.room.checked_sub(bytes).ok_or_else(|| {
            self.broken("its header asks for more memory than a file of its size needs")
                .hint("fetch the file again")
        })?;
        Ok(())
    }

    fn header(&mut self) -> Result<Header> {
        if self.take(4, "magic")? != b"GGUF" {
            return Err(self.broken("not a GGUF file (its first four bytes are not `GGUF`)"));
        }
        let version = self.u32("version")?;
        if !(2..=3).contains(&version) {
            return Err(self
                .broken(format!("GGUF version {version} is not supported"))
                .hint("versions 2 and 3 are, little-endian"));
        }
        // A tensor takes at least 24 bytes of the header, a key and its value 13.
        let tensor_count = self.count("tensor count", 24)?;
        let key_count = self.count("metadata count", 13)?;
        let mut metadata = HashMap::new();
        for _ in 0..key_count {
            self.charge(ENTRY_BYTES)?;
            let key = self.string("metadata key")?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.broken(format!("metadata key `{key}` stands twice")));
            }
        }
        let metadata_sha256 = files::sha256_bytes(&self.bytes[..self.at]);
        let infos = (0..tensor_count)
            .map(|_| self.tensor())
            .collect::<Result<Vec<_>>>()?;

        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::U32(n)) if n.is_power_of_two() && *n >= 8 => *n as usize,
            Some(other) => {
                return Err(self.broken(format!("`general.alignment` is {other:?}")));
            }
        };
        let data_start = self.at.next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for (name, mut stored) in infos {
            let fits = stored
                .start
                .checked_add(data_start)
                .filter(|start| {
                    start
                        .checked_add(stored.bytes)
                        .is_some_and(|end| end <= self.bytes.len())
                })
                .filter(|start| start.is_multiple_of(alignment));
            let Some(start) = fits else {
                return Err(self
                    .broken(format!(
                        "tensor `{name}` ({} bytes at {} of the data) is misaligned or runs past the end of the file",
                        stored.bytes, stored.start
                    ))
                    .hint("fetch the file again"));
            };
            stored.start = start;
            if tensors.insert(name.clone(), stored).is_some() {
                return Err(self.broken(format!("tensor `{name}` stands twice")));
            }
        }
        self.no_overlap(&tensors)?;
        Ok(Header {
            alignment,
            data_start,
            metadata,
            metadata_sha256,
            tensors,
        })
    }

    fn no_overlap(&self, tensors: &BTreeMap<String, Stored>) -> Result<()> {
        let mut extents: Vec<_> = tensors
            .iter()
            .map(|(name, t)| (t.start, t.start + t.bytes, name))
            .collect();
        extents.sort_unstable();
        for pair in extents.windows(2) {
            if pair[1].0 < pair[0].1 {
                return Err(self.broken(format!(
                    "tensors `{}` and `{}` overlap",
                    pair[0].2, pair[1].2
                )));
            }
        }
        Ok(())
    }

    /// Name and extent of a tensor, its start still counted from the start of the data.
    fn tensor(&mut self) -> Result<(String, Stored)> {
        self.charge(ENTRY_BYTES)?;
        let name = self.string("tensor name")?;
        let dimensions = self.u32(&name)?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            return Err(self.broken(format!("tensor `{name}` has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        let mut elements = 1usize;
        for _ in 0..dimensions {
            let size = usize::try_from(self.u64(&name)?).unwrap_or(usize::MAX);
            let product = elements
                .checked_mul(size)
                .filter(|n| isize::try_from(*n).is_ok());
            elements =
                product.ok_or_else(|| self.broken(format!("tensor `{name}` is far too large")))?;
            shape.push(size);
        }
        // The file has the fastest axis first.
        shape.reverse();
        let kind = self.u32(&name)?;
        let dtype = ggml_dtype(kind).ok_or_else(|| {
            self.broken(format!(
                "tensor `{name}` has ggml type {kind}, which is not supported"
            ))
            .hint("supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K")
        })?;
        if !elements.is_multiple_of(dtype.block_size()) {
            return Err(self.broken(format!(
                "tensor `{name}` has {elements} elements, which blocks of {} of {dtype:?} do not fill",
                dtype.block_size()
            )));
        }
        let encoding = match dtype {
            GgmlDType::F32 => Encoding::F32,
            GgmlDType::F16 => Encoding::F16,
            GgmlDType::BF16 => Encoding::Bf16,
            quantized => Encoding::Ggml(quantized),
        };
        let bytes = (elements / dtype.block_size())
            .checked_mul(dtype.type_size())
            .ok_or_else(|| self.broken(format!("tensor `{name}` is far too large")))?;
        let start = usize::try_from(self.u64(&name)?).unwrap_or(usize::MAX);
        Ok((
            name,
            Stored {
                file: 0,
                start,
                bytes,
                encoding,
                shape,
            },
        ))
    }

    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<Value> {
        Ok(match kind {
            0 => Value::U8(self.take(1, key)?[0]),
            1 => Value::I8(self.take(1, key)?[0].cast_signed()),
            2 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            4 => Value::U32(self.u32(key)?),
            5 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => Value::Bool(self.take(1, key)?[0] != 0),
            8 => Value::String(self.string(key)?),
            9 if depth < MAX_DEPTH => {
                let kind = self.u32(key)?;
                let least_bytes = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    9 => 12,
                    _ => 8,
                };
                let count = self.count(key, least_bytes)?;
                self.charge(count * size_of::<Value>())?;
                let mut list = Vec::with_capacity(count);
                for _ in 0..count {
                    list.push(self.value(key, kind, depth + 1)?);
                }
                Value::Array(list)
            }
            10 => Value::U64(self.u64(key)?),
            11 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            _ => {
                return Err(self.broken(format!("metadata key `{key}` has a value of type {kind}")));
            }
        })
    }

    /// A count of things that take at least `least_bytes` each of the rest of the file.
    fn count(&mut self, what: &str, least_bytes: usize) -> Result<usize> {
        let count = self.u64(what)?;
        let most = ((self.bytes.len() - self.at) / least_bytes).min(MAX_COUNT);
        usize::try_from(count)
            .ok()
            .filter(|n| *n <= most)
            .ok_or_else(|| {
                self.broken(format!(
                    "`{what}` declares {count} entries, more than the file has room for"
                ))
            })
    }

    fn string(&mut self, what: &str) -> Result<String> {
        let length = self.count(what, 1)?;
        self.charge(length)?;
        let bytes = self.take(length, what)?.to_vec();
        // Token texts need not be UTF-8 in every vocabulary; everything that is compared by name is.
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&[u8]> {
        let end = self.at.checked_add(n).filter(|e| *e <= self.bytes.len());
        let Some(end) = end else {
            return Err(self
                .broken(format!("the file ends inside its header, at `{what}`"))
                .hint("fetch the file again"));
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn broken(&self, problem: impl std::fmt::Display) -> Error {
        Error::invalid(self.path.display(), problem)
    }
}

/// The types that candle can decode.
fn ggml_dtype(kind: u32) -> Option<GgmlDType> {
    Some(match kind {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

/// Keys, behind the architecture's name, that change the maths, and the only numbers with which they change nothing.
const NEUTRAL: &[(&str, &[f64])] = &[
    ("expert_count", &[0.0]),
    ("expert_used_count", &[0.0]),
    ("attention.scale", &[]),
    ("attention.clamp_kqv", &[0.0]),
    ("attn_logit_softcapping", &[0.0]),
    ("final_logit_softcapping", &[0.0]),
    ("logit_scale", &[0.0, 1.0]),
    ("residual_scale", &[0.0, 1.0]),
    ("embedding_scale", &[0.0, 1.0]),
    ("rope.scale_linear", &[1.0]),
    ("rope.scaling.attn_factor", &[1.0]),
];

impl Gguf {
    pub fn config(&self) -> Result<Config> {
        let place = self.path.display().to_string();
        let Some(Value::String(architecture)) = self.metadata.get("general.architecture") else {
            return Err(Error::invalid(
                &place,
                "key `general.architecture` is missing",
            ));
        };
        known_family(&place, "general.architecture", architecture)?;
        let keys = Keys {
            place: &place,
            architecture,
            metadata: &self.metadata,
        };
        for (name, neutral) in NEUTRAL {
            if let Some(value) = keys.number(name)?
                && !neutral.contains(&value)
            {
                return Err(keys.unsupported(name, &value));
            }
        }
        let heads = keys.size("attention.head_count")?;
        let hidden_size = keys.size("embedding_length")?;
        let head_dim = match keys.optional_size("attention.key_length")? {
            Some(n) => n,
            None if heads == 0 || !hidden_size.is_multiple_of(heads) => {
                return Err(Error::invalid(
                    &place,
                    format!(
                        "`embedding_length` {hidden_size} is not divisible by `attention.head_count` {heads}"
                    ),
                ));
            }
            None => hidden_size / heads,
        };
        for (name, what) in [
            ("attention.value_length", "another size than the keys"),
            ("rope.dimension_count", "a part of the head"),
        ] {
            if let Some(n) = keys.optional_size(name)?
                && n != head_dim
            {
                return Err(keys.unsupported(name, &format!("{n}, {what} (head_dim {head_dim})")));
            }
        }
        let embedding = self
            .weights
            .get("token_embd.weight")
            .ok_or_else(|| Error::invalid(self.weights.place("token_embd.weight"), "missing"))?;
        let context = keys.size("context_length")?;
        let eos = keys.token_id("tokenizer.ggml.eos_token_id");
        let eot = keys.token_id("tokenizer.ggml.eot_token_id");
        let mut eos_token_ids: Vec<u32> = eos.into_iter().chain(eot).collect();
        eos_token_ids.dedup();
        let config = Config {
            model_type: architecture.clone(),
            hidden_size,
            intermediate_size: keys.size("feed_forward_length")?,
            num_hidden_layers: keys.size("block_count")?,
            num_attention_heads: heads,
            num_key_value_heads: keys
                .optional_size("attention.head_count_kv")?
                .unwrap_or(heads),
            head_dim,
            vocab_size: embedding.shape[0],
            rms_norm_eps: keys
                .number("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
            rope: Rope {
                theta: keys.number("rope.freq_base")?.unwrap_or(10_000.0),
                scaling: self.rope_scaling(&keys, head_dim)?,
            },
            max_position_embeddings: keys
                .optional_size("attention.sliding_window")?
                .filter(|window| *window > 0)
                .map_or(context, |window| window.min(context)),
            qkv_bias: architecture == "qwen2",
            output_bias: false,
            qk_norm: architecture == "qwen3",
            tie_word_embeddings: self.weights.get("output.weight").is_none(),
            bos_token_id: keys.token_id("tokenizer.ggml.bos_token_id"),
            eos_token_ids,
        };
        config.check(&place)?;
        Ok(config)
    }

    /// Llama 3's scaling comes as a tensor of factors.
    fn rope_scaling(&self, keys: &Keys, head_dim: usize) -> Result<RopeScaling> {
        let kind = match self.metadata.get(&keys.full("rope.scaling.type")) {
            None => "none",
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => return Err(keys.unsupported("rope.scaling.type", &format!("{other:?}"))),
        };
        let name = "rope_freqs.weight";
        match (kind, self.weights.get(name)) {
            ("none", None) => Ok(RopeScaling::None),
            ("none", Some(_)) => {
                self.weights.expect(name, &[head_dim / 2])?;
                Ok(RopeScaling::Factors(self.weights.gather(name, &[0])?))
            }
            ("linear", None) => Ok(RopeScaling::Linear {
                factor: keys
                    .number("rope.scaling.factor")?
                    .ok_or_else(|| keys.missing("rope.scaling.factor"))?,
            }),
            _ => Err(keys.unsupported("rope.scaling.type", &kind)),
        }
    }
}

struct Keys<'a> {
    place: &'a str,
    architecture: &'a str,
    metadata: &'a HashMap<String, Value>,
}

impl Keys<'_> {
    fn full(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn missing(&self, name: &str) -> Error {
        Error::invalid(self.place, format!("key `{}` is missing", self.full(name)))
    }

    fn unsupported(&self, name: &str, value: &dyn std::fmt::Display) -> Error {
        Error::invalid(
            self.place,
            format!("`{}` is {value}, which is not supported", self.full(name)),
        )
        .hint("this key changes what the model computes, so it cannot be ignored")
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        let value = match self.metadata.get(&self.full(name)) {
            None => return Ok(None),
            Some(Value::F32(x)) => f64::from(*x),
            Some(Value::F64(x)) => *x,
            Some(other) => match whole(other) {
                Some(n) => n as f64,
                None => return Err(self.unsupported(name, &"not a number")),
            },
        };
        Ok(Some(value))
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        match self.metadata.get(&self.full(name)) {
            None => Ok(None),
            Some(value) => match whole(value).and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(self.unsupported(name, &"not one whole number")),
            },
        }
    }

    fn size(&self, name: &str) -> Result<usize> {
        self.optional_size(name)?.ok_or_else(|| self.missing(name))
    }

    /// Of a key with no architecture before it.
    fn token_id(&self, key: &str) -> Option<u32> {
        self.metadata
            .get(key)
            .and_then(whole)
            .and_then(|id| u32::try_from(id).ok())
    }
}

fn whole(value: &Value) -> Option<u64> {
    match *value {
        Value::U8(n) => Some(n.into()),
        Value::U16(n) => Some(n.into()),
        Value::U32(n) => Some(n.into()),
        Value::U64(n) => Some(n),
        Value::I8(n) => n.try_into().ok(),
        Value::I16(n) => n.try_into().ok(),
        Value::I32(n) => n.try_into().ok(),
        Value::I64(n) => n.try_into().ok(),
        _ => None,
    }
}

/// The name in a GGUF file of what the Hugging Face format calls `name`.
pub(super) fn gguf_name(name: &str) -> String {
    let translate = |last: &str| {
        let (stem, kind) = last.rsplit_once('.').unwrap_or((last, ""));
        let stem = match stem {
            "input_layernorm" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "post_attention_layernorm" => "ffn_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            "model.embed_tokens" => "token_embd",
            "model.norm" => "output_norm",
            "lm_head" => "output",
            other => other,
        };
        format!("{stem}.{kind}")
    };
    match name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((layer, rest)) => format!("blk.{layer}.{}", translate(rest)),
        None => translate(name),
    }
}
