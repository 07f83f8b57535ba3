//! Chat messages into the text that a model was trained on.
//!
//! Templates are Jinja programs that come with the model. They run as in Hugging Face's `apply_chat_template`, save that
//! the date is pinned, so that the same prompts give the same tokens tomorrow, and that they cannot run forever.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, ErrorKind, State, Value, context};

use super::python_json;
use super::tokenizer::{SpecialTokens, Tokenizer};
use crate::files::read_text;
use crate::{Error, Result};

/// Template instructions, and 64-byte blocks of text made, for one prompt: a second of work.
const FUEL: u64 = 5_000_000;

/// A model's chat template, ready to run.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// What is wrong with the source. Told when messages need the template, as other prompts do without.
    broken: Option<String>,
    origin: String,
    specials: SpecialTokens,
}

/// The day that templates take for today.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date {
    year: u32,
    month: u32,
    day: u32,
}

/// 2025-01-01.
impl Default for Date {
    fn default() -> Self {
        Self {
            year: 2025,
            month: 1,
            day: 1,
        }
    }
}

impl ChatTemplate {
    /// The template that a tokenizer came with, or `None`.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let (source, origin) = tokenizer.chat_template.clone()?;
        Some(Self::new(&source, origin, tokenizer.specials.clone()))
    }

    /// A template given by a person, for the special tokens of `tokenizer`.
    ///
    /// # Errors
    /// A template that is not Jinja.
    pub fn from_file(path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let template = Self::new(
            &read_text(path)?,
            path.display().to_string(),
            tokenizer.specials.clone(),
        );
        match &template.broken {
            Some(problem) => Err(Error::invalid(path.display(), problem)),
            None => Ok(template),
        }
    }

    fn new(source: &str, origin: String, specials: SpecialTokens) -> Self {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.expect("the usual delimiters differ from each other"));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", to_json);
        let broken = environment
            .add_template_owned("chat", without_generation_tags(source))
            .err()
            .map(|e| format!("not a sound template: {e}"));
        Self {
            environment,
            broken,
            origin,
            specials,
        }
        .with_date(Date::default())
    }

    /// Pins another date for `strftime_now`.
    #[must_use]
    pub fn with_date(mut self, date: Date) -> Self {
        self.environment.add_function(
            "strftime_now",
            move |format: &str| -> Result<String, minijinja::Error> {
                date.format(format).map_err(|directive| {
                    minijinja::Error::new(
                        ErrorKind::InvalidOperation,
                        format!("`strftime_now` does not know `%{directive}`"),
                    )
                })
            },
        );
        self
    }

    /// `messages` and `tools` as in Hugging Face's `apply_chat_template`, with no generation prompt. `place` (file and
    /// line) stands in errors.
    ///
    /// # Errors
    /// Whatever the template raises, and one that runs for too long.
    pub fn render(&self, place: &str, messages: &Value, tools: &Value) -> Result<String> {
        self.run(place, messages, tools, false)
    }

    /// [`Self::render`], and after it the beginning of an answer.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_for_answer(
        &self,
        place: &str,
        messages: &Value,
        tools: &Value,
    ) -> Result<String> {
        self.run(place, messages, tools, true)
    }

    fn run(
        &self,
        place: &str,
        messages: &Value,
        tools: &Value,
        add_generation_prompt: bool,
    ) -> Result<String> {
        if let Some(problem) = &self.broken {
            return Err(Error::invalid(&self.origin, problem)
                .hint("give a template with `--chat-template`"));
        }
        let SpecialTokens { bos, eos, unk, pad } = &self.specials;
        // A token that the model lacks is undefined in the template, not none.
        let token = |token: &Option<String>| token.as_ref().map_or(Value::UNDEFINED, Value::from);
        self.environment
            .get_template("chat")
            .and_then(|template| {
                template.render(context! {
                    messages, tools,
                    documents => (),
                    add_generation_prompt,
                    bos_token => token(bos),
                    eos_token => token(eos),
                    unk_token => token(unk),
                    pad_token => token(pad),
                })
            })
            .map_err(|e| {
                Error::invalid(place, format!("chat template fails: {e}"))
                    .hint(format!("the template is in `{}`", self.origin))
            })
    }
}

