//! Recipes: the arguments of commands, in a TOML file.
//!
//! A file has a table a command (`[calibrate]`, `[bench.decode]`), whose keys are the command's long flags, or the names
//! of its positional arguments. What a key may be is what clap knows of the argument, so that nothing is written down
//! twice: every table and key of the file is checked against it, and then what the command line leaves open is added to
//! the command line, and parsed as if it had been typed.

use std::any::TypeId;
use std::error::Error as _;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use toml::{Table, Value};

use super::{Cli, entry_recipe};
use crate::{Error, files, zoo};

/// More than any recipe: what is parsed takes many times the file's size.
const MOST_BYTES: u64 = 32 << 10;

/// The key that a recipe may not have.
const ITSELF: &str = "recipe";

/// What the command that runs was told by flags, recipe and defaults.
#[derive(Debug)]
pub struct Given {
    /// Values by key, as a recipe would have them; switches only where they are on.
    pub values: Table,
    /// The keys that the command line gives beside a recipe.
    pub flags: Vec<String>,
    /// The entry that `--recipe` names, where it names one.
    pub entry: Option<PathBuf>,
}

/// A recipe, all of whose tables and keys are right.
#[derive(Debug)]
pub struct Recipe {
    place: String,
    tables: Vec<Arguments>,
}

/// The table of one command.
#[derive(Debug)]
struct Arguments {
    /// Such as `bench.decode`.
    command: String,
    list: Vec<Argument>,
}

/// The value of one key.
#[derive(Debug)]
struct Argument {
    id: clap::Id,
    key: String,
    form: Form,
    /// As they would be typed; one, without a meaning, of a switch that is on.
    values: Vec<String>,
}

/// How an argument is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// `--key`
    Switch,
    /// `--key=value`
    Option,
    /// `value`
    Positional,
}

impl Recipe {
    /// Reads a recipe and checks all of it.
    ///
    /// # Errors
    /// A file that cannot be read or is no TOML, a table that is no command's, a key that is no argument's, a value that
    /// the argument does not take.
    pub fn read(path: &Path) -> crate::Result<Self> {
        let place = path.display().to_string();
        let size = std::fs::metadata(path).map_err(Error::io("read", path))?;
        if size.is_file() && size.len() > MOST_BYTES {
            return Err(Error::invalid(
                place,
                format!("{} bytes are more than any recipe has", size.len()),
            ));
        }
        Self::parse(&files::read_text(path)?, &place)
    }

