//! Files of `torch.save`, put together byte by byte: also such as PyTorch would never write.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

/// A pickle under construction, without memo.
#[derive(Clone, Default)]
pub struct Pickle(pub Vec<u8>);

impl Pickle {
    pub fn new() -> Self {
        Self(vec![0x80, 2])
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub fn text(mut self, text: &str) -> Self {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
        self
    }

    pub fn int(mut self, n: i64) -> Self {
        self.0.extend([0x8a, 8]);
        self.0.extend(n.to_le_bytes());
        self
    }

    pub fn float(mut self, x: f64) -> Self {
        self.0.push(b'G');
        self.0.extend(x.to_be_bytes());
        self
    }

    pub fn ints(mut self, list: &[i64]) -> Self {
        self.0.push(b'(');
        for &n in list {
            self = self.int(n);
        }
        self.raw(b"t")
    }

    pub fn begin(self) -> Self {
        self.raw(b"}(")
    }

    pub fn end(self) -> Self {
        self.raw(b"u")
    }

    /// A view of the record `data/<key>`.
    pub fn tensor(self, class: &str, key: &str, elements: usize, view: &View) -> Self {
        self.raw(b"ctorch._utils\n_rebuild_tensor_v2\n((")
            .text("storage")
            .raw(format!("ctorch\n{class}\n").as_bytes())
            .text(key)
            .text("cpu")
            .int(elements as i64)
            .raw(b"tQ")
            .int(view.offset)
            .ints(&view.shape)
            .ints(&view.strides)
            .raw(b"\x89ccollections\nOrderedDict\n)RtR")
    }
}

#[derive(Clone, Default)]
pub struct View {
    pub offset: i64,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
}

impl View {
    pub fn contiguous(shape: &[usize]) -> Self {
        let strides = (0..shape.len()).map(|i| shape[i + 1..].iter().product::<usize>() as i64);
        Self {
            offset: 0,
            strides: strides.collect(),
            shape: shape.iter().map(|&n| n as i64).collect(),
        }
    }
}

/// How a record is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Stored,
    /// Said to be deflated.
    Compressed,
}

pub fn zip(records: &[(String, Vec<u8>)], method: Method) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in records {
        let start = out.len() as u32;
        let mut common = Vec::new();
        let code = if method == Method::Stored { 0u16 } else { 8 };
        for field in [20u16, 0, code, 0, 0x21] {
            common.extend(field.to_le_bytes());
        }
        common.extend(crc32fast::hash(data).to_le_bytes());
        common.extend((data.len() as u32).to_le_bytes());
        common.extend((data.len() as u32).to_le_bytes());
        common.extend((name.len() as u16).to_le_bytes());
        common.extend([0; 2]);
        out.extend([b"PK\x03\x04", &common[..], name.as_bytes(), data].concat());
        directory.extend(
            [
                b"PK\x01\x02\0\0",
                &common[..],
                &[0; 10],
                &start.to_le_bytes(),
            ]
            .concat(),
        );
        directory.extend(name.as_bytes());
    }
    let (count, at, size) = (
        records.len() as u16,
        out.len() as u32,
        directory.len() as u32,
    );
    out.extend(directory);
    out.extend([b"PK\x05\x06", &[0; 4][..]].concat());
    out.extend([count.to_le_bytes(), count.to_le_bytes()].concat());
    out.extend([size.to_le_bytes(), at.to_le_bytes()].concat());
    out.extend([0; 2]);
    out
}

/// A file as `torch.save` makes it: a pickle and its storages.
#[derive(Clone)]
pub struct Saved {
    pub pickle: Pickle,
    pub storages: Vec<Vec<u8>>,
    pub byteorder: &'static [u8],
    pub method: Method,
}

impl Saved {
    pub fn bytes(&self) -> Vec<u8> {
        let name = |rest: &str| format!("archive/{rest}");
        let mut records = vec![
            (name("data.pkl"), self.pickle.0.clone()),
            (name("byteorder"), self.byteorder.to_vec()),
        ];
        for (key, data) in self.storages.iter().enumerate() {
            records.push((name(&format!("data/{key}")), data.clone()));
        }
        records.push((name("version"), b"3\n".to_vec()));
        zip(&records, self.method)
    }

    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, self.bytes()).unwrap();
        path
    }
}

