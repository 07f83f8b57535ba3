//! `oscar import` reads what OSCAR's tools write, in every layout that PyTorch may give it, and refuses the rest by
//! file, layer and next step, leaving nothing behind.

mod checkpoint;
mod pt;

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint as Toy;
use half::{bf16, f16};
use oscar_kv::calib::model_info;
use oscar_kv::eval::{EvalMethod, check_entry};
use oscar_kv::model::{Model, OpenOptions};
use oscar_kv::zoo::formats::sglang_pt::Checkpoint;
use oscar_kv::zoo::formats::{ImportOptions, import};
use oscar_kv::zoo::{self, Entry, KMoment, Method, Scope, VMoment};
use pt::{Method as Packing, Pickle, Rotations, Saved, View, rotation};
use tempfile::TempDir;

const D: usize = 16;

fn options() -> ImportOptions {
    ImportOptions {
        model_id: Some("org/model".into()),
        heads: Some(4),
        kv_heads: Some(2),
        ..ImportOptions::default()
    }
}

fn keys() -> Rotations {
    Rotations::of_layers("qqt_r_h_pbr", D, &[3, 7])
}

fn values() -> Rotations {
    Rotations::of_layers("sst_r_h_pbr", D, &[3, 7])
}

fn pair(folder: &Path, k: &Saved, v: &Saved) -> [PathBuf; 2] {
    [
        k.write(folder, "k_rotation_x.pt"),
        v.write(folder, "v_rotation_x.pt"),
    ]
}

/// The entry of two files, written and read back.
fn imported(k: &Saved, v: &Saved, options: &ImportOptions) -> Entry {
    let folder = TempDir::new().unwrap();
    let paths = pair(folder.path(), k, v);
    let imported = import(&paths, options).unwrap();
    let out = folder.path().join("entry");
    imported.entry.write(&out, false).unwrap();
    for check in zoo::verify(&out).unwrap() {
        assert!(check.passed(), "{check:?}");
    }
    Entry::open(&out).unwrap()
}

#[test]
fn one_matrix_a_layer() {
    for text_keys in [false, true] {
        let (mut k, v) = (keys(), values());
        k.text_keys = text_keys;
        let entry = imported(&k.saved(), &v.saved(), &options());
        assert_eq!(entry.metadata.scope, Scope::Layer);
        assert_eq!(entry.metadata.method, Method::Oscar);
        assert_eq!(entry.metadata.k_moment, Some(KMoment::Qq));
        assert_eq!(entry.metadata.v_moment, Some(VMoment::Vwv));
        assert_eq!(entry.metadata.model.layers, 8);
        assert_eq!(entry.layers.keys().copied().collect::<Vec<_>>(), [3, 7]);
        for ((id, matrix, eigenvalues), layer) in k.layers.iter().zip(entry.layers.values()) {
            assert_eq!(layer.k.encode.concat(), *matrix, "layer {id}");
            let mut descending = eigenvalues.clone().unwrap();
            descending.reverse();
            assert_eq!(layer.k.spectrum, Some(vec![descending]), "layer {id}");
            assert_eq!((&layer.k.clip, &layer.v.clip), (&vec![0.96], &vec![0.92]));
            assert!(layer.k.dual.is_none() && layer.k.mean.is_none() && layer.k.feedback.is_none());
        }
        for ((.., matrix, _), layer) in v.layers.iter().zip(entry.layers.values()) {
            assert_eq!(layer.v.encode.concat(), *matrix);
        }
    }
}

#[test]
fn one_matrix_a_kv_head() {
    let k = Rotations::of_heads("qqt_r_h_pbr", D, 2, &[0, 1]);
    let v = Rotations::of_heads("sst_r_h_pbr", D, 2, &[0, 1]);
    let said = ImportOptions {
        k_clip: Some(0.5),
        sink_tokens: Some(8),
        group: Some(4),
        ..options()
    };
    let entry = imported(&k.saved(), &v.saved(), &said);
    assert_eq!(entry.metadata.scope, Scope::Head);
    assert_eq!(entry.metadata.windows.sink_tokens, 8);
    assert_eq!(entry.metadata.windows.recent_tokens, 256);
    assert_eq!(entry.metadata.quantizer.group, 4);
    for ((.., matrix, eigenvalues), layer) in k.layers.iter().zip(entry.layers.values()) {
        assert_eq!(layer.k.encode.concat(), *matrix);
        assert_eq!(layer.k.clip, [0.5, 0.5]);
        let spectrum = layer.k.spectrum.as_ref().unwrap();
        let second: Vec<f32> = eigenvalues.as_ref().unwrap()[D..]
            .iter()
            .rev()
            .copied()
            .collect();
        assert_eq!(spectrum[1], second);
    }
}