/// transformers marks the assistant's part with `{% generation %}` for training; here it means nothing.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        match tag[2..end].trim_matches(['-', '+', ' ', '\n']) {
            "generation" => text.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => text.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text + rest
}

/// `tojson` as transformers has it: Python's `json.dumps`, with no HTML escapes.
#[allow(clippy::needless_pass_by_value)] // minijinja hands them over so
fn to_json(
    state: &State,
    value: &Value,
    indent: Option<usize>,
    kwargs: Kwargs,
) -> Result<String, minijinja::Error> {
    let separators: Option<(String, String)> = kwargs
        .get::<Option<Vec<String>>>("separators")?
        .and_then(|pair| <[String; 2]>::try_from(pair).ok())
        .map(Into::into);
    let style = python_json::Style {
        indent: match indent {
            Some(indent) => Some(indent),
            None => kwargs.get("indent")?,
        },
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators,
    };
    kwargs.assert_all_used()?;
    let text = python_json::dumps(value, &style).map_err(|e| {
        minijinja::Error::new(ErrorKind::BadSerialization, "cannot write JSON").with_source(e)
    })?;
    state.consume_fuel(text.len() as u64 / 64)?;
    Ok(text)
}

impl Date {
    /// From `YYYY-MM-DD`.
    pub fn parse(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('-').collect();
        if let [year, month, day] = parts[..]
            && year.len() == 4
            && month.len() == 2
            && day.len() == 2
            && let (Ok(year), Ok(month), Ok(day)) = (year.parse(), month.parse(), day.parse())
            && (1..=12).contains(&month)
            && (1..=days_in(year, month)).contains(&day)
        {
            return Ok(Self { year, month, day });
        }
        Err(Error::invalid(
            format!("date `{text}`"),
            "not a day written as YYYY-MM-DD",
        ))
    }

    /// Python's `strftime` at midnight; `Err` is a directive not known.
    fn format(self, format: &str) -> Result<String, char> {
        use std::fmt::Write;
        const MONTHS: [&str; 12] = [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ];
        const DAYS: [&str; 7] = [
            "Sunday",
            "Monday",
            "Tuesday",
            "Wednesday",
            "Thursday",
            "Friday",
            "Saturday",
        ];
        let Self { year, month, day } = self;
        let month_name = MONTHS[month as usize - 1];
        let day_of_year = (1..month).map(|m| days_in(year, m)).sum::<u32>() + day;
        let past = year.saturating_sub(1);
        let weekday = (past + past / 4 - past / 100 + past / 400 + day_of_year) % 7;
        let day_name = DAYS[weekday as usize];
        let mut text = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            // glibc's `%-d`: no leading zero.
            let mut directive = chars.next().ok_or(' ')?;
            let bare = directive == '-';
            if bare {
                directive = chars.next().ok_or('-')?;
            }
            let mut two = |n: u32| {
                if bare {
                    write!(text, "{n}")
                } else {
                    write!(text, "{n:02}")
                }
            };
            let _ = match directive {
                'Y' => write!(text, "{year:04}"),
                'y' => two(year % 100),
                'm' => two(month),
                'd' => two(day),
                'e' => write!(text, "{day:2}"),
                'B' => write!(text, "{month_name}"),
                'b' | 'h' => write!(text, "{}", &month_name[..3]),
                'A' => write!(text, "{day_name}"),
                'a' => write!(text, "{}", &day_name[..3]),
                'j' => write!(text, "{day_of_year:03}"),
                'H' | 'M' | 'S' => two(0),
                'I' => two(12),
                'p' => write!(text, "AM"),
                'F' => write!(text, "{year:04}-{month:02}-{day:02}"),
                'T' => write!(text, "00:00:00"),
                '%' => write!(text, "%"),
                other => return Err(other),
            };
        }
        Ok(text)
    }
}

