//! The pickle of a checkpoint, walked opcode by opcode.
//!
//! A pickle is a program for a stack machine that can import and call anything. This walk knows only what `torch.save`
//! writes of tensors, numbers, texts, tuples, lists and dicts (protocol 2, Python's `pickletools`), and refuses all
//! else by name. No tensor is read here: the walk sees what they are said to be.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// What a walk may take beyond the size of its file, in bytes.
const ALLOWANCE: usize = 1 << 20;
/// What an opcode costs at most: a value, doubled when the list of values grows, and its places in stack, memo, parent.
const STEP_BYTES: usize = 128;

/// Index of a value in [`Pickle::values`].
pub(super) type Id = u32;

#[derive(Debug)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage(Box<Storage<'a>>),
    Tensor(Box<Tensor<'a>>),
}

/// What a pickle may import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    RebuildTensor,
    OrderedDict,
    Storage(Dtype),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
    /// One that no rotation has, by PyTorch's name.
    Other(&'static str),
}

impl Dtype {
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Other(name) => name,
        }
    }

    fn of_storage(class: &str) -> Option<Self> {
        Some(match class {
            "FloatStorage" => Self::F32,
            "DoubleStorage" => Self::F64,
            "HalfStorage" => Self::F16,
            "BFloat16Storage" => Self::Bf16,
            "LongStorage" => Self::Other("int64"),
            "IntStorage" => Self::Other("int32"),
            "ShortStorage" => Self::Other("int16"),
            "CharStorage" => Self::Other("int8"),
            "ByteStorage" => Self::Other("uint8"),
            "BoolStorage" => Self::Other("bool"),
            "ComplexFloatStorage" => Self::Other("complex64"),
            "ComplexDoubleStorage" => Self::Other("complex128"),
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Storage<'a> {
    pub dtype: Dtype,
    /// The record `data/<key>` holds it.
    pub key: &'a str,
    pub elements: usize,
}

/// A view of a storage; sizes, strides and offset count elements.
#[derive(Clone, Debug)]
pub(super) struct Tensor<'a> {
    pub storage: Storage<'a>,
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

/// A pickle that was walked to its end.
pub(super) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    root: Id,
    /// Bytes that may still be taken by what is made of the pickle.
    budget: usize,
}

impl<'a> Pickle<'a> {
    /// `file_bytes` is the size of the whole file, which bounds what the walk may take.
    pub fn read(place: &'a str, bytes: &'a [u8], file_bytes: usize) -> Result<Self> {
        let mut walk = Walk {
            place,
            bytes,
            at: 0,
            values: Vec::new(),
            stack: Vec::new(),
            memo: BTreeMap::new(),
            budget: file_bytes + ALLOWANCE,
        };
        let root = walk.run()?;
        Ok(Self {
            values: walk.values,
            root,
            budget: walk.budget,
        })
    }

    pub fn root(&self) -> &Value<'a> {
        self.get(self.root)
    }

    pub fn get(&self, id: Id) -> &Value<'a> {
        self.values.get(id as usize).unwrap_or(&Value::None)
    }

    /// The value of a text key in a dict.
    pub fn field(&self, dict: &[(Id, Id)], name: &str) -> Option<&Value<'a>> {
        dict.iter()
            .rev()
            .find(|(key, _)| matches!(self.get(*key), Value::Text(key) if *key == name))
            .map(|(_, value)| self.get(*value))
    }

    /// Takes `bytes` of what this file may cost; `false` where that is spent.
    pub fn charge(&mut self, bytes: usize) -> bool {
        match self.budget.checked_sub(bytes) {
            Some(left) => {
                self.budget = left;
                true
            }
            None => false,
        }
    }
}

#[derive(Clone, Copy)]
enum Slot {
    Mark,
    Value(Id),
}

struct Walk<'a> {
    place: &'a str,
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value<'a>>,
    stack: Vec<Slot>,
    memo: BTreeMap<u32, Id>,
    budget: usize,
}

