//! JSON spelt as Python's `json.dumps` spells it: models saw tool schemas written that way.

use std::io::{self, Write};

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter};

/// Arguments of `json.dumps`.
#[derive(Default)]
pub(super) struct Style {
    pub indent: Option<usize>,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
    /// Between items, and between key and value.
    pub separators: Option<(String, String)>,
}

/// A template can build values that nest without end.
const DEPTH: usize = 64;

/// Columns a level.
const INDENT: usize = 64;

fn deeper_than(depth: usize, value: &Value) -> bool {
    let children = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Map => children().any(|key| {
            let item = value.get_item(&key).unwrap_or_default();
            depth == 0 || deeper_than(depth - 1, &item)
        }),
        ValueKind::Seq | ValueKind::Iterable => {
            children().any(|item| depth == 0 || deeper_than(depth - 1, &item))
        }
        _ => false,
    }
}

pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, serde_json::Error> {
    if deeper_than(DEPTH, value) {
        return Err(serde::ser::Error::custom(format!(
            "values nest more than {DEPTH} deep"
        )));
    }
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None if style.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let formatter = Python {
        indent: style.indent.map(|indent| indent.min(INDENT)),
        item,
        key,
        ensure_ascii: style.ensure_ascii,
        depth: 0,
        has_items: false,
    };
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    if style.sort_keys {
        sorted(value).serialize(&mut serializer)?;
    } else {
        value.serialize(&mut serializer)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A copy with every map's keys in order.
fn sorted(value: &Value) -> Value {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Map => {
            let mut keys: Vec<Value> = items().collect();
            keys.sort();
            Value::from_pairs(keys.into_iter().map(|key| {
                let item = value.get_item(&key).unwrap_or_default();
                (key, sorted(&item))
            }))
        }
        ValueKind::Seq => items().map(|item| sorted(&item)).collect(),
        _ => value.clone(),
    }
}

struct Python<'a> {
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    ensure_ascii: bool,
    depth: usize,
    has_items: bool,
}

impl Python<'_> {
    fn open<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.new_line(writer)?;
        }
        self.has_items = true;
        writer.write_all(bracket)
    }

    fn begin_item<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for Python<'_> {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_item(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if c.is_ascii() && c != '\x7f' {
                write!(writer, "{c}")?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn write_char_escape<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        serde_json::ser::CompactFormatter.write_char_escape(writer, escape)
    }

    /// Python's `repr`: an exponent of at least two digits, below 1e-4 and from 1e16.
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let scientific = format!("{value:e}");
        let Some((mantissa, exponent)) = scientific.split_once('e') else {
            return writer.write_all(scientific.as_bytes());
        };
        match exponent.parse::<i32>() {
            Ok(exponent) if !(-4..16).contains(&exponent) => {
                let sign = if exponent < 0 { '-' } else { '+' };
                write!(writer, "{mantissa}e{sign}{:02}", exponent.abs())
            }
            _ if value.fract() == 0.0 => write!(writer, "{value:.1}"),
            _ => write!(writer, "{value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    /// Expected strings are Python's own.
    #[test]
    fn equals_python() {
        let tools = value(
            r#"{"b": [1, 2.0, 1e16, 1e-5, 0.0001, 123456789.25], "a": {"x": [], "y": {}, "é\n": null}, "<t>": "a\"'\u0001"}"#,
        );
        assert_eq!(
            dumps(&tools, &Style::default()).unwrap(),
            r#"{"b": [1, 2.0, 1e+16, 1e-05, 0.0001, 123456789.25], "a": {"x": [], "y": {}, "é\n": null}, "<t>": "a\"'\u0001"}"#
        );
        let style = Style {
            indent: Some(2),
            ensure_ascii: true,
            sort_keys: true,
            separators: None,
        };
        assert_eq!(
            dumps(
                &value(r#"{"b": [1, {"😀": true}], "a": [], "c": [[]]}"#),
                &style
            )
            .unwrap(),
            "{\n  \"a\": [],\n  \"b\": [\n    1,\n    {\n      \"\\ud83d\\ude00\": true\n    }\n  ],\n  \"c\": [\n    []\n  ]\n}"
        );
        let style = Style {
            separators: Some((",".into(), ":".into())),
            ..Style::default()
        };
        assert_eq!(
            dumps(&value(r#"{"b": [1, 2], "a": -0.5}"#), &style).unwrap(),
            r#"{"b":[1,2],"a":-0.5}"#
        );
    }
}
