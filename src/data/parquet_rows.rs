//! Records of a Parquet file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

use super::prompts::FIELDS;
use crate::{Error, Result};

/// Calls `take` with each row's number, from 1, and its prompt columns. A null, also inside a column, is left out: a
/// struct column holds all fields of all rows, and in JSON those would be absent.
pub(super) fn read(path: &Path, mut take: impl FnMut(usize, &Value) -> Result<()>) -> Result<()> {
    let unsound =
        |e: ParquetError| Error::invalid(path.display(), format!("not a sound Parquet file: {e}"));
    let file = File::open(path).map_err(Error::io("open", path))?;
    let reader = SerializedFileReader::new(file).map_err(unsound)?;
    let schema = reader.metadata().file_metadata().schema().clone();
    let columns: Vec<Arc<Type>> = schema
        .get_fields()
        .iter()
        .filter(|field| FIELDS.contains(&field.name()))
        .cloned()
        .collect();
    if columns.is_empty() {
        let names: Vec<String> = schema
            .get_fields()
            .iter()
            .map(|field| format!("`{}`", field.name()))
            .collect();
        return Err(Error::invalid(
            path.display(),
            format!("holds no prompt, only {}", names.join(", ")),
        )
        .hint("a column `text`, `messages` or `prompt` is needed"));
    }
    let projection = Type::group_type_builder(schema.name())
        .with_fields(columns)
        .build()
        .map_err(unsound)?;
    let rows = reader.get_row_iter(Some(projection)).map_err(unsound)?;
    for (i, row) in rows.enumerate() {
        let record: Value = row
            .map_err(unsound)?
            .into_columns()
            .iter()
            .filter_map(|(name, field)| Some((name.as_str(), value(field)?)))
            .collect();
        take(i + 1, &record)?;
    }
    Ok(())
}

fn value(field: &Field) -> Option<Value> {
    Some(match field {
        Field::Null => return None,
        Field::Bool(b) => Value::from(*b),
        Field::Byte(n) => Value::from(*n),
        Field::Short(n) => Value::from(*n),
        Field::Int(n) => Value::from(*n),
        Field::Long(n) => Value::from(*n),
        Field::UByte(n) => Value::from(*n),
        Field::UShort(n) => Value::from(*n),
        Field::UInt(n) => Value::from(*n),
        Field::ULong(n) => Value::from(*n),
        Field::Float(x) => Value::from(*x),
        Field::Double(x) => Value::from(*x),
        Field::Str(text) => Value::from(text.as_str()),
        // Old writers do not mark their strings as such.
        Field::Bytes(bytes) => match bytes.as_utf8() {
            Ok(text) => Value::from(text),
            Err(_) => Value::from_bytes(bytes.data().to_vec()),
        },
        Field::Group(row) => row
            .get_column_iter()
            .filter_map(|(name, field)| Some((name.as_str(), value(field)?)))
            .collect(),
        Field::ListInternal(list) => list
            .elements()
            .iter()
            .map(|field| value(field).unwrap_or_default())
            .collect(),
        Field::MapInternal(map) => map
            .entries()
            .iter()
            .filter_map(|(key, field)| Some((value(key)?, value(field)?)))
            .collect(),
        other => Value::from(other.to_string()),
    })
}
