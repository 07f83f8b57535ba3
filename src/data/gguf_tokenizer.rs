//! A `tokenizer.json` rebuilt from the metadata of a GGUF file.
//!
//! GGUF holds vocabulary, merges or scores, and the *name* of a pre-tokenizer (`tokenizer.ggml.pre`), not its rules: each
//! name is spelt out here as its authors' `tokenizer.json` has it, and an unknown one is refused.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use serde_json::{Value as Json, json};

use super::tokenizer::SpecialTokens;
use crate::{Error, Result};

pub(super) struct Rebuilt {
    pub tokenizer_json: String,
    pub specials: SpecialTokens,
    pub chat_template: Option<String>,
}

/// llama.cpp's `llama_token_type`.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

const PRE: &str = "tokenizer.ggml.pre";

const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) fn rebuild(path: &Path, metadata: &HashMap<String, Value>) -> Result<Rebuilt> {
    let metadata = Metadata { path, metadata };
    let tokens = metadata
        .strings("tokenizer.ggml.tokens")?
        .ok_or_else(|| metadata.missing("tokenizer.ggml.tokens"))?;
    let types = metadata
        .numbers("tokenizer.ggml.token_type")?
        .unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        return Err(metadata.wrong(
            "tokenizer.ggml.token_type",
            format!("{} types for {} tokens", types.len(), tokens.len()),
        ));
    }
    let special = |key: &str| -> Result<Option<(usize, &str)>> {
        let Some(id) = metadata.integer(key)? else {
            return Ok(None);
        };
        // llama.cpp writes -1, or its unsigned twin, for none.
        if id == -1 || id == i64::from(u32::MAX) {
            return Ok(None);
        }
        let id = usize::try_from(id).unwrap_or(usize::MAX);
        match tokens.get(id) {
            Some(token) => Ok(Some((id, token))),
            None => Err(metadata.wrong(key, format!("{id} is beyond the {} tokens", tokens.len()))),
        }
    };
    let bos = special("tokenizer.ggml.bos_token_id")?;
    let eos = special("tokenizer.ggml.eos_token_id")?;
    let unk = special("tokenizer.ggml.unknown_token_id")?;
    let pad = special("tokenizer.ggml.padding_token_id")?;

    let kind = metadata
        .string("tokenizer.ggml.model")?
        .ok_or_else(|| metadata.missing("tokenizer.ggml.model"))?;
    let pipeline = match kind {
        "gpt2" => byte_level(&metadata, &tokens)?,
        "llama" => sentence_piece(&metadata, &tokens, &types, unk.map(|(_, token)| token))?,
        other => {
            return Err(metadata
                .wrong(
                    "tokenizer.ggml.model",
                    format!("tokenizer `{other}` is not known, only `gpt2` and `llama` are"),
                )
                .hint("use the model's Hugging Face folder, which holds `tokenizer.json`"));
        }
    };

    let is_special = |id: usize| {
        types.get(id).is_some_and(|&t| t == CONTROL || t == UNKNOWN)
            || [bos, eos, pad]
                .iter()
                .flatten()
                .any(|&(other, _)| other == id)
    };
    let added: Vec<Json> = tokens
        .iter()
        .enumerate()
        .filter(|&(id, token)| {
            !token.is_empty() && (is_special(id) || types.get(id) == Some(&USER_DEFINED))
        })
        .map(|(id, token)| {
            json!({"id": id, "content": token, "special": is_special(id), "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        })
        .collect();

    let add_bos = metadata
        .boolean("tokenizer.ggml.add_bos_token")?
        .unwrap_or(pipeline.adds_bos);
    let add_eos = metadata
        .boolean("tokenizer.ggml.add_eos_token")?
        .unwrap_or(false);
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": pipeline.normalizer,
        "pre_tokenizer": pipeline.pre_tokenizer,
        "post_processor": around(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
        "decoder": pipeline.decoder,
        "model": pipeline.model,
    });
    let text = |token: Option<(usize, &str)>| token.map(|(_, text)| text.to_owned());
    Ok(Rebuilt {
        tokenizer_json: tokenizer.to_string(),
        specials: SpecialTokens {
            bos: text(bos),
            eos: text(eos),
            unk: text(unk),
            pad: text(pad),
        },
        chat_template: metadata
            .string("tokenizer.chat_template")?
            .map(str::to_owned),
    })
}

struct Pipeline {
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
    model: Json,
    /// Where the file does not say.
    adds_bos: bool,
}

/// Byte-level BPE of GPT-2 and its heirs, which differ in how they split text before merging.
fn byte_level(metadata: &Metadata<'_>, tokens: &[&str]) -> Result<Pipeline> {
    let merges = metadata
        .strings("tokenizer.ggml.merges")?
        .ok_or_else(|| metadata.missing("tokenizer.ggml.merges"))?;
    let merges = merges
        .into_iter()
        .map(|merge| match merge.split_once(' ') {
            Some(pair) => Ok(pair),
            None => Err(metadata.wrong(
                "tokenizer.ggml.merges",
                format!("`{merge}` is not a pair of tokens"),
            )),
        })
        .collect::<Result<Vec<_>>>()?;

    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let split = |regex: &str| {
        sequence(&[
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
            bytes(false),
        ])
    };
    let pre = metadata.string(PRE)?.ok_or_else(|| {
        metadata
            .missing(PRE)
            .hint("the file is from before GGUF named the pre-tokenizer: use a newer one, or the model's Hugging Face folder")
    })?;
    let (normalizer, pre_tokenizer) = match pre {
        "smollm" => (
            Json::Null,
            sequence(&[
                json!({"type": "Digits", "individual_digits": true}),
                bytes(true),
            ]),
        ),
        "gpt-2" | "gpt2" | "default" => (Json::Null, bytes(true)),
        "qwen2" | "deepseek-r1-qwen" => (json!({"type": "NFC"}), split(QWEN2_SPLIT)),
        "llama-bpe" | "llama3" | "llama-v3" => (Json::Null, split(LLAMA3_SPLIT)),
        other => {
            return Err(metadata
                .wrong(
                    PRE,
                    format!(
                        "pre-tokenizer `{other}` is not known; known are smollm, gpt-2, default, qwen2, \
                         deepseek-r1-qwen, llama-bpe"
                    ),
                )
                .hint("use the model's Hugging Face folder, which holds `tokenizer.json`"));
        }
    };
    let is_llama3 = pre.starts_with("llama");
    Ok(Pipeline {
        normalizer,
        pre_tokenizer,
        decoder: bytes(true),
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            // Llama 3 takes a whole word that is in the vocabulary, even where no merges lead to it.
            "ignore_merges": is_llama3,
            "vocab": vocabulary(tokens), "merges": merges,
        }),
        adds_bos: is_llama3,
    })
}