/// Keys of one layer, their matrix stored as `stored` says.
fn stored(class: &str, bytes: Vec<u8>, elements: usize, view: &View) -> Saved {
    let pickle = Pickle::new()
        .begin()
        .text("objective")
        .text("qqt_r_h_pbr")
        .text("source_grouping")
        .text(if view.shape.len() == 3 {
            "per_kv_head"
        } else {
            "layer"
        })
        .text("layers")
        .begin()
        .int(0)
        .begin()
        .text("rotation")
        .tensor(class, "0", elements, view)
        .end()
        .end()
        .end()
        .raw(b".");
    Saved {
        pickle,
        storages: vec![bytes],
        byteorder: b"little",
        method: Packing::Stored,
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn other_dtypes_are_converted() {
    let matrix = rotation(D, 0.3);
    let v = Rotations::of_layers("sst_r_h_pbr", D, &[0]).saved();
    let view = View::contiguous(&[D, D]);
    let wide: Vec<u8> = matrix
        .iter()
        .flat_map(|&x| f64::from(x).to_le_bytes())
        .collect();
    let brain: Vec<u8> = matrix
        .iter()
        .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
        .collect();
    let half: Vec<u8> = matrix
        .iter()
        .flat_map(|&x| f16::from_f32(x).to_le_bytes())
        .collect();
    let rounded: Vec<f32> = matrix.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    let halved: Vec<f32> = matrix.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    for (class, bytes, expected) in [
        ("DoubleStorage", wide, &matrix),
        ("BFloat16Storage", brain, &rounded),
        ("HalfStorage", half, &halved),
    ] {
        let entry = imported(&stored(class, bytes, D * D, &view), &v, &options());
        assert_eq!(entry.layers[&0].k.encode[0], *expected, "{class}");
    }
}

#[test]
fn views_are_read_as_pytorch_reads_them() {
    let matrix = rotation(D, 0.3);
    let transposed: Vec<f32> = (0..D * D).map(|i| matrix[i % D * D + i / D]).collect();
    let v = Rotations::of_layers("sst_r_h_pbr", D, &[0]).saved();
    let square = |offset, strides: [i64; 2]| View {
        offset,
        shape: vec![D as i64; 2],
        strides: strides.to_vec(),
    };
    // A column of padding after every row, and a row before all.
    let padded: Vec<f32> = std::iter::repeat_n(9.0, D + 1)
        .chain(
            matrix
                .chunks(D)
                .flat_map(|row| row.iter().copied().chain([9.0])),
        )
        .collect();
    let d = D as i64;
    for (values, view) in [
        (&transposed, square(0, [1, d])),
        (&padded, square(d + 1, [d + 1, 1])),
    ] {
        let k = stored("FloatStorage", floats(values), values.len(), &view);
        assert_eq!(imported(&k, &v, &options()).layers[&0].k.encode[0], matrix);
    }

    // `R.expand(2, d, d)`: every KV head has the same matrix.
    let view = View {
        offset: 0,
        shape: vec![2, d, d],
        strides: vec![0, d, 1],
    };
    let k = stored("FloatStorage", floats(&matrix), D * D, &view);
    let v = Rotations::of_heads("sst_r_h_pbr", D, 2, &[0]).saved();
    let entry = imported(&k, &v, &options());
    assert_eq!(entry.layers[&0].k.encode, [matrix.clone(), matrix]);
}

#[test]
fn layers_may_share_a_matrix() {
    let matrix = rotation(D, 0.3);
    let mut pickle = Pickle::new()
        .begin()
        .text("objective")
        .text("hadamard")
        .text("layers")
        .begin();
    for id in 0..40 {
        pickle = pickle
            .int(id)
            .begin()
            .text("rotation")
            .tensor("FloatStorage", "0", D * D, &View::contiguous(&[D, D]))
            .end();
    }
    let saved = Saved {
        pickle: pickle.end().end().raw(b"."),
        storages: vec![floats(&matrix)],
        byteorder: b"little",
        method: Packing::Stored,
    };
    let entry = imported(&saved, &saved, &options());
    assert_eq!(entry.metadata.method, Method::Hadamard);
    assert_eq!(entry.layers.len(), 40);
    assert!(
        entry
            .layers
            .values()
            .all(|layer| layer.k.encode[0] == matrix && layer.v.encode[0] == matrix)
    );
}

#[test]
fn calibration_is_kept() {
    let mut k = keys();
    k.more = Pickle::default()
        .text("calibration")
        .begin()
        .text("model_path")
        .text("org/theirs")
        .text("model_revision")
        .text("abc")
        .text("tokens")
        .int(20_000)
        .text("post_rope")
        .raw(b"\x88")
        .text("loss")
        .float(f64::NAN)
        .text("shape")
        .ints(&[1, -2])
        .end();
    let said = ImportOptions {
        model_id: None,
        ..options()
    };
    let entry = imported(&k.saved(), &values().saved(), &said);
    assert_eq!(entry.metadata.model.id, "org/theirs");
    assert_eq!(entry.metadata.model.revision.as_deref(), Some("abc"));
    assert_eq!(entry.metadata.calibration.tokens, 20_000);
    let provenance = entry.metadata.imported.unwrap();
    let calibration = provenance.k.calibration.unwrap();
    assert_eq!(
        calibration,
        serde_json::json!({"model_path": "org/theirs", "model_revision": "abc", "tokens": 20_000, "post_rope": true,
            "loss": "NaN", "shape": [1, -2]})
    );
    assert_eq!(provenance.k.name, "k_rotation_x.pt");
    assert_eq!(provenance.k.format_version, Some(1));
    assert_eq!(provenance.v.objective.as_deref(), Some("sst_r_h_pbr"));
    assert!(provenance.v.calibration.is_none());
}

#[test]
fn a_model_fills_in_what_files_leave_unsaid() {
    let folder = TempDir::new().unwrap();
    let place = folder.path().join("toy");
    Toy::llama().write_folder(&place, 1);
    let model = Model::open(place.to_str().unwrap(), &OpenOptions::default()).unwrap();
    let d = model.config().head_dim;
    let k = Rotations::of_layers("qqt_r_h_pbr", d, &[0, 1]).saved();
    let v = Rotations::of_layers("sst_r_h_pbr", d, &[0, 1]).saved();
    let said = ImportOptions {
        model: Some(model_info(&model).unwrap()),
        ..ImportOptions::default()
    };
    let entry = imported(&k, &v, &said);
    assert_eq!(check_entry(&entry, &model).unwrap(), Vec::<String>::new());
    let method = EvalMethod::from_entry("imported", &entry).unwrap();
    let rows: Vec<f32> = (0..3 * d).map(|i| (i as f32).sin()).collect();
    let back = method
        .cache
        .roundtrip(1, 0, oscar_kv::eval::Side::K, &rows)
        .unwrap();
    let error: f32 = back.iter().zip(&rows).map(|(a, b)| (a - b).powi(2)).sum();
    let energy: f32 = rows.iter().map(|x| x * x).sum();
    assert!(error > 0.0 && error < 0.3 * energy, "{error} of {energy}");

    // What the model has and the files lack, or the other way round.
    let paths = pair(folder.path(), &k, &v);
    let refused = |model: oscar_kv::zoo::ModelInfo| {
        let options = ImportOptions {
            model: Some(model),
            ..ImportOptions::default()
        };
        import(&paths, &options).unwrap_err().to_string()
    };
    let info = model_info(&model).unwrap();
    let larger = zoo::ModelInfo {
        layers: 3,
        heads: vec![4; 3],
        kv_heads: vec![2; 3],
        head_dim: vec![d; 3],
        ..info.clone()
    };
    names(
        &refused(larger),
        &["k_rotation_x.pt", "no layer 2", "1 of 3", "hint"],
    );
    let other = zoo::ModelInfo {
        head_dim: vec![d * 2; 2],
        ..info
    };
    names(
        &refused(other),
        &["k_rotation_x.pt", "layer 0", "head_dim", "hint"],
    );
}

fn names(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

/// Imports through the command line; the refusal, after which nothing must lie where the entry would.
fn refused(k: &Saved, v: &Saved, more: &[&str]) -> String {
    let folder = TempDir::new().unwrap();
    let [k, v] = pair(folder.path(), k, v);
    let out = folder.path().join("entry");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args([
            "import",
            k.to_str().unwrap(),
            v.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
        ])
        .args(["--model-id", "org/model", "--heads", "4", "--kv-heads", "2"])
        .args(more)
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(output.stdout.is_empty());
    assert!(!out.exists());
    message
}

#[test]
fn bad_files_are_refused_by_file_layer_and_next_step() {
    let (k, v) = (keys().saved(), values().saved());

    let whole = k.bytes();
    let folder = TempDir::new().unwrap();
    for length in (0..whole.len()).step_by(97) {
        let cut = folder.path().join("k_rotation_x.pt");
        fs::write(&cut, &whole[..length]).unwrap();
        let error = import(&[cut], &options()).unwrap_err().to_string();
        names(&error, &["k_rotation_x.pt"]);
    }

    let compressed = Saved {
        method: Packing::Compressed,
        ..k.clone()
    };
    names(
        &refused(&compressed, &v, &[]),
        &["k_rotation_x.pt", "compressed", "hint"],
    );
    let big = Saved {
        byteorder: b"big",
        ..k.clone()
    };
    names(
        &refused(&big, &v, &[]),
        &["k_rotation_x.pt", "byte order", "hint"],
    );

    let mut damaged = k.bytes();
    let matrix = floats(&keys().layers[0].1);
    let at = damaged
        .windows(matrix.len())
        .position(|part| part == matrix)
        .unwrap();
    damaged[at + 100] ^= 1;
    let path = folder.path().join("k_rotation_x.pt");
    fs::write(&path, damaged).unwrap();
    names(
        &import(&[path], &options()).unwrap_err().to_string(),
        &["data/", "checksum", "hint"],
    );

    let square = View::contiguous(&[D, D]);
    let long = stored("LongStorage", vec![0; 8 * D * D], D * D, &square);
    names(
        &refused(&long, &v, &[]),
        &["k_rotation_x.pt: layer 0", "int64", "hint"],
    );
    let beyond = View {
        offset: 1,
        ..square.clone()
    };
    let beyond = stored("FloatStorage", floats(&rotation(D, 0.3)), D * D, &beyond);
    names(
        &refused(&beyond, &v, &[]),
        &["k_rotation_x.pt: layer 0", "past the end", "hint"],
    );
    let short = stored("FloatStorage", vec![0; 4 * D * D - 4], D * D, &square);
    names(
        &refused(&short, &v, &[]),
        &["k_rotation_x.pt: layer 0", "data/0", "hint"],
    );
    let oblong = stored(
        "FloatStorage",
        vec![0; 8 * D * D],
        2 * D * D,
        &View::contiguous(&[2 * D, D]),
    );
    names(
        &refused(&oblong, &v, &[]),
        &["k_rotation_x.pt: layer 0", "not square"],
    );

    let mut fewer = values();
    fewer.layers.pop();
    names(
        &refused(&k, &fewer.saved(), &[]),
        &["v_rotation_x.pt", "no layer 7", "hint"],
    );
    let other = Rotations::of_layers("sst_r_h_pbr", D / 2, &[3, 7]).saved();
    names(
        &refused(&k, &other, &[]),
        &["v_rotation_x.pt: layer 3", "head_dim 8", "hint"],
    );
    let heads = Rotations::of_heads("sst_r_h_pbr", D, 2, &[3, 7]).saved();
    names(
        &refused(&k, &heads, &[]),
        &["v_rotation_x.pt: layer 3", "KV head", "hint"],
    );

    let mut skewed = keys();
    skewed.layers[1].1[5] += 0.02;
    names(
        &refused(&skewed.saved(), &v, &[]),
        &["k_rotation_x.pt: layer 7", "orthogonal", "5e-3", "hint"],
    );
    let mut close = keys();
    close.layers[1].1.iter_mut().for_each(|x| *x *= 1.002);
    imported(&close.saved(), &v, &options());
    let mut infinite = values();
    infinite.layers[0].1[D + 2] = f32::INFINITY;
    names(
        &refused(&k, &infinite.saved(), &[]),
        &["v_rotation_x.pt: layer 3", "inf", "row 1, column 2"],
    );

    let mut unsaid = Rotations::of_heads("qqt_r_h_pbr", D, 2, &[3, 7]);
    unsaid.grouping = None;
    names(
        &refused(&unsaid.saved(), &heads, &[]),
        &[
            "k_rotation_x.pt: layer 3",
            "[2, 16, 16]",
            "hint",
            "source_grouping",
        ],
    );
    let stack = |root: Pickle| Saved {
        pickle: root,
        storages: vec![floats(&[rotation(D, 0.1), rotation(D, 0.2)].concat())],
        ..k.clone()
    };
    let tensor = |pickle: Pickle| {
        pickle.tensor(
            "FloatStorage",
            "0",
            2 * D * D,
            &View::contiguous(&[2, D, D]),
        )
    };
    let bare = stack(tensor(Pickle::new()).raw(b"."));
    names(
        &refused(&bare, &v, &[]),
        &[
            "k_rotation_x.pt",
            "[2, 16, 16]",
            "layers or KV heads",
            "source_grouping",
        ],
    );
    let unsaid = stack(tensor(Pickle::new().begin().text("layers")).end().raw(b"."));
    names(
        &refused(&unsaid, &v, &[]),
        &["k_rotation_x.pt", "layers or KV heads", "source_grouping"],
    );
    let said = |side: &str| {
        let pickle = Pickle::new().begin().text("objective").text(side);
        stack(
            tensor(pickle.text("source_grouping").text("layer").text("layers"))
                .end()
                .raw(b"."),
        )
    };
    let entry = imported(&said("qqt"), &said("sst"), &options());
    assert_eq!(entry.layers[&1].k.encode[0], rotation(D, 0.2));

    names(
        &refused(&k, &k, &[]),
        &["v_rotation_x.pt", "`objective`", "hint"],
    );
    names(&refused(&k, &v, &["--group", "5"]), &["--group"]);
    names(&refused(&k, &v, &["--k-clip", "1.5"]), &["--k-clip"]);
    names(
        &refused(&k, &v, &["--layers", "4"]),
        &["layer 7", "4 layers"],
    );
}

#[test]
fn pickles_that_run_programs_are_refused() {
    let attack = |pickle: Pickle| {
        let saved = Saved {
            pickle,
            storages: Vec::new(),
            byteorder: b"little",
            method: Packing::Stored,
        };
        Checkpoint::read("k.pt", &saved.bytes())
            .unwrap_err()
            .to_string()
    };
    let call = |global: &str| {
        Pickle::new()
            .raw(format!("c{global}\n(").as_bytes())
            .text("id")
            .raw(b"tR.")
    };
    for (module, name) in [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.storage", "UntypedStorage"),
        ("torch._utils", "_rebuild_parameter"),
        ("collections", "Counter"),
    ] {
        let message = attack(call(&format!("{module}\n{name}")));
        names(&message, &["k.pt", &format!("`{module}.{name}`"), "hint"]);
    }
    // BUILD, INST, OBJ, STACK_GLOBAL, NEWOBJ, EXT1, PUT, memoized garbage, and a call of what is no function.
    for opcode in [b"b", b"i", b"o", b"\x93", b"\x81", b"\x82", b"p"] {
        names(
            &attack(Pickle::new().raw(b"}").raw(opcode).raw(b".")),
            &["opcode", "hint"],
        );
    }
    names(&attack(Pickle::new().raw(b"})R.")), &["calls", "hint"]);
    names(
        &attack(Pickle(vec![0x80, 4, b'}', b'.'])),
        &["protocol 4", "hint"],
    );
    for broken in [
        &b"."[..],
        b"u.",
        b"}u.",
        b"h\x07.",
        b"(q\x00.",
        b"X\xff\xff\xff\xff",
        b"\x8a\xff",
        b"ctorch",
        b"}}s.",
        b"Q.",
    ] {
        attack(Pickle::new().raw(broken));
    }

    // A list that holds itself, and one that holds another four times, fifteen times over.
    let with = |calibration: Pickle| {
        let mut k = keys();
        k.more = Pickle::default().text("calibration").raw(&calibration.0);
        Checkpoint::read("k.pt", &k.saved().bytes())
            .unwrap_err()
            .to_string()
    };
    let endless = Pickle::default()
        .begin()
        .text("a")
        .raw(b"]q\x00h\x00a")
        .end();
    names(&with(endless), &["calibration", "too deep"]);
    let doubled = (0..15).fold(Pickle::default().raw(&[b'('; 15]).raw(b")"), |pickle, _| {
        pickle.raw(b"q\x01h\x01h\x01h\x01t")
    });
    names(
        &with(Pickle::default().begin().text("a").raw(&doubled.0).end()),
        &["calibration", "too large"],
    );
}

/// Views that overlap could ask for any amount of memory; so could layers without end.
#[test]
fn small_files_ask_for_little() {
    let d = 64;
    let mut pickle = Pickle::new().begin().text("layers").begin();
    for id in 0..64i64 {
        let view = View {
            offset: id,
            ..View::contiguous(&[d, d])
        };
        pickle = pickle
            .int(id)
            .begin()
            .text("rotation")
            .tensor("FloatStorage", "0", d * d + 64, &view)
            .end();
    }
    let overlapping = Saved {
        pickle: pickle.end().end().raw(b"."),
        storages: vec![vec![0; 4 * (d * d + 64)]],
        byteorder: b"little",
        method: Packing::Stored,
    };
    let message = Checkpoint::read("k.pt", &overlapping.bytes())
        .unwrap_err()
        .to_string();
    names(&message, &["k.pt: layer", "overlaps", "hint"]);

    let nothing = Pickle::new().raw(&vec![b'N'; 4 << 20]).raw(b".");
    let nothing = Saved {
        pickle: nothing,
        storages: Vec::new(),
        ..overlapping
    };
    let message = Checkpoint::read("k.pt", &nothing.bytes())
        .unwrap_err()
        .to_string();
    names(&message, &["k.pt", "more values"]);
}

/// Files of OSCAR's authors, where they lie beside this project.
#[test]
fn released_files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/oscar-zoo-samples");
    let folder = std::env::var_os("OSCAR_ZOO_SAMPLES").map_or(folder, PathBuf::from);
    let file = |name: &str| folder.join(format!("qwen3.5-4b_{name}.pt"));
    if !file("k_rotation_hadamard").exists() {
        println!("skipped: no released files (OSCAR_ZOO_SAMPLES names their folder)");
        return;
    }
    let said = ImportOptions {
        heads: Some(16),
        kv_heads: Some(4),
        ..options()
    };
    let v = file("v_rotation_sst_r_h_pbr");
    for (k, method, first) in [
        ("k_rotation_qqt_r_h_pbr", Some(KMoment::Qq), None),
        ("k_rotation_hadamard", None, Some(1.0 / 16.0)),
    ] {
        let made = import(&[v.clone(), file(k)], &said).unwrap();
        names(&made.warnings.join("\n"), &["24 of the model's 32 layers"]);
        let out = TempDir::new().unwrap();
        made.entry.write(out.path(), false).unwrap();
        let entry = Entry::open(out.path()).unwrap();
        assert_eq!(
            entry.layers.keys().copied().collect::<Vec<_>>(),
            [3, 7, 11, 15, 19, 23, 27, 31]
        );
        assert_eq!(entry.metadata.k_moment, method);
        assert_eq!(entry.metadata.model.head_dim, [256; 32]);
        for layer in entry.layers.values() {
            let spectrum = &layer.v.spectrum.as_ref().unwrap()[0];
            assert!(spectrum.is_sorted_by(|a, b| a >= b));
            if let Some(first) = first {
                assert!(
                    layer.k.encode[0]
                        .iter()
                        .all(|x| (x.abs() - first).abs() < 1e-7)
                );
            }
        }
    }
}