fn days_in(year: u32, month: u32) -> u32 {
    match month {
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => {
            29
        }
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &str, tools: &str) -> Result<String> {
        let specials = SpecialTokens {
            bos: Some("<s>".into()),
            ..SpecialTokens::default()
        };
        let template = ChatTemplate::new(source, "here".into(), specials);
        let value = |json| serde_json::from_str(json).unwrap();
        template.render("chats.jsonl:3", &value(messages), &value(tools))
    }

    const HELLO: &str = r#"[{"role": "user", "content": " hello "}]"#;

    #[test]
    fn follows_transformers() {
        // Blocks take their line's indentation and newline with them; the last newline goes.
        assert_eq!(
            render(
                "{%- for m in messages %}\n  {% if m.role == 'user' %}\n{{ m['content'].strip() }}|\n  {% endif %}\n{%- endfor %}\nend\n",
                HELLO,
                "null"
            )
            .unwrap(),
            "hello|\nend"
        );
        assert_eq!(
            render(
                "{{ bos_token }}{{ eos_token is defined }}{{ add_generation_prompt }}{{ tools is none }}{{ messages[0].get('x', 'y') }}",
                HELLO,
                "null"
            )
            .unwrap(),
            "<s>FalseFalseTruey"
        );
        assert_eq!(
            render(
                "{{ tools | tojson }}|{{ tools[0] | tojson(indent=4) }}",
                HELLO,
                r#"[{"z": "<é>", "a": 1.0}]"#
            )
            .unwrap(),
            "[{\"z\": \"<é>\", \"a\": 1.0}]|{\n    \"z\": \"<é>\",\n    \"a\": 1.0\n}"
        );
        assert_eq!(
            render(
                "{% for m in messages %}{% generation %}a{%- endgeneration -%} {% endfor %}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
                HELLO,
                "null"
            )
            .unwrap(),
            "a01"
        );
    }

    #[test]
    fn the_date_is_pinned() {
        let source = "{{ strftime_now('%d %b %Y|%A %-d. %B|%Y-%m-%d|%j|%y%%') }}";
        assert_eq!(
            render(source, HELLO, "null").unwrap(),
            "01 Jan 2025|Wednesday 1. January|2025-01-01|001|25%"
        );
        let leap = Date::parse("2024-12-31").unwrap();
        assert_eq!(leap.format("%a %j").unwrap(), "Tue 366");
        let past = Date::parse("1999-03-01").unwrap();
        assert_eq!(past.format("%a %j %e").unwrap(), "Mon 060  1");
        for wrong in [
            "2023-02-29",
            "2024-13-01",
            "2024-1-01",
            "today",
            "2024-01-01-01",
        ] {
            assert!(Date::parse(wrong).is_err(), "{wrong}");
        }
        let message = render("{{ strftime_now('%Q') }}", HELLO, "null")
            .unwrap_err()
            .to_string();
        assert!(message.contains("does not know `%Q`"), "{message}");
    }

    #[test]
    fn failures_name_the_prompt() {
        let message = render(
            "{{ raise_exception('roles must alternate') }}",
            HELLO,
            "null",
        )
        .unwrap_err()
        .to_string();
        assert!(
            message.starts_with("chats.jsonl:3: chat template fails: "),
            "{message}"
        );
        assert!(message.contains("roles must alternate"), "{message}");
        assert!(message.contains("`here`"), "{message}");
        assert!(render("{{ messages[0].x.y }}", HELLO, "null").is_err());
        let message = render("{% if %}", HELLO, "null").unwrap_err().to_string();
        assert!(
            message.starts_with("here: not a sound template"),
            "{message}"
        );
    }

    #[test]
    fn hostile_templates_end() {
        for hostile in [
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
            "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ 'a' * 1000000000000 }}",
            "{% include 'chat' %}",
        ] {
            let message = render(hostile, HELLO, "null").unwrap_err().to_string();
            assert!(message.starts_with("chats.jsonl:3"), "{message}");
        }
    }
}
