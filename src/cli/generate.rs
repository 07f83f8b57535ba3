//! `oscar generate`: text from a model whose keys and values lie in the packed cache.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use super::Outcome;
use super::common::{CANNOT_PRINT, Format, ModelArgs, print_json};
use crate::Error;
use crate::data::{ChatTemplate, Tokenizer, prompts};
use crate::eval::check_entry;
use crate::kv::pool::{Pool, PoolShape, Transforms};
use crate::model::Model;
use crate::serve::{Engine, GenerateOptions, Generated, Resident, Sampling, Stop, generate};
use crate::zoo::{Entry, Windows};

/// Tokens of the prompt that a step takes.
const CHUNK: usize = 512;

/// Generate text: prompt and answer go through the cache as a server would have them, on the CPU or a GPU.
///
/// Reads the prompt from standard input where none is given. The text goes to standard output as it comes; tokens a
/// second and the cache's bytes go to standard error.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The entry's folder; not needed with `--kv bf16`
    #[arg(short, long, value_name = "ENTRY", help_heading = "Cache")]
    zoo: Option<PathBuf>,

    /// What old tokens are kept in
    #[arg(long, value_enum, default_value_t, help_heading = "Cache")]
    kv: Kv,

    /// Tokens at the start of a sequence kept in BF16, a multiple of 64; the entry's own where not given
    #[arg(long, value_name = "TOKENS", help_heading = "Cache")]
    sink: Option<usize>,

    /// Most latest tokens kept in BF16, a multiple of 64; the entry's own where not given
    #[arg(long, value_name = "TOKENS", help_heading = "Cache")]
    recent: Option<usize>,

    /// Most memory of the cache, such as 512MiB; as much as the text needs where not given
    #[arg(long, value_name = "BYTES", help_heading = "Cache")]
    kv_memory: Option<Bytes>,

    /// Run greedily with both caches, INT2 and BF16, and say where they part
    #[arg(long, help_heading = "Cache", conflicts_with_all = ["kv", "temperature"])]
    compare: bool,

    /// Text to go on with
    #[arg(short, long, conflicts_with = "messages", help_heading = "Prompt")]
    prompt: Option<String>,

    /// Chat to answer: a JSON list of messages with `role` and `content`, or an object with `messages` and `tools`
    #[arg(
        long,
        value_name = "FILE",
        group = "conversation",
        help_heading = "Prompt"
    )]
    messages: Option<PathBuf>,

    /// Take the prompt for a user's message, and answer it
    #[arg(
        long,
        group = "conversation",
        conflicts_with = "messages",
        help_heading = "Prompt"
    )]
    chat: bool,

    /// Jinja chat template, instead of the model's own
    #[arg(
        long,
        value_name = "FILE",
        requires = "conversation",
        help_heading = "Prompt"
    )]
    chat_template: Option<PathBuf>,

    /// Most tokens to generate
    #[arg(short = 'n', long, default_value_t = 256, help_heading = "Sampling")]
    max_tokens: usize,

    /// 0: always the likeliest token; 1: as the model has it
    #[arg(long, default_value_t = 0.0, help_heading = "Sampling")]
    temperature: f64,

    /// Choose among so many likeliest tokens only
    #[arg(
        long,
        value_name = "TOKENS",
        requires = "temperature",
        help_heading = "Sampling"
    )]
    top_k: Option<usize>,

    /// Choose among the likeliest tokens only that together have this probability
    #[arg(
        long,
        value_name = "SHARE",
        requires = "temperature",
        help_heading = "Sampling"
    )]
    top_p: Option<f64>,

    /// The same seed gives the same text
    #[arg(long, default_value_t = 0, help_heading = "Sampling")]
    seed: u64,

    /// How the result is printed: JSON comes whole, at the end
    #[arg(long, value_enum, default_value_t, help_heading = "Output")]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kv {
    /// 2 bits, but for the windows
    #[default]
    Int2,
    /// All of it in 16 bits, as the model has it
    Bf16,
}

/// A number of bytes, with a unit perhaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(usize);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit: usize = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            unit => return Err(format!("`{unit}` is none of B, KiB, MiB, GiB, TiB")),
        };
        let number: usize = digits
            .trim()
            .parse()
            .map_err(|_| "expected a whole number and a unit, such as 512MiB".to_owned())?;
        number
            .checked_mul(unit)
            .map(Self)
            .ok_or_else(|| "is more than any machine has".to_owned())
    }
}

/// One text, for scripts.
#[derive(Serialize)]
struct Run {
    kv: Kv,
    text: String,
    token_ids: Vec<u32>,
    stop: Stop,
    prefill_seconds: f64,
    decode_seconds: f64,
    decode_tokens_per_second: Option<f64>,
    cached_tokens: usize,
    cache_bytes: usize,
    /// What the same tokens take in BF16.
    bf16_bytes: usize,
}

