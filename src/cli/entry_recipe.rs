//! `recipe.toml` of an entry: the settings that it was calibrated with, for `oscar calibrate --recipe ENTRY`.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use toml::{Table, Value};

use super::common::{check_id, entry_folder};
use super::recipe::Recipe;
use crate::Error;
use crate::calib::Moments;
use crate::files::write_atomic;
use crate::model::Model;
use crate::zoo::{self, Entry, Method, SideName};

/// The command that makes entries.
pub const COMMAND: &str = "calibrate";

/// What of a command's arguments leaves the entry as it is: where things go, how they are shown, when they are redone.
const WITHOUT_EFFECT: [&str; 9] = [
    "dry-run",
    "force",
    "format",
    "fresh",
    "moments",
    "out",
    "recipe",
    "sample-rows",
    "zoo",
];

/// The recipe of the entry in `folder`: its recipe.toml, or what its metadata says where it has none.
///
/// # Errors
/// A recipe or an entry that cannot be read, a recipe that says where things go, an imported entry.
pub fn read(folder: &Path) -> Result<Recipe> {
    let folder = entry_folder(folder)?;
    let path = folder.join(zoo::RECIPE);
    if path.exists() {
        let recipe = Recipe::read(&path)?;
        let keys = recipe.values(COMMAND).into_iter().flatten();
        // Entries come from elsewhere: what one asks for must not decide which files are written here.
        if let Some((key, _)) = keys
            .into_iter()
            .find(|(key, _)| WITHOUT_EFFECT.contains(key))
        {
            return Err(Error::invalid(
                path.display(),
                format!("`{key}` is no setting of an entry"),
            )
            .hint("remove it, and give it as a flag")
            .into());
        }
        return Ok(recipe);
    }
    let entry = Entry::open(folder)?;
    let place = folder.display().to_string();
    if entry.metadata.imported.is_some() {
        return Err(Error::invalid(
            place,
            "was imported: this tool did not calibrate it, and cannot repeat that",
        )
        .into());
    }
    let mut table = recorded(&entry);
    for side in SideName::ALL {
        // A ratio that is the same in several places was given, others were searched.
        if let Some(clip) = one_clip(&entry, side)
            && clips(&entry, side).nth(1).is_some()
            // As it was typed: 0.96 and not the nearest f32.
            && let Ok(clip) = clip.to_string().parse()
        {
            table.insert(format!("{side}-clip"), Value::Float(clip));
        }
    }
    Ok(Recipe::new(whole(table), &place)?)
}

/// Writes the recipe of `entry` into its `folder`: `settings` of the command that made it, and what was decided from them.
///
/// # Errors
/// Where the operating system refuses.
pub fn write(folder: &Path, entry: &Entry, settings: &Table) -> Result<()> {
    let mut table = settings.clone();
    for key in WITHOUT_EFFECT {
        table.remove(key);
    }
    table.retain(|_, value| value.as_array().is_none_or(|list| !list.is_empty()));
    table.extend(recorded(entry));
    let text = format!(
        "# The settings of this entry; `oscar calibrate --recipe ENTRY` repeats it.\n{}",
        toml::to_string(&whole(table))?
    );
    write_atomic(&folder.join(zoo::RECIPE), |out| {
        out.write_all(text.as_bytes())
    })?;
    Ok(())
}

/// What moments remember of their collection and an entry does not. Where model and prompts are, nothing remembers.
pub fn of_moments(moments: &Moments) -> Table {
    let holdout = number(moments.meta().holdout_tokens as u64);
    Table::from_iter([("holdout".to_owned(), holdout)])
}

/// `locator` of `model`, with the commit where it comes from a hub.
pub fn pinned(locator: &str, model: &Model) -> String {
    match (locator.split_once('@'), model.revision()) {
        (Some((name, _)), Some(commit)) => format!("{name}@{commit}"),
        (None, Some(commit)) => format!("{locator}@{commit}"),
        (_, None) => locator.to_owned(),
    }
}

/// Where the recipe of the entry in `folder` contradicts the entry, or cannot be read; `None` where it has none.
pub fn problems(folder: &Path, entry: &Entry) -> Option<Vec<String>> {
    if !folder.join(zoo::RECIPE).exists() {
        return None;
    }
    let recipe = match read(folder) {
        Ok(recipe) => recipe,
        Err(error) => return Some(vec![error.to_string()]),
    };
    let Some(values) = recipe.values(COMMAND) else {
        return Some(vec![format!("no table `[{COMMAND}]`")]);
    };
    let recorded = recorded(entry);
    let mut problems = Vec::new();
    for (key, values) in values {
        let [value] = values else { continue };
        let side = match key {
            "k-clip" => Some(SideName::K),
            "v-clip" => Some(SideName::V),
            _ => None,
        };
        let (same, says) = if let Some(side) = side {
            let clip = one_clip(entry, side);
            let given = value.parse::<f64>().ok().map(|clip| clip as f32);
            let says = clip.map_or_else(|| "many".to_owned(), |clip| clip.to_string());
            (clip == given, says)
        } else if let Some(recorded) = recorded.get(key) {
            let says = text(recorded);
            (says == *value, says)
        } else {
            continue;
        };
        if !same {
            problems.push(format!("`{key}` is {value}, the entry has {says}"));
        }
    }
    Some(problems)
}

/// What an entry's metadata says of the settings that made it.
fn recorded(entry: &Entry) -> Table {
    let m = &entry.metadata;
    let c = &m.calibration;
    let word = |word: &str| Value::String(word.to_owned());
    let mut table = Table::from_iter(
        [
            ("device", word(&c.device)),
            ("dtype", word(&c.dtype)),
            ("tokens", number(c.tokens as u64)),
            ("seq-len", number(c.seq_len as u64)),
            ("seed", number(c.seed)),
            ("method", word(m.method.as_str())),
            ("scope", word(m.scope.as_str())),
            ("group", number(m.quantizer.group as u64)),
            ("sink", number(m.windows.sink_tokens as u64)),
            ("recent", number(m.windows.recent_tokens as u64)),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    );
    let mut put = |key: &str, value: &str| table.insert(key.to_owned(), word(value));
    // A file's name may be no id; then the same file gives the same name again.
    if check_id(&m.model.id).is_ok() {
        put("model-id", &m.model.id);
    }
    if let Some(fit) = &m.fit {
        put("rounding", fit.k_rounding.as_str());
        put("center", if fit.k_centered { "on" } else { "off" });
    }
    let rotated = entry.layers.values().all(|layer| layer.v.dual.is_none());
    if let Some(moment) = m.v_moment
        && (m.method == Method::Oscar || (m.method == Method::Balanced && rotated))
    {
        put("v-moment", moment.as_str());
    }
    table
}

/// The clip ratio of a side, where it is the same everywhere.
fn one_clip(entry: &Entry, side: SideName) -> Option<f32> {
    let mut clips = clips(entry, side);
    let first = clips.next()?;
    clips
        .all(|clip| clip.to_bits() == first.to_bits())
        .then_some(first)
}

fn clips(entry: &Entry, side: SideName) -> impl Iterator<Item = f32> {
    entry
        .layers
        .values()
        .flat_map(move |layer| match side {
            SideName::K => layer.k.clip.iter(),
            SideName::V => layer.v.clip.iter(),
        })
        .copied()
}

fn whole(table: Table) -> Table {
    Table::from_iter([(COMMAND.to_owned(), Value::Table(table))])
}

/// Beyond i64, which TOML has, text.
fn number(number: u64) -> Value {
    i64::try_from(number).map_or_else(|_| Value::String(number.to_string()), Value::Integer)
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
