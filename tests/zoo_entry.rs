//! A zoo entry reads back as it was written, in the same bytes every time; a damaged one is refused, and the refusal
//! says where.

mod metadata;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use metadata::metadata;
use oscar_kv::zoo::{self, Entry, Layer, SCHEMA, Side};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

const D: usize = 4;
const KV_HEADS: usize = 2;

fn matrix(diagonal: [f32; D], above: f32) -> Vec<f32> {
    (0..D * D)
        .map(|i| match (i / D).cmp(&(i % D)) {
            std::cmp::Ordering::Equal => diagonal[i / D],
            std::cmp::Ordering::Less => above,
            std::cmp::Ordering::Greater => 0.0,
        })
        .collect()
}

/// Layers 0 and 10 of twelve: every optional tensor in one, none in the other.
fn entry() -> Entry {
    let identity = || matrix([1.0; D], 0.0);
    let plain = Side {
        encode: vec![identity(); KV_HEADS],
        clip: vec![1.0, 0.5],
        ..Side::default()
    };
    let full = Side {
        encode: vec![matrix([2.0, 4.0, 1.0, 8.0], 0.0); KV_HEADS],
        dual: Some(vec![matrix([0.5, 0.25, 1.0, 0.125], 0.0); KV_HEADS]),
        mean: Some(vec![vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0, 7.0, 8.0]]),
        clip: vec![0.96, 0.92],
        feedback: Some(vec![matrix([0.0; D], 0.25); KV_HEADS]),
        spectrum: Some(vec![vec![4.0, 3.0, 2.0, 1.0]; KV_HEADS]),
    };
    let layer = |k: &Side, v: &Side| Layer {
        head_dim: D,
        k: k.clone(),
        v: v.clone(),
    };
    Entry {
        metadata: metadata(12, 4, KV_HEADS, D),
        layers: BTreeMap::from([(0, layer(&plain, &plain)), (10, layer(&full, &full))]),
    }
}

fn written() -> (tempfile::TempDir, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    entry().write(folder.path(), false).unwrap();
    let bytes = fs::read(folder.path().join(zoo::FILE)).unwrap();
    (folder, bytes)
}