/// Rotations of one side, as `save` writes them.
#[derive(Clone)]
pub struct Rotations {
    pub objective: Option<&'static str>,
    pub grouping: Option<&'static str>,
    pub version: i64,
    pub head_dim: usize,
    /// 0: one matrix a layer, with no dimension for heads.
    pub heads: usize,
    /// Layer id, matrices, eigenvalues (ascending).
    pub layers: Vec<(usize, Vec<f32>, Option<Vec<f32>>)>,
    pub text_keys: bool,
    /// Written after `layers`: keys and values.
    pub more: Pickle,
}

impl Rotations {
    pub fn of_layers(objective: &'static str, head_dim: usize, ids: &[usize]) -> Self {
        let layers = ids.iter().map(|&id| {
            let eigenvalues = (0..head_dim).map(|i| (id * 100 + i) as f32);
            let turn = if objective.starts_with('q') { 0.3 } else { 1.1 };
            (
                id,
                rotation(head_dim, turn + id as f32),
                Some(eigenvalues.collect()),
            )
        });
        Self {
            objective: Some(objective),
            grouping: Some("layer"),
            version: 1,
            head_dim,
            heads: 0,
            layers: layers.collect(),
            text_keys: false,
            more: Pickle::default(),
        }
    }

    pub fn of_heads(objective: &'static str, head_dim: usize, heads: usize, ids: &[usize]) -> Self {
        let mut all = Self::of_layers(objective, head_dim, ids);
        (all.grouping, all.version, all.heads) = (Some("per_kv_head"), 2, heads);
        for (id, matrix, eigenvalues) in &mut all.layers {
            let turned = |head: usize| rotation(head_dim, (*id * 7 + head) as f32 + 0.5);
            *matrix = (0..heads).flat_map(turned).collect();
            *eigenvalues = Some((0..heads * head_dim).map(|i| i as f32).collect());
        }
        all
    }

    pub fn saved(&self) -> Saved {
        let mut storages = Vec::new();
        let d = self.head_dim;
        let outer: &[usize] = if self.heads > 0 { &[self.heads] } else { &[] };
        let mut tensor = |pickle: Pickle, values: &[f32], shape: &[usize]| {
            let view = View::contiguous(&[outer, shape].concat());
            let key = storages.len().to_string();
            storages.push(values.iter().flat_map(|x| x.to_le_bytes()).collect());
            pickle.tensor("FloatStorage", &key, values.len(), &view)
        };
        let mut pickle = Pickle::new()
            .begin()
            .text("format_version")
            .int(self.version);
        for (key, value) in [
            ("objective", self.objective),
            ("source_grouping", self.grouping),
        ] {
            if let Some(value) = value {
                pickle = pickle.text(key).text(value);
            }
        }
        pickle = pickle.text("layers").begin();
        for (id, matrix, eigenvalues) in &self.layers {
            pickle = if self.text_keys {
                pickle.text(&id.to_string())
            } else {
                pickle.int(*id as i64)
            };
            pickle = pickle
                .begin()
                .text("layer_id")
                .int(*id as i64)
                .text("rotation");
            pickle = tensor(pickle, matrix, &[d, d]);
            if let Some(eigenvalues) = eigenvalues {
                pickle = tensor(pickle.text("eigenvalues"), eigenvalues, &[d]);
            }
            pickle = pickle.end();
        }
        pickle = pickle.end().raw(&self.more.0).end().raw(b".");
        Saved {
            pickle,
            storages,
            byteorder: b"little",
            method: Method::Stored,
        }
    }
}

/// An orthogonal (d, d) matrix with no two equal elements in a row, row-major: plane rotations of neighbours, then of
/// halves.
pub fn rotation(d: usize, turn: f32) -> Vec<f32> {
    let mut matrix = vec![0.0f64; d * d];
    (0..d).for_each(|i| matrix[i * d + i] = 1.0);
    let mut apply = |a: usize, b: usize, angle: f64| {
        for row in 0..d {
            let (x, y) = (matrix[row * d + a], matrix[row * d + b]);
            matrix[row * d + a] = x * angle.cos() - y * angle.sin();
            matrix[row * d + b] = x * angle.sin() + y * angle.cos();
        }
    };
    for step in 1..d {
        for a in 0..d - step {
            if step == 1 || step == d / 2 {
                apply(a, a + step, f64::from(turn) + a as f64 + step as f64);
            }
        }
    }
    matrix.iter().map(|&x| x as f32).collect()
}