    /// As [`Self::read`]; `place` names the text in errors.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn parse(text: &str, place: &str) -> crate::Result<Self> {
        let table: Table = text
            .parse()
            .map_err(|e: toml::de::Error| Error::invalid(place, e.to_string().trim_end()))?;
        Self::new(table, place)
    }

    /// Checks `table`, a whole recipe; `place` names it in errors.
    pub(super) fn new(table: Table, place: &str) -> crate::Result<Self> {
        let mut recipe = Self {
            place: place.to_owned(),
            tables: Vec::new(),
        };
        recipe.take(&Cli::command(), "", table)?;
        Ok(recipe)
    }

    /// Takes the tables of the commands below `parent`, whose own name is `prefix`, with a dot behind it.
    fn take(&mut self, parent: &Command, prefix: &str, table: Table) -> crate::Result<()> {
        for (key, value) in table {
            let Some(command) = parent.get_subcommands().find(|c| c.get_name() == key) else {
                let Value::Table(_) = value else {
                    return Err(Error::invalid(
                        &self.place,
                        format!(
                            "`{prefix}{}` stands in no command's table",
                            key.escape_debug()
                        ),
                    )
                    .hint("a recipe has a table a command, such as `[calibrate]`"));
                };
                let names: Vec<_> = parent.get_subcommands().map(Command::get_name).collect();
                let what = match prefix.strip_suffix('.') {
                    Some(parent) => format!("command of `{parent}`"),
                    None => "command".to_owned(),
                };
                return Err(Error::unknown(&self.place, what, &key, &names));
            };
            let name = format!("{prefix}{key}");
            let Value::Table(table) = value else {
                return Err(Error::invalid(
                    &self.place,
                    format!("`{name}` is a command, and no table here"),
                )
                .hint(format!("its arguments stand under `[{name}]`")));
            };
            if command.has_subcommands() {
                self.take(command, &format!("{name}."), table)?;
                continue;
            }
            let list = table
                .into_iter()
                .map(|(key, value)| self.argument(command, &name, key, &value))
                .collect::<crate::Result<Vec<_>>>()?;
            self.tables.push(Arguments {
                command: name,
                list,
            });
        }
        Ok(())
    }

    fn argument(
        &self,
        command: &Command,
        name: &str,
        key: String,
        value: &Value,
    ) -> crate::Result<Argument> {
        if key == ITSELF {
            return Err(Error::invalid(
                &self.place,
                format!("`[{name}]` names a recipe of its own"),
            )
            .hint("put all keys into one table"));
        }
        let Some(arg) = command.get_arguments().find(|arg| name_of(arg) == key) else {
            let known: Vec<_> = command.get_arguments().map(name_of).collect();
            let known: Vec<_> = known.iter().map(String::as_str).collect();
            return Err(Error::unknown(
                &self.place,
                format_args!("key of `[{name}]`"),
                &key,
                &known,
            ));
        };
        let (form, values) = typed(arg, value).map_err(|refusal| {
            let error = Error::invalid(
                &self.place,
                format!("`{key}` of `[{name}]`: {}", refusal.problem),
            );
            match refusal.hint {
                Some(hint) => error.hint(hint),
                None => error,
            }
        })?;
        Ok(Argument {
            id: arg.get_id().clone(),
            key,
            form,
            values,
        })
    }

    /// The keys and values of the table of `command`, such as `bench.decode`.
    pub(super) fn values(&self, command: &str) -> Option<impl Iterator<Item = (&str, &[String])>> {
        let list = self.table(command).ok()?.list.iter();
        Some(list.map(|a| (a.key.as_str(), a.values.as_slice())))
    }

    /// The table of `command`.
    fn table(&self, command: &str) -> crate::Result<&Arguments> {
        let found = self.tables.iter().find(|table| table.command == command);
        found.ok_or_else(|| {
            let error = Error::invalid(&self.place, format!("has no table `[{command}]`"));
            let there: Vec<_> = self.tables.iter().map(|table| &table.command).collect();
            if there.is_empty() {
                error.hint("a recipe has a table a command, whose keys are its long flags")
            } else {
                error.hint(format!("it has {}", Names(&there)))
            }
        })
    }

    /// The error of arguments that are required and given nowhere.
    fn lacks(&self, error: &clap::Error) -> Error {
        let missing = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(names)) => names.join("`, `"),
            _ => return Error::invalid(&self.place, first_line(error)),
        };
        Error::invalid(
            &self.place,
            format!("neither it nor the command line gives `{missing}`"),
        )
    }

    /// `typed`, a command line, with what it leaves open taken from this recipe.
    fn complete(&self, typed: Vec<OsString>, leaf: &Leaf) -> crate::Result<Vec<OsString>> {
        let flags: Vec<&Arg> = leaf.flags().collect();
        let beaten = |argument: &Argument| {
            flags.iter().any(|flag| {
                *flag.get_id() == argument.id
                    || excludes(leaf.command, flag, &argument.id)
                    || leaf.command.get_arguments().any(|arg| {
                        *arg.get_id() == argument.id && excludes(leaf.command, arg, flag.get_id())
                    })
            })
        };
        let (mut options, mut positional) = (Vec::new(), Vec::new());
        for argument in &self.table(&leaf.name)?.list {
            if beaten(argument) {
                continue;
            }
            let Argument {
                key, form, values, ..
            } = argument;
            match form {
                Form::Switch => options.extend(values.iter().map(|_| format!("--{key}").into())),
                Form::Option => {
                    options.extend(values.iter().map(|x| format!("--{key}={x}").into()));
                }
                Form::Positional => positional.extend(values.iter().map(OsString::from)),
            }
        }
        // What stands behind `--` is positional, whatever it looks like.
        let end = typed.iter().position(|word| word == "--");
        let mut words = typed;
        let behind = words.split_off(end.unwrap_or(words.len()));
        words.append(&mut options);
        words.extend(behind);
        if !positional.is_empty() {
            if end.is_none() {
                words.push("--".into());
            }
            words.append(&mut positional);
        }
        Ok(words)
    }
}

/// The command that a command line runs.
struct Leaf<'a> {
    /// Such as `bench.decode`.
    name: String,
    command: &'a Command,
    matches: &'a ArgMatches,
}

impl<'a> Leaf<'a> {
    /// `None` where a subcommand is missing.
    fn of(root: &'a Command, matches: &'a ArgMatches) -> Option<Self> {
        let mut leaf = Self {
            name: String::new(),
            command: root,
            matches,
        };
        while let Some((name, matches)) = leaf.matches.subcommand() {
            if !leaf.name.is_empty() {
                leaf.name.push('.');
            }
            leaf.name.push_str(name);
            leaf.command = leaf.command.find_subcommand(name)?;
            leaf.matches = matches;
        }
        (!leaf.command.has_subcommands()).then_some(leaf)
    }