#[derive(Serialize)]
struct Output {
    prompt_tokens: usize,
    runs: Vec<Run>,
    /// Tokens that both runs begin with, of `--compare`.
    #[serde(skip_serializing_if = "Option::is_none")]
    same_tokens: Option<usize>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    sampling.check()?;
    let entry = args.zoo.as_deref().map(Entry::open).transpose()?;
    if entry.is_none() && (args.kv == Kv::Int2 || args.compare) {
        return Err(Error::invalid("--zoo", "an INT2 cache needs an entry")
            .hint("give an entry's folder, as `oscar calibrate` wrote it, or use `--kv bf16`")
            .into());
    }
    let model = args.model.open()?;
    if let Some(entry) = &entry {
        for warning in check_entry(entry, &model)? {
            eprintln!("warning: {warning}");
        }
    }
    let tokenizer = Tokenizer::load(&model)?;
    let prompt = prompt(args, &tokenizer, &model)?;
    let context = model.config().max_position_embeddings;
    if prompt.len() >= context {
        return Err(Error::invalid(
            "prompt",
            format!(
                "{} tokens leave no room in the model's context of {context}",
                prompt.len()
            ),
        )
        .hint("give a shorter prompt")
        .into());
    }
    let mut stop = model.config().eos_token_ids.clone();
    stop.extend(tokenizer.eos());
    let options = GenerateOptions {
        max_tokens: args.max_tokens.min(context - prompt.len()),
        stop,
        sampling,
        chunk: CHUNK,
    };
    let kinds = if args.compare {
        vec![Kv::Int2, Kv::Bf16]
    } else {
        vec![args.kv]
    };
    // Before the weights are loaded: what does not fit is told at once.
    let tokens = prompt.len() + options.max_tokens;
    let pools = kinds
        .iter()
        .map(|&kv| pool(args, kv, &model, entry.as_ref(), tokens))
        .collect::<Result<Vec<_>>>()?;
    let resident = Resident::load(&model)?;

    let mut runs = Vec::new();
    for (kv, pool) in kinds.into_iter().zip(pools) {
        let page_bytes = pool.shape().page_bytes()?.bf16;
        let mut engine = Engine::new(&resident, pool);
        let (generated, text) = text(args, kv, &mut engine, &tokenizer, &prompt, &options)?;
        if let Some(warning) = engine.graph_warning() {
            eprintln!("warning: {warning}");
        }
        let run = Run {
            kv,
            text,
            stop: generated.stop,
            prefill_seconds: generated.prefill_seconds,
            decode_seconds: generated.decode_seconds,
            decode_tokens_per_second: generated.decode_rate(),
            cached_tokens: generated.cached_tokens,
            cache_bytes: generated.cache_bytes,
            bf16_bytes: generated
                .cached_tokens
                .div_ceil(crate::kv::page::PAGE_TOKENS)
                * page_bytes,
            token_ids: generated.token_ids,
        };
        tell(&run, prompt.len());
        let interrupted = run.stop == Stop::Interrupted;
        runs.push(run);
        if interrupted {
            break;
        }
    }
    let same_tokens = match runs.as_slice() {
        [a, b] => Some(tell_where_they_part(
            &a.token_ids,
            &b.token_ids,
            &tokenizer,
        )?),
        _ => None,
    };
    if args.format == Format::Json {
        print_json(&Output {
            prompt_tokens: prompt.len(),
            runs,
            same_tokens,
        })?;
    }
    Ok(Outcome::Fine)
}

fn prompt(args: &Args, tokenizer: &Tokenizer, model: &Model) -> Result<Vec<u32>> {
    let template = || -> Result<Option<ChatTemplate>> {
        Ok(match &args.chat_template {
            Some(path) => Some(ChatTemplate::from_file(path, tokenizer)?),
            None => ChatTemplate::of(tokenizer),
        })
    };
    let prompt = if let Some(path) = &args.messages {
        prompts::read_conversation(path, template()?.as_ref())?
    } else {
        let text = match &args.prompt {
            Some(text) => text.clone(),
            None => from_stdin()?,
        };
        if args.chat {
            prompts::ask(&text, template()?.as_ref())?
        } else {
            prompts::Prompt {
                place: "prompt".to_owned(),
                text,
                templated: false,
            }
        }
    };
    let tokens = tokenizer.encode_prompts(&[prompt], model.config().vocab_size)?;
    let tokens: Vec<u32> = tokens
        .into_iter()
        .flat_map(|prompt| prompt.token_ids)
        .collect();
    if tokens.is_empty() {
        return Err(Error::invalid("prompt", "holds no token")
            .hint("give a text with --prompt, a chat with --messages, or a text on standard input")
            .into());
    }
    Ok(tokens)
}

fn from_stdin() -> Result<String> {
    if std::io::stdin().is_terminal() {
        return Err(Error::invalid("prompt", "none is given")
            .hint("give a text with --prompt, a chat with --messages, or a text on standard input")
            .into());
    }
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .read_to_end(&mut bytes)
        .context("cannot read standard input")?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::invalid("standard input", format!("not UTF-8 text (byte {at})"))
    })?;
    Ok(text)
}

