//! Text into token ids, as the model's authors do it.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use rayon::prelude::*;
use tokenizers::{
    DecodeStream, DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper,
};

use super::gguf_tokenizer;
use super::guard::quietly;
use super::pack::TokenizedPrompt;
use super::prompts::Prompt;
use crate::files::{read_text, sha256_bytes};
use crate::model::{Model, TokenizerSource};
use crate::{Error, Result, interrupt};

/// A model's tokenizer with its special tokens and chat template.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    sha256: String,
    /// Folder or file that it comes from.
    pub(super) origin: String,
    pub(super) specials: SpecialTokens,
    /// Jinja source, and the file that holds it.
    pub(super) chat_template: Option<(String, String)>,
}

/// The texts of the special tokens that chat templates may write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub unk: Option<String>,
    pub pad: Option<String>,
}

impl Tokenizer {
    /// The tokenizer that `model` came with.
    pub fn load(model: &Model) -> Result<Self> {
        match model.tokenizer_source() {
            TokenizerSource::Folder(folder) => Self::from_folder(folder),
            TokenizerSource::Gguf { path, metadata } => Self::from_gguf_metadata(path, metadata),
        }
    }

    /// From `tokenizer.json` of a Hugging Face folder, with `tokenizer_config.json`, `special_tokens_map.json` and
    /// `chat_template.jinja` where they exist.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            let error = Error::invalid(folder.display(), "has no `tokenizer.json`");
            return Err(if folder.join("tokenizer.model").is_file() {
                error.hint(
                    "`tokenizer.model` alone is not enough: load the folder with transformers' `AutoTokenizer` and \
                     save it with `save_pretrained`",
                )
            } else {
                error.hint("copy it from the model's repository")
            });
        }
        let json = read_text(&path)?;
        let mut specials = SpecialTokens::default();
        let mut chat_template = None;
        for name in ["tokenizer_config.json", "special_tokens_map.json"] {
            let path = folder.join(name);
            if !path.is_file() {
                continue;
            }
            let config: serde_json::Value = serde_json::from_str(&read_text(&path)?)
                .map_err(|e| Error::invalid(path.display(), format!("malformed JSON: {e}")))?;
            for (slot, key) in [
                (&mut specials.bos, "bos_token"),
                (&mut specials.eos, "eos_token"),
                (&mut specials.unk, "unk_token"),
                (&mut specials.pad, "pad_token"),
            ] {
                let token = &config[key];
                let text = token.as_str().or_else(|| token["content"].as_str());
                if slot.is_none() {
                    *slot = text.map(str::to_owned);
                }
            }
            if chat_template.is_none() {
                chat_template = default_template(&config["chat_template"])
                    .map(|source| (source.to_owned(), path.display().to_string()));
            }
        }
        let path_jinja = folder.join("chat_template.jinja");
        if path_jinja.is_file() {
            chat_template = Some((read_text(&path_jinja)?, path_jinja.display().to_string()));
        }
        Self::from_json(&json, path.display().to_string(), specials, chat_template)
    }

    /// Rebuilt from the vocabulary and merges of a GGUF file.
    pub fn from_gguf(path: &Path) -> Result<Self> {
        let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
        let mut reader = std::io::BufReader::new(file);
        let content = candle_core::quantized::gguf_file::Content::read(&mut reader)
            .map_err(|e| Error::invalid(path.display(), format!("not a sound GGUF file: {e}")))?;
        Self::from_gguf_metadata(path, &content.metadata)
    }

    /// [`Self::from_gguf`] of metadata already read from `path`.
    ///
    /// # Errors
    /// A kind of tokenizer or of pre-tokenizer that is not known here: tokens must not be wrong silently.
    pub fn from_gguf_metadata(path: &Path, metadata: &HashMap<String, Value>) -> Result<Self> {
        let rebuilt = gguf_tokenizer::rebuild(path, metadata)?;
        let origin = path.display().to_string();
        let chat_template = rebuilt.chat_template.map(|source| {
            let place = format!("{origin}: `tokenizer.chat_template`");
            (source, place)
        });
        Self::from_json(
            &rebuilt.tokenizer_json,
            origin,
            rebuilt.specials,
            chat_template,
        )
    }

    fn from_json(
        json: &str,
        origin: String,
        specials: SpecialTokens,
        chat_template: Option<(String, String)>,
    ) -> Result<Self> {
        let wrong =
            |e: tokenizers::Error| Error::invalid(&origin, format!("not a usable tokenizer: {e}"));
        let mut parsed: serde_json::Value =
            serde_json::from_str(json).map_err(|e| wrong(e.into()))?;
        // Random merges are for training: here the same text is the same tokens.
        if let Some(dropout) = parsed.pointer_mut("/model/dropout") {
            *dropout = serde_json::Value::Null;
        }
        let mut inner = quietly(|| tokenizers::Tokenizer::from_bytes(parsed.to_string()))
            .unwrap_or_else(|| Err("its parts do not fit each other".into()))
            .map_err(wrong)?;
        // Some models ship with the lengths of their last training batch.
        inner.with_truncation(None).map_err(wrong)?;
        inner.with_padding(None);
        Ok(Self {
            inner,
            sha256: sha256_bytes(json.as_bytes()),
            origin,
            specials,
            chat_template,
        })
    }

    /// Token ids of `text`; `add_special` adds what the tokenizer puts around a text, such as BOS. Special tokens in
    /// `text` are recognised.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let mut token_ids = Vec::new();
        for (i, piece) in pieces(text).enumerate() {
            let encoding = quietly(|| self.inner.encode_fast(piece, add_special && i == 0))
                .unwrap_or_else(|| Err("its parts do not fit each other".into()))
                .map_err(|e| Error::invalid(&self.origin, format!("cannot tokenize: {e}")))?;
            token_ids.extend_from_slice(encoding.get_ids());
        }
        Ok(token_ids)
    }

    /// All prompts, in parallel and in order.
    ///
    /// # Errors
    /// A token id at or beyond `model_vocab_size` (rows of the embedding), by prompt.
    pub fn encode_prompts(
        &self,
        prompts: &[Prompt],
        model_vocab_size: usize,
    ) -> Result<Vec<TokenizedPrompt>> {
        let encoded: Vec<Result<TokenizedPrompt>> = prompts
            .par_iter()
            .map(|prompt| {
                interrupt::check()?;
                let token_ids = self.encode(&prompt.text, !prompt.templated)?;
                match token_ids
                    .iter()
                    .find(|&&id| id as usize >= model_vocab_size)
                {
                    Some(id) => Err(Error::invalid(
                        &prompt.place,
                        format!(
                            "token id {id} is beyond the model's vocabulary of {model_vocab_size}"
                        ),
                    )
                    .hint(format!(
                        "the tokenizer `{}` does not belong to this model",
                        self.origin
                    ))),
                    None => Ok(TokenizedPrompt {
                        place: prompt.place.clone(),
                        token_ids,
                    }),
                }
            })
            .collect();
        // Collected in order: with several errors, always the first is told.
        encoded.into_iter().collect()
    }

    /// Text of token ids, special tokens included.
    pub fn decode(&self, token_ids: &[u32]) -> Result<String> {
        self.inner
            .decode(token_ids, false)
            .map_err(|e| Error::invalid(&self.origin, format!("cannot decode: {e}")))
    }

    /// Turns token ids into text as they come, special tokens left out.
    pub fn stream(&self) -> TokenStream<'_> {
        TokenStream {
            tokenizer: self,
            inner: self.inner.decode_stream(true),
            pending: Vec::new(),
        }
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.inner.token_to_id(self.specials.eos.as_ref()?)
    }

    /// Of `tokenizer.json`, or of its rebuilding from a GGUF file.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Token ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// What stands between joined documents: the end-of-sequence token, else the begin-of-sequence token.
    pub fn separator(&self) -> Option<u32> {
        [&self.specials.eos, &self.specials.bos]
            .into_iter()
            .flatten()
            .find_map(|token| self.inner.token_to_id(token))
    }
}

