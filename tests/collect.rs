//! Collecting moments: what the file holds, how a broken run goes on, and which files are refused.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use nalgebra::DMatrix;
use oscar_kv::calib::moments::{self, Moments};
use oscar_kv::calib::progress::{Progress, Silent};
use oscar_kv::calib::{CollectOptions, collect, plan};
use oscar_kv::data::Corpus;
use oscar_kv::model::{Attention, FullAttention, Model, OpenOptions, PackedSequence};
use oscar_kv::{Result, files};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const LAYERS: usize = 4;
const HIDDEN: usize = 32;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const VOCAB: usize = 64;

/// A random llama checkpoint of 4 layers; `scale` multiplies the values of the last layer's W_V.
fn checkpoint(folder: &Path, seed: u64, scale: f64) -> Model {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    });
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut tensors = HashMap::new();
    let mut add = |name: &str, shape: &[usize], center: f32, scale: f64| {
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| center + random.random_range(-0.4f32..0.4))
            .collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        tensors.insert(name.to_owned(), (tensor * scale).unwrap());
    };
    add("model.embed_tokens.weight", &[VOCAB, HIDDEN], 0.0, 2.0);
    add("model.norm.weight", &[HIDDEN], 1.0, 1.0);
    for i in 0..LAYERS {
        let mut weight = |name: &str, shape: &[usize], center: f32, scale: f64| {
            add(
                &format!("model.layers.{i}.{name}.weight"),
                shape,
                center,
                scale,
            );
        };
        weight("input_layernorm", &[HIDDEN], 1.0, 1.0);
        weight("post_attention_layernorm", &[HIDDEN], 1.0, 1.0);
        weight("self_attn.q_proj", &[HEADS * HEAD_DIM, HIDDEN], 0.0, 1.0);
        weight("self_attn.k_proj", &[KV_HEADS * HEAD_DIM, HIDDEN], 0.0, 1.0);
        let scale = if i + 1 == LAYERS { scale } else { 1.0 };
        weight(
            "self_attn.v_proj",
            &[KV_HEADS * HEAD_DIM, HIDDEN],
            0.0,
            scale,
        );
        weight("self_attn.o_proj", &[HIDDEN, HEADS * HEAD_DIM], 0.0, 1.0);
        weight("mlp.gate_proj", &[48, HIDDEN], 0.0, 1.0);
        weight("mlp.up_proj", &[48, HIDDEN], 0.0, 1.0);
        weight("mlp.down_proj", &[HIDDEN, 48], 0.0, 1.0);
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    Model::open(folder.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

/// Three packed sequences to calibrate, two held out.
fn corpus(seed: u64) -> Corpus {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut sequence = |prompt_lens: &[usize]| PackedSequence {
        token_ids: (0..prompt_lens.iter().sum())
            .map(|_| random.random_range(0..VOCAB as u32))
            .collect(),
        prompt_lens: prompt_lens.to_vec(),
    };
    let sequences = vec![sequence(&[40, 17]), sequence(&[60]), sequence(&[9, 20, 31])];
    let holdout = vec![sequence(&[33]), sequence(&[12])];
    Corpus {
        tokens: 177,
        prompts: 6,
        holdout_tokens: 45,
        seq_len: 60,
        seed,
        token_ids_sha256: files::sha256_bytes(format!("{sequences:?}{holdout:?}").as_bytes()),
        sequences,
        holdout,
    }
}

fn options(output: &Path) -> CollectOptions {
    CollectOptions {
        sample_rows: 20,
        checkpoint_interval: Duration::ZERO,
        ..CollectOptions::new(output, "tokenizer")
    }
}

fn partial(output: &Path) -> PathBuf {
    output.with_extension("safetensors.partial")
}

/// A model, its corpus, and the bytes of an unbroken run.
struct Setup {
    folder: tempfile::TempDir,
    model: Model,
    corpus: Corpus,
    bytes: Vec<u8>,
}

impl Setup {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = checkpoint(&folder.path().join("model"), 1, 1.0);
        let corpus = corpus(2);
        let output = folder.path().join("unbroken.safetensors");
        collect(&model, &corpus, &options(&output), &mut Silent).unwrap();
        assert!(!partial(&output).exists());
        let bytes = fs::read(&output).unwrap();
        Self {
            folder,
            model,
            corpus,
            bytes,
        }
    }

    fn output(&self, name: &str) -> PathBuf {
        self.folder.path().join(name).with_extension("safetensors")
    }

    fn collect(&self, output: &Path) -> Result<oscar_kv::calib::Collected> {
        collect(&self.model, &self.corpus, &options(output), &mut Silent)
    }

    /// Runs until `sequences` sequences went through some layer, as if Ctrl-C came then.
    fn interrupted(&self, output: &Path, sequences: usize) {
        let mut progress = StopAfter { sequences };
        let error =
            collect(&self.model, &self.corpus, &options(output), &mut progress).unwrap_err();
        assert!(matches!(error, oscar_kv::Error::Interrupted), "{error}");
        assert!(!output.exists());
    }
}

struct StopAfter {
    sequences: usize,
}

impl Progress for StopAfter {
    fn start(&mut self, _layers: usize, _done: usize, _layer_tokens: usize) {}

    fn tokens(&mut self, _n: usize) -> ControlFlow<()> {
        self.sequences -= 1;
        if self.sequences == 0 {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn layer_done(&mut self, _layer: usize) {}

    fn note(&mut self, _text: &str) {}
}

#[derive(Default)]
struct Notes(Vec<String>);

impl Progress for Notes {
    fn start(&mut self, _layers: usize, _done: usize, _layer_tokens: usize) {}

    fn tokens(&mut self, _n: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn layer_done(&mut self, _layer: usize) {}

    fn note(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }
}

/// All rows of every layer, in f64, as a plain forward pass shows them.
#[derive(Default)]
struct Rows {
    q: Vec<Vec<f64>>,
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    o: Vec<Vec<f64>>,
}

impl Attention for Rows {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        lens: &[usize],
    ) -> Result<Tensor> {
        let o = FullAttention.attend(layer, q, k, v, lens)?;
        for (rows, x) in [
            (&mut self.q, q),
            (&mut self.k, k),
            (&mut self.v, v),
            (&mut self.o, &o),
        ] {
            rows.resize(LAYERS, Vec::new());
            rows[layer].extend(x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?);
        }
        Ok(o)
    }
}

fn forward(model: &Model, sequences: &[PackedSequence]) -> Rows {
    let mut rows = Rows::default();
    for sequence in sequences {
        let mut hidden = model.embed(&sequence.token_ids).unwrap();
        for i in 0..LAYERS {
            let layer = model.layer(i).unwrap();
            hidden = layer
                .forward(&hidden, &sequence.prompt_lens, &mut rows)
                .unwrap();
        }
    }
    rows
}

/// Mean of xᵀx over tokens and `count` heads from `first` on.
fn gram(rows: &[f64], heads: usize, first: usize, count: usize) -> DMatrix<f64> {
    let tokens = rows.len() / (heads * HEAD_DIM);
    let mut sum = DMatrix::zeros(HEAD_DIM, HEAD_DIM);
    for t in 0..tokens {
        for head in first..first + count {
            let row = DMatrix::from_row_slice(
                1,
                HEAD_DIM,
                &rows[(t * heads + head) * HEAD_DIM..][..HEAD_DIM],
            );
            sum += row.transpose() * &row;
        }
    }
    sum / (tokens * count) as f64
}

fn assert_close(name: &str, found: &DMatrix<f64>, expected: &DMatrix<f64>, tolerance: f64) {
    let error = (found - expected).amax() / expected.amax();
    assert!(error < tolerance, "{name}: relative error {error}");
}

#[test]
fn moments_equal_those_of_a_plain_forward_pass() {
    let setup = Setup::new();
    let moments = Moments::open(&setup.output("unbroken")).unwrap();
    moments.verify().unwrap();
    let all = forward(&setup.model, &setup.corpus.sequences);
    let held_out = forward(&setup.model, &setup.corpus.holdout);
    let group = HEADS / KV_HEADS;
    for i in 0..LAYERS {
        let layer = moments.layer(i).unwrap();
        assert_eq!(layer.tokens, 177);
        for head in 0..KV_HEADS {
            assert_close(
                "qq",
                &layer.qq[head],
                &gram(&all.q[i], HEADS, head * group, group),
                1e-12,
            );
            assert_close(
                "kk",
                &layer.kk[head],
                &gram(&all.k[i], KV_HEADS, head, 1),
                1e-12,
            );
            assert_close(
                "vv",
                &layer.vv[head],
                &gram(&all.v[i], KV_HEADS, head, 1),
                1e-12,
            );
            assert_close(
                "oo",
                &layer.oo[head],
                &gram(&all.o[i], HEADS, head * group, group),
                1e-12,
            );
            let k_mean: f64 = (0..177)
                .map(|t| all.k[i][(t * KV_HEADS + head) * HEAD_DIM + 3])
                .sum::<f64>()
                / 177.0;
            assert!((layer.k_mean[head][3] - k_mean).abs() < 1e-12);
            // A weighted mean of vᵀv has the scale of vᵀv.
            for weighted in [&layer.vsv[head], &layer.vwv[head]] {
                let ratio = weighted.trace() / layer.vv[head].trace();
                assert!((0.2..5.0).contains(&ratio), "{ratio}");
            }
        }
        let projection = setup
            .model
            .layer(i)
            .unwrap()
            .output_projection()
            .to_vec2::<f32>()
            .unwrap();
        let projection =
            DMatrix::from_fn(HIDDEN, HEADS * HEAD_DIM, |r, c| f64::from(projection[r][c]));
        let of = |head: usize| projection.columns(head * HEAD_DIM, HEAD_DIM).into_owned();
        let wo = of(2).transpose() * of(2) + of(3).transpose() * of(3);
        assert_close("wo", &layer.wo[1], &wo, 1e-12);

        // Sampled rows are rows of the pass, in order, q, k, v and o of the same token.
        assert_eq!(layer.sample.rows, 20);
        let width = HEADS * HEAD_DIM;
        let mut t = 0;
        for row in 0..20 {
            let same = |t: usize, sample: &[f32], all: &[f64], n: usize| {
                (0..n).all(|c| f64::from(sample[row * n + c]).to_bits() == all[t * n + c].to_bits())
            };
            t = (t..177)
                .find(|&t| same(t, &layer.sample.q, &all.q[i], width))
                .expect("a row of the pass");
            assert!(same(t, &layer.sample.o, &all.o[i], width));
            assert!(same(t, &layer.sample.k, &all.k[i], width / group));
            assert!(same(t, &layer.sample.v, &all.v[i], width / group));
        }

        let holdout = moments.holdout(i).unwrap();
        assert_eq!(holdout.prompt_lens, [33, 12]);
        for (stored, rows) in [
            (&holdout.q, &held_out.q[i]),
            (&holdout.k, &held_out.k[i]),
            (&holdout.v, &held_out.v[i]),
        ] {
            assert_eq!(stored.len(), rows.len());
            let near = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs() <= b.abs() / 256.0;
            assert!(stored.iter().zip(rows).all(near));
        }
    }
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let setup = Setup::new();
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let output = setup.output(&format!("threads-{threads}"));
        pool.install(|| setup.collect(&output)).unwrap();
        assert!(
            fs::read(&output).unwrap() == setup.bytes,
            "{threads} threads"
        );
    }
}

#[test]
fn interrupted_runs_resume_to_the_same_bytes() {
    let setup = Setup::new();
    // Five sequences a layer: within the first layer, at its end, within the third, in the last.
    for sequences in [1, 5, 13, 19] {
        let output = setup.output(&format!("stopped-{sequences}"));
        setup.interrupted(&output, sequences);
        let collected = setup.collect(&output).unwrap();
        assert_eq!(collected.resumed_layers, (sequences - 1) / 5);
        assert!(
            fs::read(&output).unwrap() == setup.bytes,
            "stopped after {sequences}"
        );
        assert!(!partial(&output).exists());
    }
}

#[test]
fn without_kept_hidden_states_finished_layers_still_count() {
    let setup = Setup::new();
    let output = setup.output("no-hidden");
    setup.interrupted(&output, 13);
    fs::remove_file(partial(&output).join("hidden.safetensors")).unwrap();
    assert_eq!(setup.collect(&output).unwrap().resumed_layers, 2);
    assert!(fs::read(&output).unwrap() == setup.bytes);
}

#[test]
fn damaged_checkpoints_are_computed_again() {
    let setup = Setup::new();
    for (victim, layers) in [("layer-0", 1), ("layer-1", 1), ("hidden", 2)] {
        for truncate in [false, true] {
            let output = setup.output(&format!("damaged-{victim}-{truncate}"));
            setup.interrupted(&output, 13);
            let path = partial(&output).join(victim).with_extension("safetensors");
            let mut bytes = fs::read(&path).unwrap();
            let end = bytes.len() - 3;
            if truncate {
                bytes.truncate(end);
            } else {
                bytes[end] ^= 1;
            }
            fs::write(&path, bytes).unwrap();
            let mut notes = Notes::default();
            let collected =
                collect(&setup.model, &setup.corpus, &options(&output), &mut notes).unwrap();
            assert_eq!(collected.resumed_layers, layers);
            assert_eq!(notes.0.len(), 2 - layers, "{:?}", notes.0);
            assert!(fs::read(&output).unwrap() == setup.bytes, "{victim}");
        }
    }
}

#[test]
fn changed_inputs_are_refused_by_name_until_fresh() {
    let setup = Setup::new();
    let output = setup.output("changed");
    setup.interrupted(&output, 13);
    let mut changed = setup.corpus.clone();
    changed.seed = 99;
    let refused = |corpus: &Corpus| {
        let error = collect(&setup.model, corpus, &options(&output), &mut Silent).unwrap_err();
        error.to_string()
    };
    let error = refused(&changed);
    assert!(error.contains("`calibration.seed` 2 → 99"), "{error}");
    assert!(error.contains("--fresh"), "{error}");
    // The refused run left the work alone.
    assert_eq!(setup.collect(&output).unwrap().resumed_layers, 2);

    // The same holds for a finished output.
    let error = refused(&changed);
    assert!(error.contains("`calibration.seed` 2 → 99"), "{error}");
    assert!(!partial(&output).exists());
    assert_eq!(setup.collect(&output).unwrap().resumed_layers, LAYERS);
    let other = checkpoint(&setup.folder.path().join("other"), 7, 1.0);
    let error = collect(&other, &setup.corpus, &options(&output), &mut Silent)
        .unwrap_err()
        .to_string();
    assert!(error.contains("`model.weights_fingerprint`"), "{error}");
    assert!(fs::read(&output).unwrap() == setup.bytes);

    let fresh = CollectOptions {
        fresh: true,
        ..options(&output)
    };
    let collected = collect(&setup.model, &changed, &fresh, &mut Silent).unwrap();
    assert_eq!(collected.resumed_layers, 0);
    assert_eq!(Moments::open(&output).unwrap().meta().calibration.seed, 99);
}

#[test]
fn other_files_are_never_overwritten() {
    let setup = Setup::new();
    let output = setup.output("model/model");
    let before = fs::read(&output).unwrap();
    let fresh = CollectOptions {
        fresh: true,
        ..options(&output)
    };
    let error = collect(&setup.model, &setup.corpus, &fresh, &mut Silent)
        .unwrap_err()
        .to_string();
    assert!(error.contains("not a moments file"), "{error}");
    assert!(fs::read(&output).unwrap() == before);
    assert!(!partial(&output).exists());
    // A folder is no output, and nothing lies below a file.
    setup
        .collect(&setup.folder.path().join("model"))
        .unwrap_err();
    let error = setup
        .collect(&output.join("moments.safetensors"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn two_processes_do_not_share_a_folder() {
    let setup = Setup::new();
    let output = setup.output("locked");
    fs::create_dir(partial(&output)).unwrap();
    let lock = File::create(partial(&output).join("lock")).unwrap();
    lock.try_lock().unwrap();
    let error = setup.collect(&output).unwrap_err().to_string();
    assert!(error.contains("another process"), "{error}");
    drop(lock);
    setup.collect(&output).unwrap();
}

#[test]
fn overflowing_activations_name_the_layer() {
    let folder = tempfile::tempdir().unwrap();
    // Finite weights, infinite values.
    let model = checkpoint(folder.path(), 1, 2e38);
    let output = folder.path().join("moments.safetensors");
    let error = collect(&model, &corpus(2), &options(&output), &mut Silent)
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("layer 3: `v` is "), "{error}");
    assert!(!output.exists());
}

#[test]
fn shards_merge_to_the_whole() {
    let setup = Setup::new();
    let shard = |name: &str, sequences: &[PackedSequence], holdout: &[PackedSequence]| {
        let tokens =
            |sequences: &[PackedSequence]| sequences.iter().map(|s| s.token_ids.len()).sum();
        let corpus = Corpus {
            tokens: tokens(sequences),
            holdout_tokens: tokens(holdout),
            prompts: sequences.iter().map(|s| s.prompt_lens.len()).sum(),
            sequences: sequences.to_vec(),
            holdout: holdout.to_vec(),
            token_ids_sha256: name.to_owned(),
            ..setup.corpus.clone()
        };
        let output = setup.output(name);
        collect(&setup.model, &corpus, &options(&output), &mut Silent).unwrap();
        Moments::open(&output).unwrap()
    };
    let (sequences, holdout) = (&setup.corpus.sequences, &setup.corpus.holdout);
    let shards = [
        shard("a", &sequences[..1], &holdout[..1]),
        shard("b", &sequences[1..], &holdout[1..]),
    ];
    let output = setup.output("merged");
    moments::merge(&shards, &output).unwrap();
    let (merged, whole) = (
        Moments::open(&output).unwrap(),
        Moments::open(&setup.output("unbroken")).unwrap(),
    );
    merged.verify().unwrap();
    assert_eq!(merged.meta().calibration.tokens, 177);
    assert_eq!(merged.meta().calibration.prompts, 6);
    assert_eq!(merged.meta().sample_rows, 40);
    for i in 0..LAYERS {
        let (a, b) = (merged.layer(i).unwrap(), whole.layer(i).unwrap());
        for head in 0..KV_HEADS {
            for (name, a, b) in [
                ("qq", &a.qq, &b.qq),
                ("kk", &a.kk, &b.kk),
                ("oo", &a.oo, &b.oo),
                ("vv", &a.vv, &b.vv),
                ("vsv", &a.vsv, &b.vsv),
                ("wo", &a.wo, &b.wo),
            ] {
                assert_close(name, &a[head], &b[head], 1e-12);
            }
        }
        let (a, b) = (merged.holdout(i).unwrap(), whole.holdout(i).unwrap());
        assert_eq!((a.prompt_lens, a.q, a.v), (b.prompt_lens, b.q, b.v));
    }

    let again = [
        Moments::open(&setup.output("a")).unwrap(),
        Moments::open(&setup.output("a")).unwrap(),
    ];
    let error = moments::merge(&again, &output).unwrap_err().to_string();
    assert!(error.contains("count twice"), "{error}");
    let other = checkpoint(&setup.folder.path().join("other"), 7, 1.0);
    let path = setup.output("other-model");
    collect(&other, &corpus(5), &options(&path), &mut Silent).unwrap();
    let mixed = [
        Moments::open(&setup.output("a")).unwrap(),
        Moments::open(&path).unwrap(),
    ];
    let error = moments::merge(&mixed, &output).unwrap_err().to_string();
    assert!(error.contains("different models"), "{error}");
}

#[test]
fn plan_foretells_the_file() {
    let setup = Setup::new();
    let plan = plan(
        &setup.model,
        &setup.corpus,
        &options(&setup.output("unused")),
    )
    .unwrap();
    let found = setup.bytes.len() as f64;
    // All but the header.
    assert!(
        (0.8..1.0).contains(&(plan.moments_bytes as f64 / found)),
        "{} of {found}",
        plan.moments_bytes
    );
    assert_eq!(plan.hidden_bytes, (222 * HIDDEN * 4) as u64);
    let text = plan.to_string();
    assert!(
        text.contains("4 layers, hidden size 32, 4 heads, 2 KV heads, head_dim 8"),
        "{text}"
    );
    assert!(!setup.output("unused").exists() && !partial(&setup.output("unused")).exists());
}

/// The header of a safetensors file as JSON, and what follows it.
fn split(bytes: &[u8]) -> (serde_json::Value, Vec<u8>) {
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (
        serde_json::from_slice(&bytes[8..8 + n]).unwrap(),
        bytes[8 + n..].to_vec(),
    )
}

fn join(header: &serde_json::Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        data,
    ]
    .concat()
}

fn edit_meta(header: &mut serde_json::Value, edit: impl FnOnce(&mut serde_json::Value)) {
    let key = &mut header["__metadata__"][moments::KEY];
    let mut meta: serde_json::Value = serde_json::from_str(key.as_str().unwrap()).unwrap();
    edit(&mut meta);
    *key = meta.to_string().into();
}

#[test]
fn hostile_and_damaged_files_are_refused() {
    let setup = Setup::new();
    let path = setup.output("hostile");
    let open = |bytes: &[u8]| -> String {
        fs::write(&path, bytes).unwrap();
        let error = match Moments::open(&path) {
            Ok(moments) => moments.verify().expect_err("a fault must be found"),
            Err(error) => error,
        };
        let text = error.to_string();
        assert!(text.contains("hostile.safetensors"), "{text}");
        text
    };
    let bytes = &setup.bytes;
    let expect = |bytes: &[u8], part: &str| {
        let text = open(bytes);
        assert!(text.contains(part), "{text} lacks {part}");
    };
    let with_header = |edit: &dyn Fn(&mut serde_json::Value)| {
        let (mut header, data) = split(bytes);
        edit(&mut header);
        join(&header, &data)
    };

    for keep in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        open(&bytes[..keep]);
    }
    let mut huge = bytes.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    open(&huge);
    huge[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    open(&huge);
    // Offsets that overlap, run backwards or leave the file.
    for offsets in [[0, 4096], [4096, 0], [0, usize::MAX]] {
        open(&with_header(&|header| {
            header["layers.1.qq"]["data_offsets"] = serde_json::json!(offsets);
        }));
    }
    expect(
        &with_header(&|header| header["layers.1.qq"]["shape"] = serde_json::json!([2, 4, 16])),
        "`layers.1.qq`",
    );
    expect(
        &with_header(&|header| {
            header["layers.1.qq"]["shape"] = serde_json::json!([usize::MAX, usize::MAX, 2]);
        }),
        "safetensors",
    );
    expect(
        &with_header(&|header| header["layers.1.qq"]["dtype"] = "I64".into()),
        "`layers.1.qq`: is I64, not F64",
    );
    expect(
        &with_header(&|header| {
            let tensor = header
                .as_object_mut()
                .unwrap()
                .remove("layers.1.qq")
                .unwrap();
            header["layers.1.xx"] = tensor;
        }),
        "`layers.1.qq`: is missing",
    );
    expect(
        &with_header(&|header| edit_meta(header, |meta| meta["schema"] = 2.into())),
        "newer",
    );
    expect(
        &with_header(&|header| {
            edit_meta(header, |meta| meta["model"]["layers"] = 1_000_000.into());
        }),
        "lists 4 layers",
    );
    for (field, value) in [
        ("heads", usize::MAX),
        ("kv_heads", 0),
        ("kv_heads", 3),
        ("head_dim", 1 << 40),
    ] {
        open(&with_header(&|header| {
            edit_meta(header, |meta| {
                meta["model"][field] = serde_json::json!([value, value, value, value]);
            });
        }));
    }
    open(&with_header(&|header| {
        edit_meta(header, |meta| meta["calibration"]["tokens"] = 0.into());
    }));
    open(&with_header(&|header| {
        edit_meta(header, |meta| meta["holdout_tokens"] = 44.into());
    }));
    expect(
        &with_header(&|header| header["__metadata__"][moments::KEY] = "{".into()),
        moments::KEY,
    );
    expect(
        &with_header(&|header| header["__metadata__"] = serde_json::json!({})),
        moments::KEY,
    );

    // A flipped bit, and a value that is not a number.
    let (header, mut data) = split(bytes);
    data[1000] ^= 1;
    expect(&join(&header, &data), "content hash");
    data[1000] ^= 1;
    let at = header["layers.2.kk"]["data_offsets"][0].as_u64().unwrap() as usize;
    data[at..at + 8].copy_from_slice(&f64::NAN.to_le_bytes());
    fs::write(&path, join(&header, &data)).unwrap();
    let error = Moments::open(&path)
        .unwrap()
        .layer(2)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`layers.2.kk`: has a non-finite value at element 0"),
        "{error}"
    );
    let error = Moments::open(&path)
        .unwrap()
        .layer(4)
        .unwrap_err()
        .to_string();
    assert!(error.contains("has no layer 4"), "{error}");
}

/// Canonical JSON: sorted keys, no spaces, one metadata key.
#[test]
fn metadata_is_canonical() {
    let setup = Setup::new();
    let (header, _) = split(&setup.bytes);
    let keys = header["__metadata__"].as_object().unwrap();
    assert_eq!(keys.len(), 1);
    let json = keys[moments::KEY].as_str().unwrap();
    assert!(
        json.starts_with(r#"{"calibration":{"device":"cpu","dtype":"f32","prompts":6,"seed":2,"#),
        "{json}"
    );
    let top = [
        "calibration",
        "content_sha256",
        "holdout_tokens",
        "model",
        "sample_rows",
        "schema",
        "tool",
    ];
    let at: Vec<_> = top
        .iter()
        .map(|key| json.find(&format!("\"{key}\":")).unwrap())
        .collect();
    assert!(at.is_sorted());
}