impl<'a> Walk<'a> {
    fn run(&mut self) -> Result<Id> {
        loop {
            self.budget = self
                .budget
                .checked_sub(STEP_BYTES)
                .ok_or_else(|| self.bad("holds more values than a file of its size needs"))?;
            let opcode = self.take(1)?[0];
            match opcode {
                b'.' => return self.pop(),
                0x80 => {
                    let protocol = self.take(1)?[0];
                    if protocol > 2 {
                        return Err(self
                            .bad(format!(
                                "is of protocol {protocol}, and `torch.save` writes 2"
                            ))
                            .hint(
                                "load it and save it again with `torch.save(…, pickle_protocol=2)`",
                            ));
                    }
                }
                b'N' => self.push(Value::None),
                0x88 => self.push(Value::Bool(true)),
                0x89 => self.push(Value::Bool(false)),
                b'K' => {
                    let n = self.take(1)?[0];
                    self.push(Value::Int(n.into()));
                }
                b'M' => {
                    let n = u16::from_le_bytes(self.array()?);
                    self.push(Value::Int(n.into()));
                }
                b'J' => {
                    let n = i32::from_le_bytes(self.array()?);
                    self.push(Value::Int(n.into()));
                }
                0x8a => self.long()?,
                b'G' => {
                    let x = f64::from_be_bytes(self.array()?);
                    self.push(Value::Float(x));
                }
                b'X' => {
                    let length = u32::from_le_bytes(self.array()?);
                    let text = self.take(length as usize)?;
                    let text = std::str::from_utf8(text)
                        .map_err(|_| self.bad("holds a text that is not UTF-8"))?;
                    self.push(Value::Text(text));
                }
                b'}' => self.push(Value::Dict(Vec::new())),
                b']' => self.push(Value::List(Vec::new())),
                b')' => self.push(Value::Tuple(Vec::new())),
                b'(' => self.stack.push(Slot::Mark),
                b't' => {
                    let items = self.above_mark()?;
                    self.push(Value::Tuple(items));
                }
                0x85..=0x87 => {
                    let mut items = vec![0; usize::from(opcode - 0x84)];
                    for item in items.iter_mut().rev() {
                        *item = self.pop()?;
                    }
                    self.push(Value::Tuple(items));
                }
                b'q' => {
                    let index = self.take(1)?[0];
                    self.remember(index.into())?;
                }
                b'r' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.remember(index)?;
                }
                b'h' => {
                    let index = self.take(1)?[0];
                    self.recall(index.into())?;
                }
                b'j' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.recall(index)?;
                }
                b'c' => self.global()?,
                b'R' => self.reduce()?,
                b'Q' => self.storage()?,
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.extend_dict(&[key, value])?;
                }
                b'u' => {
                    let items = self.above_mark()?;
                    self.extend_dict(&items)?;
                }
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(&[item])?;
                }
                b'e' => {
                    let items = self.above_mark()?;
                    self.extend_list(&items)?;
                }
                other => {
                    return Err(self
                        .bad(format!(
                            "uses opcode {other:#04x} at byte {}, which tensors and plain containers do not need",
                            self.at - 1
                        ))
                        .hint(UNSAFE));
                }
            }
        }
    }

    fn push(&mut self, value: Value<'a>) {
        self.stack.push(Slot::Value(self.values.len() as Id));
        self.values.push(value);
    }

    fn pop(&mut self) -> Result<Id> {
        match self.stack.pop() {
            Some(Slot::Value(id)) => Ok(id),
            _ => Err(self.broken()),
        }
    }

    fn top(&self) -> Result<Id> {
        match self.stack.last() {
            Some(Slot::Value(id)) => Ok(*id),
            _ => Err(self.broken()),
        }
    }

    fn above_mark(&mut self) -> Result<Vec<Id>> {
        let mark = self
            .stack
            .iter()
            .rposition(|slot| matches!(slot, Slot::Mark));
        let mark = mark.ok_or_else(|| self.broken())?;
        let items = self.stack[mark + 1..]
            .iter()
            .filter_map(|slot| match slot {
                Slot::Value(id) => Some(*id),
                Slot::Mark => None,
            })
            .collect();
        self.stack.truncate(mark);
        Ok(items)
    }

    fn remember(&mut self, index: u32) -> Result<()> {
        let id = self.top()?;
        self.memo.insert(index, id);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Result<()> {
        let id = *self.memo.get(&index).ok_or_else(|| self.broken())?;
        self.stack.push(Slot::Value(id));
        Ok(())
    }

    fn long(&mut self) -> Result<()> {
        let length = usize::from(self.take(1)?[0]);
        let digits = self.take(length)?;
        if length > 8 {
            return Err(self.bad("holds a number beyond 64 bits"));
        }
        let negative = digits.last().is_some_and(|last| last & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        wide[..length].copy_from_slice(digits);
        self.push(Value::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    fn global(&mut self) -> Result<()> {
        let (module, name) = (self.line()?, self.line()?);
        let global = match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Some(Global::RebuildTensor),
            ("collections", "OrderedDict") => Some(Global::OrderedDict),
            ("torch", class) => Dtype::of_storage(class).map(Global::Storage),
            _ => None,
        };
        let Some(global) = global else {
            return Err(self
                .bad(format!(
                    "names `{module}.{name}`, which is neither a tensor nor a plain container"
                ))
                .hint(UNSAFE));
        };
        self.push(Value::Global(global));
        Ok(())
    }

    /// Calls what was imported, where that is one of the two calls of a tensor's pickle.
    fn reduce(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Some(Value::Tuple(arguments)) = self.values.get(arguments as usize) else {
            return Err(self.broken());
        };
        let value = match self.values.get(function as usize) {
            Some(Value::Global(Global::OrderedDict)) if arguments.is_empty() => {
                Value::Dict(Vec::new())
            }
            Some(Value::Global(Global::RebuildTensor)) => self.tensor(arguments)?,
            _ => {
                return Err(self
                    .bad("calls something that makes neither a tensor nor a plain container")
                    .hint(UNSAFE));
            }
        };
        self.push(value);
        Ok(())
    }

    /// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks[, metadata])`
    fn tensor(&self, arguments: &[Id]) -> Result<Value<'a>> {
        let get = |i: usize| {
            arguments
                .get(i)
                .and_then(|id| self.values.get(*id as usize))
        };
        let (Some(Value::Storage(storage)), Some(Value::Int(offset))) = (get(0), get(1)) else {
            return Err(self.broken());
        };
        let (Some(Value::Tuple(shape)), Some(Value::Tuple(strides))) = (get(2), get(3)) else {
            return Err(self.broken());
        };
        let sizes = |ids: &[Id]| -> Option<Vec<usize>> {
            ids.iter()
                .map(|id| match self.values.get(*id as usize) {
                    Some(Value::Int(n)) => usize::try_from(*n).ok(),
                    _ => None,
                })
                .collect()
        };
        // No tensor of a rotation file has more dimensions, and a tuple may be shared by many tensors.
        if shape.len() != strides.len() || shape.len() > 4 {
            return Err(self.bad(format!("holds a tensor of {} dimensions", shape.len())));
        }
        match (usize::try_from(*offset), sizes(shape), sizes(strides)) {
            (Ok(offset), Some(shape), Some(strides)) => Ok(Value::Tensor(Box::new(Tensor {
                storage: **storage,
                offset,
                shape,
                strides,
            }))),
            _ => Err(self.bad("holds a tensor of negative sizes")),
        }
    }

    /// A persistent id is `("storage", class, key, location, elements)`.
    fn storage(&mut self) -> Result<()> {
        let id = self.pop()?;
        let Some(Value::Tuple(parts)) = self.values.get(id as usize) else {
            return Err(self.broken());
        };
        let get = |i: usize| parts.get(i).and_then(|id| self.values.get(*id as usize));
        let (Some(Value::Text("storage")), Some(Value::Global(Global::Storage(dtype)))) =
            (get(0), get(1))
        else {
            return Err(self.broken());
        };
        let (Some(Value::Text(key)), Some(Value::Int(elements))) = (get(2), get(4)) else {
            return Err(self.broken());
        };
        let elements = usize::try_from(*elements).map_err(|_| self.broken())?;
        let storage = Storage {
            dtype: *dtype,
            key,
            elements,
        };
        self.push(Value::Storage(Box::new(storage)));
        Ok(())
    }

    fn extend_dict(&mut self, items: &[Id]) -> Result<()> {
        let dict = self.top()?;
        let (pairs, rest) = items.as_chunks::<2>();
        match self.values.get_mut(dict as usize) {
            Some(Value::Dict(dict)) if rest.is_empty() => {
                dict.extend(pairs.iter().map(|[key, value]| (*key, *value)));
                Ok(())
            }
            _ => Err(self.broken()),
        }
    }

    fn extend_list(&mut self, items: &[Id]) -> Result<()> {
        let list = self.top()?;
        match self.values.get_mut(list as usize) {
            Some(Value::List(list)) => {
                list.extend(items);
                Ok(())
            }
            _ => Err(self.broken()),
        }
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let taken = self
            .at
            .checked_add(n)
            .and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| self.bad("is cut short").hint("fetch the file again"))?;
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn line(&mut self) -> Result<&'a str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        // A name in Python is no longer than this by far.
        let length = rest.iter().take(256).position(|byte| *byte == b'\n');
        let length = length.ok_or_else(|| self.broken())?;
        let line = self.take(length + 1)?;
        std::str::from_utf8(&line[..length]).map_err(|_| self.broken())
    }

    fn broken(&self) -> Error {
        self.bad(format!("makes no sense at byte {}", self.at))
            .hint("fetch the file again; only what `torch.save` wrote can be read")
    }

    fn bad(&self, problem: impl std::fmt::Display) -> Error {
        Error::invalid(format!("{}: its pickle", self.place), problem)
    }
}