    /// What the command line gives.
    fn flags(&self) -> impl Iterator<Item = &Arg> {
        self.command.get_arguments().filter(|arg| {
            self.matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
        })
    }

    /// All values, flags' and defaults'.
    fn values(&self) -> Table {
        let mut table = Table::new();
        for arg in self.command.get_arguments() {
            let id = arg.get_id().as_str();
            let Ok(Some(raw)) = self.matches.try_get_raw(id) else {
                continue;
            };
            let mut values: Vec<Value> = raw
                .map(|raw| value_of(arg, &raw.to_string_lossy()))
                .collect();
            let value = match arg.get_action() {
                ArgAction::SetTrue if self.matches.get_flag(id) => Value::Boolean(true),
                ArgAction::Append => Value::Array(values),
                ArgAction::Set if values.len() == 1 => values.remove(0),
                _ => continue,
            };
            table.insert(name_of(arg), value);
        }
        table
    }
}

/// `-1` is a wrong value, said with the argument's name, and not an unknown flag.
fn with_negative_numbers(command: Command) -> Command {
    command
        .mut_args(|arg| {
            let takes = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes)
        })
        .mut_subcommands(with_negative_numbers)
}

/// Parses a command line, completed by the recipe that it names.
///
/// # Errors
/// Those of [`Recipe::read`]; [`clap::Error`] where clap has something to say, help and version included.
pub fn parse(words: &[OsString]) -> Result<(Cli, Given)> {
    let root = with_negative_numbers(Cli::command());
    // What is required may come from the recipe: what is typed is read as far as it can be.
    let lenient = root.clone().ignore_errors(true);
    let mut recipe = None;
    let mut given_entry = None;
    let mut flags = Vec::new();
    let mut completed = words.to_owned();
    if let Ok(matches) = lenient.try_get_matches_from(words)
        && let Some(leaf) = Leaf::of(&root, &matches)
        && let Ok(Some(path)) = leaf.matches.try_get_one::<PathBuf>(ITSELF)
    {
        given_entry = entry_of(path).filter(|_| leaf.name == entry_recipe::COMMAND);
        let read = match &given_entry {
            Some(entry) => entry_recipe::read(entry)?,
            None => Recipe::read(path).map_err(|error| match entry_of(path) {
                Some(_) => error.hint("only `calibrate` takes an entry; give a TOML file"),
                None => error,
            })?,
        };
        flags = leaf.flags().map(name_of).collect();
        completed = read.complete(completed, &leaf)?;
        recipe = Some(read);
    }
    let matches = match (root.clone().try_get_matches_from(&completed), &recipe) {
        (Ok(matches), _) => matches,
        (Err(error), None) => return Err(error.into()),
        (Err(error), Some(recipe)) => {
            // What is wrong with the command line alone is said as without a recipe.
            let own = root.clone().try_get_matches_from(words).err();
            return Err(match (error.kind(), own.map(|own| own.kind())) {
                (ErrorKind::MissingRequiredArgument, _) => recipe.lacks(&error).into(),
                (ErrorKind::ArgumentConflict, own) if own != Some(ErrorKind::ArgumentConflict) => {
                    Error::invalid(&recipe.place, first_line(&error)).into()
                }
                _ => error.into(),
            });
        }
    };
    let given = Given {
        values: Leaf::of(&root, &matches).map_or_else(Table::new, |leaf| leaf.values()),
        flags,
        entry: given_entry,
    };
    Ok((Cli::from_arg_matches(&matches)?, given))
}

/// Arguments of `command`, no subcommand of another, from its table in `recipe` and from `more` words, which win; and
/// all their values.
pub(super) fn arguments<T: FromArgMatches>(
    recipe: &Recipe,
    command: &str,
    more: Vec<OsString>,
) -> Result<(T, Table)> {
    let root = Cli::command();
    let mut words = vec!["oscar".into(), command.into()];
    words.extend(more);
    let lenient = root.clone().ignore_errors(true);
    let typed = lenient.try_get_matches_from(&words)?;
    if let Some(leaf) = Leaf::of(&root, &typed) {
        words = recipe.complete(words, &leaf)?;
    }
    let matches = root.clone().try_get_matches_from(words)?;
    let leaf = Leaf::of(&root, &matches)
        .ok_or_else(|| Error::invalid(&recipe.place, format!("`{command}` is no command")))?;
    Ok((T::from_arg_matches(leaf.matches)?, leaf.values()))
}