/// SentencePiece BPE of Llama 1 and 2 and the first Mistrals: scores rank the merges, `▁` stands for a space, and bytes
/// stand in for characters that the vocabulary lacks.
fn sentence_piece(
    metadata: &Metadata<'_>,
    tokens: &[&str],
    types: &[i64],
    unk: Option<&str>,
) -> Result<Pipeline> {
    const KEY: &str = "tokenizer.ggml.scores";
    let scores = metadata.floats(KEY)?.ok_or_else(|| metadata.missing(KEY))?;
    if scores.len() != tokens.len() {
        return Err(metadata.wrong(
            KEY,
            format!("{} scores for {} tokens", scores.len(), tokens.len()),
        ));
    }
    let is_text = |id: usize| types.get(id).is_none_or(|&t| t == 1);
    let id_of: HashMap<&str, usize> = tokens
        .iter()
        .enumerate()
        .filter(|&(id, _)| is_text(id))
        .map(|(id, &token)| (token, id))
        .collect();
    let mut merges = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|&(id, _)| is_text(id)) {
        let mut pairs: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| Some((*id_of.get(&token[..at])?, *id_of.get(&token[at..])?)))
            .collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|pair| (scores[id], pair)));
    }
    let chars: Vec<usize> = tokens.iter().map(|token| token.chars().count()).collect();
    merges.sort_by(|(score_a, a), (score_b, b)| {
        score_b
            .total_cmp(score_a)
            .then((chars[b.0], chars[b.1]).cmp(&(chars[a.0], chars[a.1])))
    });
    let merges: Vec<(&str, &str)> = merges
        .into_iter()
        .map(|(_, (l, r))| (tokens[l], tokens[r]))
        .collect();

    let space_to_bar = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let add_space = metadata
        .boolean("tokenizer.ggml.add_space_prefix")?
        .unwrap_or(true);
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let normalizer = if add_space {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space_to_bar]})
    } else {
        space_to_bar
    };
    Ok(Pipeline {
        normalizer,
        pre_tokenizer: Json::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: json!({
            "type": "BPE", "dropout": null, "unk_token": unk, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary(tokens), "merges": merges,
        }),
        adds_bos: true,
    })
}

