//! Prompts from `.txt`, `.jsonl` and `.parquet` files and folders of them.

use std::fs;
use std::path::{Path, PathBuf};

use minijinja::Value;
use minijinja::value::ValueKind;

use super::chat_template::ChatTemplate;
use super::parquet_rows;
use crate::files::read_text;
use crate::{Error, Result};

/// One text to run through the model, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// File, and line or row where the file holds more than one.
    pub place: String,
    pub text: String,
    /// Rendered by a chat template, which writes the special tokens itself.
    pub templated: bool,
}

/// Fields of a record, the first that is there wins; `tools` joins `messages`.
pub(super) const FIELDS: [&str; 4] = ["text", "messages", "prompt", "tools"];
const MESSAGE: &str = r#"a message is such as {"role": "user", "content": "Hello"}"#;
const ACCEPTED: &str = "one of `text`, `messages` or `prompt` is needed";

#[derive(Clone, Copy)]
enum Format {
    Text,
    JsonLines,
    Parquet,
}

impl Format {
    fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match &*extension {
            "txt" => Some(Self::Text),
            "jsonl" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// All prompts of `paths`, in the order given; a folder's files recursively, sorted by path. In a folder, hidden files,
/// other formats, and texts about the data (README, licence, notice) are passed over.
///
/// A `.txt` file is one prompt. A record of `.jsonl` or `.parquet` is one prompt, in its `text`, its chat `messages`
/// (rendered by `template`, with `tools` if the record has them), or its `prompt`.
///
/// # Errors
/// No such file, an unknown format, no prompt in a file or folder, text that is not UTF-8, malformed JSON or Parquet, a
/// record without a prompt or with one of the wrong type, `messages` without a template: each by file and line.
pub fn read(paths: &[PathBuf], template: Option<&ChatTemplate>) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for path in paths {
        let kind = fs::metadata(path).map_err(Error::io("open", path))?;
        if kind.is_dir() {
            let mut files = Vec::new();
            walk(path, &mut files)?;
            if files.is_empty() {
                return Err(Error::invalid(
                    path.display(),
                    "folder holds no `.txt`, `.jsonl` or `.parquet` file",
                ));
            }
            files.sort();
            for (file, format) in files.iter().filter_map(|f| Some((f, Format::of(f)?))) {
                read_file(file, format, template, &mut prompts)?;
            }
        } else {
            let format = Format::of(path).ok_or_else(|| {
                Error::invalid(path.display(), "format is not known")
                    .hint("prompts are read from `.txt`, `.jsonl` and `.parquet` files")
            })?;
            read_file(path, format, template, &mut prompts)?;
        }
    }
    Ok(prompts)
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let unreadable = |e| Error::io("read folder", folder)(e);
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().to_ascii_lowercase();
        let about = ["readme", "licence", "license", "notice", "copying"]
            .iter()
            .any(|stem| name.split(['.', '-', '_']).next() == Some(stem));
        if name.starts_with('.') || about {
            continue;
        }
        // A link to a folder could lead round in a circle; hub caches link files only.
        if entry.file_type().map_err(unreadable)?.is_dir() {
            walk(&path, files)?;
        } else if Format::of(&path).is_some() && path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn read_file(
    path: &Path,
    format: Format,
    template: Option<&ChatTemplate>,
    prompts: &mut Vec<Prompt>,
) -> Result<()> {
    if let Format::Parquet = format {
        let before = prompts.len();
        parquet_rows::read(path, |row, record| {
            let place = format!("{}, row {row}", path.display());
            prompts.extend(from_record(place, record, template)?);
            Ok(())
        })?;
        return some_text(path, &prompts[before..]);
    }
    parse(path, &read_text(path)?, template, prompts)
}

/// The prompts of a `.txt` or `.jsonl` file that holds `text`.
pub(super) fn parse(
    path: &Path,
    text: &str,
    template: Option<&ChatTemplate>,
    prompts: &mut Vec<Prompt>,
) -> Result<()> {
    if let Some(at) = text.find('\0') {
        return Err(Error::invalid(
            path.display(),
            format!("binary data, not text (a zero at byte {at})"),
        ));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let before = prompts.len();
    if let Some(Format::JsonLines) = Format::of(path) {
        for (i, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let place = format!("{}:{}", path.display(), i + 1);
            let record: Value = serde_json::from_str(line).map_err(|e| {
                // serde_json counts lines too, and there is but one.
                let problem = e.to_string();
                let problem = problem.split(" at line ").next().unwrap_or_default();
                Error::invalid(
                    &place,
                    format!("malformed JSON: {problem} (column {})", e.column()),
                )
            })?;
            prompts.extend(from_record(place, &record, template)?);
        }
    } else if !text.trim().is_empty() {
        prompts.push(Prompt {
            place: path.display().to_string(),
            text: text.replace("\r\n", "\n"),
            templated: false,
        });
    }
    some_text(path, &prompts[before..])
}

fn some_text(path: &Path, prompts: &[Prompt]) -> Result<()> {
    if prompts.is_empty() {
        return Err(Error::invalid(path.display(), "holds no text"));
    }
    Ok(())
}

/// The prompt of one record, or `None` where its text is blank.
fn from_record(
    place: String,
    record: &Value,
    template: Option<&ChatTemplate>,
) -> Result<Option<Prompt>> {
    if record.kind() != ValueKind::Map {
        return Err(
            Error::invalid(&place, format!("a {} is not an object", record.kind())).hint(ACCEPTED),
        );
    }
    let field = |name: &str| {
        record
            .get_attr(name)
            .ok()
            .filter(|value| !value.is_undefined() && !value.is_none())
    };
    let Some((name, value)) = FIELDS[..3]
        .iter()
        .find_map(|&name| Some((name, field(name)?)))
    else {
        let names: Vec<String> = record
            .try_iter()
            .into_iter()
            .flatten()
            .map(|key| format!("`{key}`"))
            .collect();
        return Err(Error::invalid(
            &place,
            format!(
                "holds no prompt, only {}",
                match names.len() {
                    0 => "an empty object".to_owned(),
                    _ => names.join(", "),
                }
            ),
        )
        .hint(ACCEPTED));
    };
    let (text, templated) = if name == "messages" {
        check_messages(&place, &value)?;
        let template = template.ok_or_else(|| {
            Error::invalid(
                &place,
                "has chat `messages`, but the model has no chat template",
            )
            .hint("give a template with `--chat-template`, or prompts as `text`")
        })?;
        let tools = field("tools").unwrap_or(Value::from(()));
        (template.render(&place, &value, &tools)?, true)
    } else {
        let text = value
            .as_str()
            .ok_or_else(|| {
                Error::invalid(
                    &place,
                    format!("`{name}` is a {}, not a string", value.kind()),
                )
            })?
            .to_owned();
        (text, false)
    };
    if text.trim().is_empty() {
        return Ok(None);
    }
    Ok(Some(Prompt {
        place,
        text,
        templated,
    }))
}

/// The conversation of a `.json` file, a list of messages or an object with `messages` and perhaps `tools`, rendered up
/// to where the model's answer begins.
///
/// # Errors
/// Malformed JSON, no messages, no template; what the template raises.
pub fn read_conversation(path: &Path, template: Option<&ChatTemplate>) -> Result<Prompt> {
    let place = path.display().to_string();
    let value: Value = serde_json::from_str(&read_text(path)?)
        .map_err(|e| Error::invalid(&place, format!("malformed JSON: {e}")))?;
    let field = |name: &str| value.get_attr(name).unwrap_or_default();
    let (messages, tools) = match value.kind() {
        ValueKind::Map => (field("messages"), field("tools")),
        _ => (value, Value::UNDEFINED),
    };
    conversation(place, &messages, &tools, template)
}

/// `text` as a user's message, rendered up to where the model's answer begins.
///
/// # Errors
/// No template; what the template raises.
pub fn ask(text: &str, template: Option<&ChatTemplate>) -> Result<Prompt> {
    let message = minijinja::context! { role => "user", content => text };
    let messages = Value::from(vec![message]);
    conversation("prompt".to_owned(), &messages, &Value::UNDEFINED, template)
}

fn conversation(
    place: String,
    messages: &Value,
    tools: &Value,
    template: Option<&ChatTemplate>,
) -> Result<Prompt> {
    check_messages(&place, messages)?;
    let template = template.ok_or_else(|| {
        Error::invalid(&place, "the model has no chat template")
            .hint("give a template with `--chat-template`, or a plain text with `--prompt`")
    })?;
    let none = Value::from(());
    let tools = if tools.is_undefined() { &none } else { tools };
    Ok(Prompt {
        text: template.render_for_answer(&place, messages, tools)?,
        place,
        templated: true,
    })
}

/// `messages` is a list of objects that each name their `role`.
fn check_messages(place: &str, messages: &Value) -> Result<()> {
    if messages.kind() != ValueKind::Seq || messages.len() == Some(0) {
        let problem = "`messages` is not a list of at least one message";
        return Err(Error::invalid(place, problem).hint(MESSAGE));
    }
    for (i, message) in messages.try_iter().into_iter().flatten().enumerate() {
        let has_role = message
            .get_attr("role")
            .is_ok_and(|role| role.as_str().is_some());
        if !has_role {
            return Err(Error::invalid(
                place,
                format!("`messages[{i}]` is not an object with a `role`"),
            )
            .hint(MESSAGE));
        }
    }
    Ok(())
}