/// The folder of the entry that `--recipe` names, by its folder or the file in it.
fn entry_of(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.to_owned());
    }
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    path.file_name()
        .filter(|name| *name == zoo::FILE)
        .map(|_| folder.unwrap_or(Path::new(".")).to_owned())
}

/// A long flag, or the name that help shows of a positional argument, in lower case.
fn name_of(arg: &Arg) -> String {
    let shown = arg.get_value_names().and_then(|names| names.first());
    match (arg.get_long(), shown) {
        (Some(long), _) => long.to_owned(),
        (None, Some(name)) => name.to_lowercase(),
        (None, None) => arg.get_id().to_string(),
    }
}

/// Whether `arg` may not be given beside `other`.
fn excludes(command: &Command, arg: &Arg, other: &clap::Id) -> bool {
    let excluded = command.get_arg_conflicts_with(arg);
    excluded.iter().any(|arg| arg.get_id() == other)
}

/// What is wrong with a value.
struct Refusal {
    problem: String,
    hint: Option<String>,
}

impl From<&str> for Refusal {
    fn from(problem: &str) -> Self {
        Self {
            problem: problem.to_owned(),
            hint: None,
        }
    }
}

/// A value as it would be typed.
fn typed(arg: &Arg, value: &Value) -> Result<(Form, Vec<String>), Refusal> {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return match value {
            Value::Boolean(true) => Ok((Form::Switch, vec![String::new()])),
            Value::Boolean(false) => Ok((Form::Switch, Vec::new())),
            _ => Err("is a switch, true or false".into()),
        };
    }
    let values = match (arg.get_action(), value) {
        (ArgAction::Append, Value::Array(list)) => list.as_slice(),
        (_, Value::Array(_)) => return Err("takes one value, not a list".into()),
        _ => std::slice::from_ref(value),
    };
    let texts = values
        .iter()
        .map(|value| text(arg, value))
        .collect::<Result<Vec<_>, _>>()?;
    for text in &texts {
        taken(arg, text)?;
    }
    let form = if arg.is_positional() {
        Form::Positional
    } else {
        Form::Option
    };
    Ok((form, texts))
}

fn text(arg: &Arg, value: &Value) -> Result<String, Refusal> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) if is_number(arg) => Ok(number.to_string()),
        Value::Float(number) if is_number(arg) => Ok(number.to_string()),
        _ if is_number(arg) => Err("takes a number".into()),
        _ => Err("takes text, in quotes".into()),
    }
}

/// Asks the argument's own parser, apart from all other arguments.
fn taken(arg: &Arg, text: &str) -> Result<(), Refusal> {
    let mut alone = Arg::new("value")
        .long("value")
        .action(arg.get_action().clone())
        .value_parser(arg.get_value_parser().clone());
    if let Some(delimiter) = arg.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter);
    }
    let command = Command::new("recipe").no_binary_name(true).arg(alone);
    let Err(error) = command.try_get_matches_from([format!("--value={text}")]) else {
        return Ok(());
    };
    let shown = text.escape_debug();
    let listed = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(names)) if !names.is_empty() => Some(names),
        _ => None,
    };
    Err(match (listed, error.source()) {
        (Some(names), _) => Refusal {
            problem: format!("`{shown}` is none of {}", names.join(", ")),
            hint: match error.get(ContextKind::SuggestedValue) {
                Some(ContextValue::String(name)) => Some(format!("did you mean `{name}`?")),
                _ => None,
            },
        },
        (None, Some(cause)) => Refusal::from(format!("`{shown}`: {cause}").as_str()),
        (None, None) => Refusal::from(first_line(&error).as_str()),
    })
}

/// The value that [`typed`] would give back as `text`.
fn value_of(arg: &Arg, text: &str) -> Value {
    if is_number(arg) {
        if let Ok(number) = text.parse() {
            return Value::Integer(number);
        }
        if let Ok(number) = text.parse::<f64>()
            // Integers beyond i64 stay text, which keeps all their digits.
            && text.parse::<u64>().is_err()
        {
            return Value::Float(number);
        }
    }
    Value::String(text.to_owned())
}

fn is_number(arg: &Arg) -> bool {
    let id = arg.get_value_parser().type_id();
    [
        TypeId::of::<usize>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<f32>(),
        TypeId::of::<f64>(),
    ]
    .iter()
    .any(|number| id == *number)
}

/// Of clap's message, without `error: ` and the usage below.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.trim_start_matches("error: ").to_owned()
}

/// `[a], [b]`
struct Names<'a>(&'a [&'a String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}`[{name}]`")?;
        }
        Ok(())
    }
}
