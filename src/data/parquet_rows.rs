//! Records of a Parquet file.

use std::fmt::Display;
use std::fs::File;
use std::path::Path;

use minijinja::Value;
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::{Type, TypePtr};

use super::guard::quietly;
use super::prompts::FIELDS;
use crate::{Error, Result};

/// Calls `take` with each row's number, from 1, and its prompt columns. A null, also inside a column, is left out: a
/// struct column holds all fields of all rows, and in JSON those would be absent.
pub(super) fn read(path: &Path, mut take: impl FnMut(usize, &Value) -> Result<()>) -> Result<()> {
    let unsound = |problem: &dyn Display| {
        Error::invalid(
            path.display(),
            format!("not a sound Parquet file: {problem}"),
        )
    };
    let file = File::open(path).map_err(Error::io("open", path))?;
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(|e| unsound(&e))?;
    let schema = reader.metadata().file_metadata().schema();
    let names = |list: &[TypePtr]| -> Vec<String> {
        list.iter()
            .map(|field| format!("`{}`", field.name()))
            .collect()
    };
    let columns: Vec<TypePtr> = schema
        .get_fields()
        .iter()
        .filter(|field| FIELDS.contains(&field.name()))
        .cloned()
        .collect();
    if columns.is_empty() {
        return Err(Error::invalid(
            path.display(),
            format!(
                "holds no prompt, only {}",
                names(schema.get_fields()).join(", ")
            ),
        )
        .hint("a column `text`, `messages` or `prompt` is needed"));
    }
    let chunks = reader
        .metadata()
        .row_groups()
        .iter()
        .flat_map(RowGroupMetaData::columns);
    for chunk in chunks {
        let start = chunk
            .dictionary_page_offset()
            .unwrap_or_else(|| chunk.data_page_offset());
        if start < 0 || chunk.compressed_size() < 0 {
            return Err(unsound(&"a column lies at a negative offset"));
        }
    }
    let projection = Type::group_type_builder(schema.name())
        .with_fields(columns)
        .build()
        .map_err(|e| unsound(&e))?;
    let mut rows = guarded(|| reader.get_row_iter(Some(projection))).map_err(|e| unsound(&e))?;
    for number in 1.. {
        let Some(row) = guarded(|| rows.next().transpose()).map_err(|e| unsound(&e))? else {
            break;
        };
        let columns = row.into_columns();
        let record = columns
            .iter()
            .filter_map(|(name, field)| Some((name.as_str(), value(field)?)));
        take(number, &Value::from_pairs(record))?;
    }
    Ok(())
}

/// The reader asserts some things that a corrupt file breaks.
fn guarded<T>(
    read: impl FnOnce() -> std::result::Result<T, ParquetError>,
) -> std::result::Result<T, ParquetError> {
    quietly(read).unwrap_or_else(|| Err(ParquetError::General("corrupt data".to_owned())))
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
        Field::Group(row) => Value::from_pairs(
            row.get_column_iter()
                .filter_map(|(name, field)| Some((name.as_str(), value(field)?))),
        ),
        Field::ListInternal(list) => list
            .elements()
            .iter()
            .map(|field| value(field).unwrap_or_default())
            .collect(),
        Field::MapInternal(map) => Value::from_pairs(
            map.entries()
                .iter()
                .filter_map(|(key, field)| Some((value(key)?, value(field)?))),
        ),
        other => Value::from(other.to_string()),
    })
}