/// A pool for one sequence of `tokens`.
fn pool(args: &Args, kv: Kv, model: &Model, entry: Option<&Entry>, tokens: usize) -> Result<Pool> {
    let entry = entry.filter(|_| kv == Kv::Int2);
    let windows = match entry {
        Some(entry) => entry.metadata.windows,
        None => Windows {
            sink_tokens: 64,
            recent_tokens: 256,
        },
    };
    let shape = PoolShape {
        layers: model.config().num_hidden_layers,
        dims: Resident::dims(model)?,
        windows: Windows {
            sink_tokens: args.sink.unwrap_or(windows.sink_tokens),
            recent_tokens: args.recent.unwrap_or(windows.recent_tokens),
        },
        transforms: entry.map(Transforms::new).transpose()?.map(Arc::new),
    };
    let capacity = shape.pages_for(1, tokens, CHUNK.min(tokens))?;
    let bytes = shape.bytes(capacity)?;
    match args.kv_memory {
        Some(Bytes(most)) if bytes > most => Err(Error::invalid(
            "--kv-memory",
            format!("a cache of {tokens} tokens takes {bytes} bytes, more than {most}"),
        )
        .hint("allow more, or give a shorter prompt or fewer --max-tokens")
        .into()),
        _ => {
            let pool = Pool::on(model.device(), shape, capacity)?;
            if let Some(warning) = pool.warning() {
                eprintln!("warning: {warning}");
            }
            Ok(pool)
        }
    }
}

/// Generates, and prints the text as it comes where it is for people.
fn text(
    args: &Args,
    kv: Kv,
    engine: &mut Engine,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerateOptions,
) -> Result<(Generated, String)> {
    let mut stream = tokenizer.stream();
    let mut text = String::new();
    let mut out = std::io::stdout().lock();
    let streams = args.format == Format::Text;
    if streams && args.compare {
        let name = if kv == Kv::Int2 { "INT2" } else { "BF16" };
        writeln!(out, "--- {name}").context(CANNOT_PRINT)?;
    }
    // A closed pipe ends generation, and is told as itself.
    let mut closed = None;
    let generated = generate(engine, prompt, options, &mut |token| {
        let piece = stream.push(token)?;
        if streams && closed.is_none() {
            closed = write!(out, "{piece}").and_then(|()| out.flush()).err();
            if closed.is_some() {
                return Err(Error::Interrupted);
            }
        }
        text.push_str(&piece);
        Ok(())
    });
    if let Some(error) = closed {
        return Err(error).context(CANNOT_PRINT);
    }
    let generated = generated?;
    let rest = stream.finish()?;
    if streams {
        writeln!(out, "{rest}")
            .and_then(|()| out.flush())
            .context(CANNOT_PRINT)?;
    }
    text.push_str(&rest);
    Ok((generated, text))
}

fn tell(run: &Run, prompt_tokens: usize) {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let why = match run.stop {
        Stop::EndOfText => "the text ended",
        Stop::MaxTokens => "--max-tokens",
        Stop::Interrupted => "interrupted",
    };
    eprintln!(
        "prompt: {prompt_tokens} tokens, {:.1} tokens/s",
        prompt_tokens as f64 / run.prefill_seconds.max(1e-9)
    );
    match run.decode_tokens_per_second {
        Some(rate) => eprintln!(
            "text: {} tokens, {rate:.1} tokens/s ({why})",
            run.token_ids.len()
        ),
        None => eprintln!("text: {} tokens ({why})", run.token_ids.len()),
    }
    eprintln!(
        "cache: {} tokens in {:.2} MiB, {:.2} times less than BF16's {:.2} MiB",
        run.cached_tokens,
        mib(run.cache_bytes),
        run.bf16_bytes as f64 / run.cache_bytes.max(1) as f64,
        mib(run.bf16_bytes)
    );
}

/// The number of tokens that both begin with.
fn tell_where_they_part(int2: &[u32], bf16: &[u32], tokenizer: &Tokenizer) -> Result<usize> {
    let same = int2.iter().zip(bf16).take_while(|(a, b)| a == b).count();
    let next = |tokens: &[u32]| -> Result<String> {
        Ok(match tokens.get(same) {
            Some(&token) => format!("{:?}", tokenizer.decode(&[token])?),
            None => "the end".to_owned(),
        })
    };
    if same == int2.len() && same == bf16.len() {
        eprintln!("INT2 and BF16: the same {same} tokens");
    } else {
        eprintln!(
            "INT2 and BF16: the first {same} tokens are the same, then {} against {}",
            next(int2)?,
            next(bf16)?
        );
    }
    Ok(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_with_their_units() {
        for (text, bytes) in [
            ("17", 17),
            ("2KiB", 2048),
            ("3m", 3 << 20),
            ("1 GiB", 1 << 30),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for wrong in ["", "GiB", "1.5GiB", "-1", "7 apples", "99999999TiB"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
    }
}