fn vocabulary(tokens: &[&str]) -> Json {
    tokens
        .iter()
        .enumerate()
        .map(|(id, &token)| (token.to_owned(), Json::from(id)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn sequence(pretokenizers: &[Json]) -> Json {
    json!({"type": "Sequence", "pretokenizers": pretokenizers})
}

/// A post-processor that puts BOS before and EOS after a text.
fn around(bos: Option<(usize, &str)>, eos: Option<(usize, &str)>) -> Json {
    if bos.is_none() && eos.is_none() {
        return Json::Null;
    }
    let special = |token: Option<(usize, &str)>| {
        token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}}))
    };
    let text = |name: &str| Some(json!({"Sequence": {"id": name, "type_id": 0}}));
    let single: Vec<Json> = [special(bos), text("A"), special(eos)]
        .into_iter()
        .flatten()
        .collect();
    let pair: Vec<Json> = [
        special(bos),
        text("A"),
        special(eos),
        special(bos),
        text("B"),
        special(eos),
    ]
    .into_iter()
    .flatten()
    .collect();
    let specials: serde_json::Map<String, Json> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|(id, text)| {
            (
                text.to_owned(),
                json!({"id": text, "ids": [id], "tokens": [text]}),
            )
        })
        .collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials})
}

/// Typed reading, with errors that name file and key.
struct Metadata<'a> {
    path: &'a Path,
    metadata: &'a HashMap<String, Value>,
}

impl<'a> Metadata<'a> {
    fn wrong(&self, key: &str, problem: impl std::fmt::Display) -> Error {
        Error::invalid(format!("{}: `{key}`", self.path.display()), problem)
    }

    fn missing(&self, key: &str) -> Error {
        self.wrong(key, "is missing")
    }

    fn get<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        self.metadata
            .get(key)
            .map(|value| read(value).ok_or_else(|| self.wrong(key, format!("is not {expected}"))))
            .transpose()
    }

    fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.get(key, "a string", string)
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "a boolean", |value| value.to_bool().ok())
    }

    fn integer(&self, key: &str) -> Result<Option<i64>> {
        self.get(key, "an integer", integer)
    }

    fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.get(key, "an array of strings", |value| array(value, string))
    }

    fn numbers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.get(key, "an array of integers", |value| array(value, integer))
    }

    fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.get(key, "an array of finite numbers", |value| {
            array(value, |v| v.to_f32().ok().filter(|f| f.is_finite()))
        })
    }
}

fn array<'a, T>(value: &'a Value, read: impl Fn(&'a Value) -> Option<T>) -> Option<Vec<T>> {
    match value {
        Value::Array(values) => values.iter().map(read).collect(),
        _ => None,
    }
}

fn string(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::U8(n) => Some(n.into()),
        Value::I8(n) => Some(n.into()),
        Value::U16(n) => Some(n.into()),
        Value::I16(n) => Some(n.into()),
        Value::U32(n) => Some(n.into()),
        Value::I32(n) => Some(n.into()),
        Value::U64(n) => n.try_into().ok(),
        Value::I64(n) => Some(n),
        _ => None,
    }
}