/// Text of token ids that come one by one. A token may hold but a part of a character, which is told once it is whole.
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    inner: DecodeStream<
        'a,
        ModelWrapper,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >,
    /// Told in no text yet.
    pending: Vec<u32>,
}

impl TokenStream<'_> {
    /// The text that `token_id` completes, empty where it completes none.
    ///
    /// # Errors
    /// A tokenizer whose text of tokens depends on later ones.
    pub fn push(&mut self, token_id: u32) -> Result<String> {
        self.pending.push(token_id);
        let text = self
            .inner
            .step(token_id)
            .map_err(|e| Error::invalid(&self.tokenizer.origin, format!("cannot decode: {e}")))?;
        if text.is_some() {
            self.pending.clear();
        }
        Ok(text.unwrap_or_default())
    }

    /// What is left at the end: characters that lack a part appear as `\u{fffd}`.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.inner.decode(&self.pending, true);
        text.map_err(|e| Error::invalid(&self.tokenizer.origin, format!("cannot decode: {e}")))
    }
}

/// `chat_template` of `tokenizer_config.json`: a string, or a list of named ones.
fn default_template(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| {
        value
            .as_array()?
            .iter()
            .find(|entry| entry["name"] == "default")?["template"]
            .as_str()
    })
}
/// Longest text that is tokenized at once: its tokens with their texts and places take some hundred times as much.
const PIECE_BYTES: usize = 1 << 20;

/// `text` in pieces of at most [`PIECE_BYTES`], cut before white space where there is any.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        if text.len() <= PIECE_BYTES {
            rest = None;
            return Some(text);
        }
        let most = text.floor_char_boundary(PIECE_BYTES);
        let cut = text[..most]
            .rfind(char::is_whitespace)
            .filter(|cut| *cut > 0)
            .unwrap_or(most);
        let (piece, left) = text.split_at(cut);
        rest = Some(left);
        Some(piece)
    })
}