fn refusal(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(zoo::FILE);
    fs::write(&file, bytes).unwrap();
    let error = Entry::open(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains(file.to_str().unwrap()),
        "{error} does not name the file"
    );
    error
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The file with its tensors and metadata changed, but well formed.
fn edited(edit: impl FnOnce(&mut Tensors, &mut serde_json::Value)) -> Vec<u8> {
    let (_folder, bytes) = written();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut json = serde_json::from_str(&header.metadata().as_ref().unwrap()["oscar"]).unwrap();
    let mut tensors: Tensors = file
        .tensors()
        .into_iter()
        .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect();
    edit(&mut tensors, &mut json);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let header = HashMap::from([("oscar".to_owned(), json.to_string())]);
    safetensors::serialize(views, Some(header)).unwrap()
}

fn with_value(name: &str, at: usize, value: f32) -> Vec<u8> {
    edited(|tensors, _| {
        tensors.get_mut(name).unwrap().2[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
    })
}

#[test]
fn entries_are_as_far_apart_as_their_worst_number() {
    let (a, mut b) = (entry(), entry());
    assert_eq!(a.distance(&b), Some(0.0));
    // The largest there is 8.
    b.layers.get_mut(&10).unwrap().v.encode[1][0] += 0.5;
    assert_eq!(a.distance(&b), Some(0.0625));
    b.layers.remove(&0);
    assert_eq!(a.distance(&b), None);
}

#[test]
fn reads_back_what_was_written() {
    let (folder, _) = written();
    let by_folder = Entry::open(folder.path()).unwrap();
    let by_file = Entry::open(&folder.path().join(zoo::FILE)).unwrap();
    assert_eq!(by_folder, by_file);
    let hash = &by_folder.metadata.content_sha256;
    assert_eq!(hash.len(), 64);
    let mut expected = entry();
    expected.metadata.content_sha256.clone_from(hash);
    assert_eq!(by_folder, expected);
    assert!(
        zoo::verify(folder.path())
            .unwrap()
            .iter()
            .all(zoo::Check::passed)
    );
}

#[test]
fn writes_the_same_canonical_bytes_every_time() {
    let (_folder, bytes) = written();
    assert_eq!(bytes, written().1);
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let map = header.metadata().as_ref().unwrap();
    assert_eq!(map.len(), 1);
    let json = &map["oscar"];
    assert!(
        json.starts_with(r#"{"calibration":{"device":"cpu","dtype":"f32","prompts":7,"#),
        "{json}"
    );
    assert!(!json.contains(": ") && !json.contains(", "));
}

#[test]
fn heads_find_their_transform_in_either_scope() {
    let layer = &entry().layers[&10];
    let head = layer.k.for_head(1).unwrap();
    assert_eq!((head.clip, head.mean.unwrap()[0]), (0.92, 5.0));
    assert!(layer.k.for_head(2).is_none());
    let shared = Side {
        encode: vec![matrix([1.0; D], 0.0)],
        clip: vec![0.9],
        mean: layer.k.mean.clone(),
        ..Side::default()
    };
    let head = shared.for_head(1).unwrap();
    assert_eq!((head.clip, head.mean.unwrap()[0]), (0.9, 5.0));
}

#[test]
fn a_changed_entry_drops_what_was_derived_from_the_old_one() {
    let (folder, _) = written();
    let derived = ["metrics.json", "report.html", "README.md"].map(|name| folder.path().join(name));
    for path in &derived {
        fs::write(path, "old").unwrap();
    }
    entry().write(folder.path(), false).unwrap();
    assert!(
        derived.iter().all(|path| path.exists()),
        "same bytes: still true"
    );
    let mut changed = entry();
    changed.layers.get_mut(&0).unwrap().k.clip[0] = 0.9;
    changed.write(folder.path(), false).unwrap();
    assert!(derived.iter().all(|path| !path.exists()));
}

#[test]
fn an_entry_of_another_model_is_replaced_only_by_force() {
    let (folder, bytes) = written();
    let file = folder.path().join(zoo::FILE);
    let mut other = entry();
    other.metadata.model.id = "org/other".into();
    let error = other.write(folder.path(), false).unwrap_err().to_string();
    assert!(
        error.contains("`org/model`") && error.contains("--force"),
        "{error}"
    );
    let mut retrained = entry();
    retrained.metadata.model.weights_fingerprint = "w2".into();
    let error = retrained
        .write(folder.path(), false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("other weights"), "{error}");
    assert_eq!(fs::read(&file).unwrap(), bytes);
    other.write(folder.path(), true).unwrap();
    assert_eq!(Entry::open(&file).unwrap().metadata.model.id, "org/other");

    fs::write(&file, "no entry").unwrap();
    let error = other.write(folder.path(), false).unwrap_err().to_string();
    assert!(error.contains("no readable entry"), "{error}");
    other.write(folder.path(), true).unwrap();
}

#[test]
fn a_read_only_folder_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    fs::write(&blocked, "in the way").unwrap();
    let error = entry()
        .write(&blocked.join("tag"), false)
        .unwrap_err()
        .to_string();
    assert!(error.contains(blocked.to_str().unwrap()), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn an_entry_that_would_not_read_back_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut broken = entry();
    broken.layers.get_mut(&10).unwrap().k.encode[1][0] = f32::NAN;
    let error = broken.write(folder.path(), false).unwrap_err().to_string();
    assert!(
        error.contains("layer 10 k") && error.contains("NaN"),
        "{error}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn damage_is_named_by_layer_side_and_tensor() {
    let cases: Vec<(Vec<u8>, &[&str])> = vec![
        (
            edited(|_, json| json["schema"] = (SCHEMA + 1).into()),
            &["schema 2 is newer"],
        ),
        (
            edited(|_, json| json["method"] = "magic".into()),
            &["`oscar`", "magic"],
        ),
        (
            edited(|tensors, _| {
                let tensor = tensors["layers.0.k.clip"].clone();
                tensors.insert("layers.0.k.clap".into(), tensor);
            }),
            &["`layers.0.k.clap`", "unknown name"],
        ),
        (
            edited(|tensors, _| {
                let tensor = tensors["layers.10.v.decode"].clone();
                tensors.insert("layers.10.v.query".into(), tensor);
            }),
            &["`layers.10.v.query`", "unknown name"],
        ),
        (
            edited(|tensors, _| {
                let tensor = tensors["layers.0.k.clip"].clone();
                tensors.insert("layers.12.k.clip".into(), tensor);
            }),
            &["`layers.12.k.clip`", "12 layers"],
        ),
        (
            edited(|tensors, _| tensors.get_mut("layers.10.k.encode").unwrap().1 = vec![1, 8, 4]),
            &["`layers.10.k.encode`", "shape [1, 8, 4], not [2, 4, 4]"],
        ),
        (
            edited(|tensors, _| {
                let clip = tensors.get_mut("layers.0.v.clip").unwrap();
                *clip = (Dtype::F16, vec![2], vec![0; 4]);
            }),
            &["`layers.0.v.clip`", "F16"],
        ),
        (
            edited(|tensors, _| drop(tensors.remove("layers.10.v.encode"))),
            &["layer 10 v", "`layers.10.v.encode`"],
        ),
        (
            edited(|tensors, _| tensors.retain(|name, _| !name.contains(".v."))),
            &["layer 0 v", "`layers.0.v.encode`"],
        ),
        (edited(|tensors, _| tensors.clear()), &["no layer"]),
        (
            with_value("layers.10.k.query", 17, f32::INFINITY),
            &[
                "layer 10 k",
                "`query` of head 1 holds inf at row 0, column 1",
            ],
        ),
        (
            with_value("layers.10.k.query", 17, 0.01),
            &["layer 10 k", "encode·queryᵀ of head 1"],
        ),
        (
            with_value("layers.10.v.decode", 0, 0.6),
            &["layer 10 v", "encode·decode of head 0"],
        ),
        (
            with_value("layers.0.v.encode", 0, 1.1),
            &["layer 0 v", "orthogonal", "head 0"],
        ),
        (
            with_value("layers.10.k.feedback", 4, 0.1),
            &["layer 10 k", "`feedback` of head 0", "row 1, column 0"],
        ),
        (
            with_value("layers.0.k.clip", 1, 0.0),
            &["layer 0 k", "`clip` of head 1 is 0"],
        ),
        (
            with_value("layers.0.k.clip", 0, 1.5),
            &["layer 0 k", "`clip` of head 0 is 1.5"],
        ),
        (with_value("layers.10.v.mean", 0, 1.5), &["hash"]),
        (
            edited(|_, json| json["model"]["kv_heads"][3] = 3.into()),
            &["layer 3 has 4 heads", "3 KV heads"],
        ),
        (
            edited(|_, json| json["quantizer"]["group"] = 3.into()),
            &["`quantizer.group` 3"],
        ),
    ];
    for (bytes, expected) in cases {
        let error = refusal(&bytes);
        for part in expected {
            assert!(error.contains(part), "{error}\n  lacks {part}");
        }
    }
}

#[test]
fn verify_lists_every_problem() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = edited(|tensors, _| {
        for name in ["layers.0.k.clip", "layers.10.v.clip"] {
            tensors.get_mut(name).unwrap().2[..4].copy_from_slice(&2.0f32.to_le_bytes());
        }
    });
    fs::write(folder.path().join(zoo::FILE), bytes).unwrap();
    let checks = zoo::verify(folder.path()).unwrap();
    let problems: Vec<_> = checks.iter().flat_map(|check| &check.problems).collect();
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems[0].contains("layer 0 k") && problems[1].contains("layer 10 v"));
    assert!(problems[2].contains("hash"));
}

#[test]
fn unknown_metadata_of_the_same_schema_is_tolerated() {
    let bytes = edited(|_, json| json["model"]["nickname"] = "m".into());
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(zoo::FILE), bytes).unwrap();
    assert!(Entry::open(folder.path()).is_ok());
}

fn raw(length: u64, header: &str, data: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn hostile_headers_are_refused() {
    let file = |header: &str, data: &[u8]| raw(header.len() as u64, header, data);
    let (_folder, good) = written();
    let cases = [
        vec![],
        b"short".to_vec(),
        raw(u64::MAX, "{}", &[]),
        raw(99_999_999, "{}", &[]),
        file("{", &[]),
        file("[]", &[]),
        file("{}", &[]),
        raw(2, "\u{fffd}", &[]),
        good[..good.len() - 1].to_vec(),
        [&good[..], &[0]].concat(),
        // Overlapping.
        file(
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
            &[0; 12],
        ),
        // Larger than memory.
        file(
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,18446744073709551615]}}"#,
            &[0; 4],
        ),
        file(
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}"#,
            &[0; 4],
        ),
        // Backwards.
        file(
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            &[0; 4],
        ),
        // Nested deeper than a stack.
        file(&"[".repeat(200_000), &[]),
        file(&format!(r#"{{"a":{}"#, "[".repeat(200_000)), &[]),
    ];
    for bytes in cases {
        refusal(&bytes);
    }
    let twice = r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    assert!(refusal(&file(twice, &[])).contains("`a` twice"));
}

#[test]
fn a_missing_file_is_named() {
    let error = Entry::open(Path::new("/nonexistent/zoo"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("/nonexistent/zoo"), "{error}");
}

proptest! {
    /// No flipped byte, in header or data, passes for the entry, and none makes a panic.
    #[test]
    fn any_flipped_byte_is_noticed(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let (_folder, mut bytes) = written();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(zoo::FILE), &bytes).unwrap();
        if let Ok(read) = Entry::open(folder.path()) {
            // Only free text of the metadata (a model's name, say) can change unnoticed.
            prop_assert_eq!(read.layers, entry().layers);
        }
    }
}