const UNSAFE: &str = "a pickle can run any program when Python loads it: take rotations only from files of plain tensors";

// ---- writing -------------------------------------------------------------------------------------------------------

/// Writes a pickle of protocol 2, with no memo: the unpicklers of Python and PyTorch need none.
#[derive(Default)]
pub(super) struct Writer {
    out: Vec<u8>,
}

impl Writer {
    pub fn new() -> Self {
        Self { out: vec![0x80, 2] }
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    pub fn text(&mut self, text: &str) {
        self.out.push(b'X');
        self.out.extend((text.len() as u32).to_le_bytes());
        self.out.extend(text.as_bytes());
    }

    pub fn int(&mut self, n: usize) {
        match (u8::try_from(n), u16::try_from(n), i32::try_from(n)) {
            (Ok(n), ..) => self.out.extend([b'K', n]),
            (_, Ok(n), _) => {
                self.out.push(b'M');
                self.out.extend(n.to_le_bytes());
            }
            (.., Ok(n)) => {
                self.out.push(b'J');
                self.out.extend(n.to_le_bytes());
            }
            _ => {
                self.out.extend([0x8a, 9]);
                self.out.extend((n as u64).to_le_bytes());
                self.out.push(0);
            }
        }
    }

    pub fn bool(&mut self, value: bool) {
        self.out.push(if value { 0x88 } else { 0x89 });
    }

    /// A dict of what `fill` writes: keys and values in turn.
    pub fn dict(&mut self, fill: impl FnOnce(&mut Self)) {
        self.out.extend(b"}(");
        fill(self);
        self.out.push(b'u');
    }

    /// A contiguous f32 tensor, all of the storage `data/<key>`.
    pub fn tensor(&mut self, key: usize, shape: &[usize]) {
        self.out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        self.text("storage");
        self.out.extend(b"ctorch\nFloatStorage\n");
        self.text(&key.to_string());
        self.text("cpu");
        self.int(shape.iter().product());
        self.out.extend(b"tQK\x00(");
        for &size in shape {
            self.int(size);
        }
        self.out.extend(b"t(");
        for i in 0..shape.len() {
            self.int(shape[i + 1..].iter().product());
        }
        self.out.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
    }
}
