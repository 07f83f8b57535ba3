//! Promise: `validate` measures what a cache of few bits does to a model's answers, on any model it can run.

mod pool_entry;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use oscar_kv::calib::progress::Silent;
use oscar_kv::calib::{CollectOptions, FitOptions, Moments, collect, fit};
use oscar_kv::data::{Corpus, PackOptions, TokenizedPrompt, WindowOptions, pack, windows};
use oscar_kv::eval::{Cache, EvalMethod, EvalOptions, Report, Side, Step, check_entry, validate};
use oscar_kv::kv::attention::{Dims, plain};
use oscar_kv::model::{Attention, Model, OpenOptions};
use oscar_kv::zoo::Windows;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const LAYERS: usize = 2;
const VOCAB: usize = 128;

/// A random qwen2 checkpoint whose answers hang on attention: its logits spread, and its output outweighs the
/// embeddings. Slow rotary channels of keys carry a constant of size `key_bias`, against a spread of about 1.
fn checkpoint(folder: &Path, key_bias: f64) -> Model {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut normal = |shape: &[usize], deviation: f64| {
        let n = shape.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|_| {
                let sum: f64 = (0..12).map(|_| rng.random::<f64>()).sum();
                ((sum - 6.0) * deviation) as f32
            })
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    };
    let unit = 1.0 / (HIDDEN as f64).sqrt();
    let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let ones = Tensor::ones(HIDDEN, DType::F32, &Device::Cpu).unwrap();
    let mut tensors = HashMap::from([
        (
            "model.embed_tokens.weight".to_owned(),
            normal(&[VOCAB, HIDDEN], 0.3),
        ),
        (
            "lm_head.weight".to_owned(),
            normal(&[VOCAB, HIDDEN], 2.0 * unit),
        ),
        ("model.norm.weight".to_owned(), ones.clone()),
    ]);
    for layer in 0..LAYERS {
        let mut put = |name: &str, tensor: Tensor| {
            tensors.insert(format!("model.layers.{layer}.{name}"), tensor);
        };
        put("input_layernorm.weight", ones.clone());
        put("post_attention_layernorm.weight", ones.clone());
        put("self_attn.q_proj.weight", normal(&[q, HIDDEN], unit));
        put("self_attn.k_proj.weight", normal(&[kv, HIDDEN], unit));
        put("self_attn.v_proj.weight", normal(&[kv, HIDDEN], unit));
        put("self_attn.o_proj.weight", normal(&[HIDDEN, q], 2.0 * unit));
        put("self_attn.q_proj.bias", normal(&[q], 0.1));
        put("self_attn.v_proj.bias", normal(&[kv], 0.1));
        let slow = |channel: usize| channel % (HEAD_DIM / 2) >= HEAD_DIM / 4;
        let bias: Vec<f32> = (0..kv)
            .zip(normal(&[kv], 1.0).to_vec1::<f32>().unwrap())
            .map(|(i, x)| {
                if slow(i % HEAD_DIM) {
                    x.signum() * key_bias as f32
                } else {
                    0.0
                }
            })
            .collect();
        put(
            "self_attn.k_proj.bias",
            Tensor::new(bias, &Device::Cpu).unwrap(),
        );
        put("mlp.gate_proj.weight", normal(&[2 * HIDDEN, HIDDEN], unit));
        put("mlp.up_proj.weight", normal(&[2 * HIDDEN, HIDDEN], unit));
        put(
            "mlp.down_proj.weight",
            normal(&[HIDDEN, 2 * HIDDEN], 0.5 * unit),
        );
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": false,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    Model::open(folder.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

fn corpus(seed: u64, sequences: usize, seq_len: usize) -> Corpus {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let prompt = TokenizedPrompt {
        place: "random".to_owned(),
        token_ids: (0..sequences * seq_len)
            .map(|_| rng.random_range(0..VOCAB as u32))
            .collect(),
    };
    let options = WindowOptions {
        seq_len,
        budget_tokens: None,
        seed: 0,
        separator: None,
    };
    windows(&[prompt], &options).unwrap()
}

const OPTIONS: EvalOptions = EvalOptions {
    sink: 4,
    recent: 16,
    demote_tokens: 1,
    probe_queries: 8,
    entry_sha256: None,
};

fn run(model: &Model, corpus: &Corpus, methods: &[EvalMethod]) -> oscar_kv::Result<Report> {
    validate(model, corpus, methods, &OPTIONS, &mut |_| ())
}

/// Rounds to multiples of `step`, keys and values alike.
struct Grid {
    step: f32,
}

impl Cache for Grid {
    fn roundtrip(&self, _: usize, _: usize, _: Side, rows: &[f32]) -> oscar_kv::Result<Vec<f32>> {
        Ok(rows
            .iter()
            .map(|x| (x / self.step).round() * self.step)
            .collect())
    }

    fn bits_per_element(&self, _: usize, _: usize, _: usize) -> f64 {
        8.0
    }
}

fn grid(name: &str, step: f32) -> EvalMethod {
    EvalMethod {
        name: name.to_owned(),
        cache: Box::new(Grid { step }),
        real: None,
    }
}

/// The whole model at once, with attention by its definition: logits (tokens, vocab) of one window.
struct Twin {
    step: Option<f32>,
}

impl Attention for Twin {
    fn attend(
        &mut self,
        _: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> oscar_kv::Result<Tensor> {
        let floats = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let hat = |x: &[f32]| match self.step {
            Some(step) => x.iter().map(|x| (x / step).round() * step).collect(),
            None => x.to_vec(),
        };
        let (q_rows, k, v) = (floats(q), floats(k), floats(v));
        let dims = Dims::new(HEADS, KV_HEADS, HEAD_DIM)?;
        let (sink, recent) = (OPTIONS.sink, OPTIONS.recent);
        let o = plain::windowed(
            &q_rows,
            &k,
            &v,
            &hat(&k),
            &hat(&v),
            dims,
            prompt_lens,
            sink,
            recent,
            1,
        );
        Ok(Tensor::from_vec(o, q.shape(), &Device::Cpu)?)
    }
}

impl Twin {
    fn log_probabilities(mut self, model: &Model, token_ids: &[u32]) -> Vec<Vec<f64>> {
        let mut hidden = model.embed(token_ids).unwrap();
        for index in 0..LAYERS {
            let layer = model.layer(index).unwrap();
            hidden = layer
                .forward(&hidden, &[token_ids.len()], &mut self)
                .unwrap();
        }
        let logits = model.head().unwrap().logits(&hidden).unwrap();
        let softmax = |row: Vec<f32>| {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            row.iter().map(|&x| f64::from(x) - sum.ln()).collect()
        };
        logits
            .to_vec2::<f32>()
            .unwrap()
            .into_iter()
            .map(softmax)
            .collect()
    }
}

#[test]
fn the_report_is_what_the_definition_gives() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), 0.0);
    let corpus = corpus(1, 3, 96);
    let report = run(&model, &corpus, &[grid("coarse", 0.8), grid("fine", 0.1)]).unwrap();

    let (mut kl, mut nll, mut reference_nll, mut same, mut n) = (0.0, 0.0, 0.0, 0, 0);
    let best = |row: &[f64]| {
        (0..VOCAB)
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap()
    };
    for sequence in &corpus.sequences {
        let ids = &sequence.token_ids;
        let full = Twin { step: None }.log_probabilities(&model, ids);
        let coarse = Twin { step: Some(0.8) }.log_probabilities(&model, ids);
        for t in OPTIONS.sink + OPTIONS.recent..ids.len() - 1 {
            let (p, q) = (&full[t], &coarse[t]);
            kl += p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            nll -= q[ids[t + 1] as usize];
            reference_nll -= p[ids[t + 1] as usize];
            same += usize::from(best(p) == best(q));
            n += 1;
        }
    }
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} {b}");
    let count = n as f64;
    assert_eq!(
        (report.positions, report.tokens, report.context),
        (n, 3 * 96, 96)
    );
    close(report.methods[0].kl, kl / count);
    close(report.methods[0].perplexity, (nll / count).exp());
    close(report.reference.perplexity, (reference_nll / count).exp());
    assert!((report.methods[0].top1 - same as f64 / count).abs() < 2.0 / count);
    assert!(
        report.methods[0].kl > 0.02,
        "the model must react to its cache"
    );
    assert!(report.methods[1].kl < 0.1 * report.methods[0].kl);
    assert_eq!(report.layers.len(), LAYERS);
    for layer in &report.layers {
        let [coarse, fine] = &layer.methods[..] else {
            panic!("two methods")
        };
        assert_eq!(coarse.output_error.len(), HEADS);
        assert_eq!(fine.logit_error.iter().flatten().count(), HEADS);
        for (coarse, fine) in [
            (&coarse.output_error, &fine.output_error),
            (&coarse.logit_error, &fine.logit_error),
        ] {
            for (coarse, fine) in coarse.iter().flatten().zip(fine.iter().flatten()) {
                assert!(
                    *fine > 0.0 && fine < coarse && *coarse < 1.0,
                    "{fine} {coarse}"
                );
            }
        }
    }
}

#[test]
fn a_cache_that_loses_nothing_changes_nothing() {
    struct Exact;
    impl Cache for Exact {
        fn roundtrip(
            &self,
            _: usize,
            _: usize,
            _: Side,
            rows: &[f32],
        ) -> oscar_kv::Result<Vec<f32>> {
            Ok(rows.to_vec())
        }
        fn bits_per_element(&self, _: usize, _: usize, _: usize) -> f64 {
            16.0
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), 0.0);
    let exact = EvalMethod {
        name: "exact".to_owned(),
        cache: Box::new(Exact),
        real: None,
    };
    let report = run(&model, &corpus(2, 1, 200), &[exact]).unwrap();
    let score = &report.methods[0];
    assert!(score.kl.abs() < 1e-8, "{}", score.kl);
    assert!((score.perplexity / report.reference.perplexity - 1.0).abs() < 1e-4);
    assert!(score.top1 > 0.999);
    assert_eq!(score.kl_stderr, None, "one window has no spread");
}

#[test]
fn faults_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), 0.0);
    let message = |corpus: &Corpus, methods: &[EvalMethod]| {
        run(&model, corpus, methods).unwrap_err().to_string()
    };
    let data = corpus(3, 1, 64);
    let error = message(&data, &[grid("fine", 0.1), grid("broken", 0.0)]);
    assert!(error.contains("method `broken`"), "{error}");
    let error = message(&data, &[grid("fine", 0.1), grid("fine", 0.2)]);
    assert!(
        error.contains("`fine`") && error.contains("twice"),
        "{error}"
    );
    let error = message(&corpus(3, 4, 21), &[grid("fine", 0.1)]);
    assert!(
        error.contains("--seq-len") && error.contains("21"),
        "{error}"
    );
}

/// The released method and ours on keys whose constant offset is many times their spread.
#[test]
fn large_key_biases_are_survived() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), 30.0);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let prompts: Vec<_> = (0..24)
        .map(|i| TokenizedPrompt {
            place: format!("prompt {i}"),
            token_ids: (0..256)
                .map(|_| rng.random_range(0..VOCAB as u32))
                .collect(),
        })
        .collect();
    let packing = PackOptions {
        seq_len: 256,
        holdout_tokens: 1024,
        ..PackOptions::default()
    };
    let options = CollectOptions::new(folder.path().join("moments"), "");
    let calibration = pack(&prompts, &packing).unwrap();
    collect(&model, &calibration, &options, &mut Silent).unwrap();
    let moments = Moments::open(&options.output).unwrap();
    let windows = Windows {
        sink_tokens: OPTIONS.sink,
        recent_tokens: OPTIONS.recent,
    };
    let methods = [FitOptions::default(), FitOptions::released()].map(|options| {
        let entry = fit(&moments, &FitOptions { windows, ..options })
            .unwrap()
            .entry;
        assert!(check_entry(&entry, &model).unwrap().is_empty());
        EvalMethod::from_entry(entry.metadata.method.as_str(), &entry).unwrap()
    });
    let report = run(&model, &corpus(6, 4, 256), &methods).unwrap();
    let [ours, oscar] = [0, 1].map(|i| report.methods[i].kl);
    assert!(oscar > 0.5, "the case must be hard: {oscar}");
    assert!(ours < 0.15 * oscar, "{ours} of {oscar}");
}

/// Keys and values on pages, token by token, give what the simulation of the same rule predicts.
#[test]
fn the_real_cache_and_its_simulation_agree() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), 1.0);
    let dims = Dims::new(HEADS, KV_HEADS, HEAD_DIM).unwrap();
    let entry = pool_entry::entry(LAYERS, dims, HEAD_DIM, 3);
    let options = EvalOptions {
        sink: 64,
        recent: 128,
        demote_tokens: 64,
        ..OPTIONS
    };
    let methods = [
        EvalMethod::real("real", &entry).unwrap(),
        EvalMethod::paged("simulated", &entry).unwrap(),
    ];
    let corpus = corpus(4, 8, 470);
    let report = validate(&model, &corpus, &methods, &options, &mut |_| ()).unwrap();
    let [real, simulated] = [0, 1].map(|i| &report.methods[i]);
    assert!(
        simulated.kl > 0.01,
        "the case must be hard: {}",
        simulated.kl
    );
    assert!(
        (real.kl / simulated.kl - 1.0).abs() < 0.01,
        "{} {}",
        real.kl,
        simulated.kl
    );
    assert!((real.perplexity / simulated.perplexity - 1.0).abs() < 0.01);
    assert_eq!(
        report.layers[0].methods.len(),
        1,
        "only simulations are asked layer by layer"
    );

    let windows = EvalOptions { sink: 4, ..options };
    let mut at_once = |step: Step| panic!("{} before the refusal", step.what);
    let refused = validate(&model, &corpus, &methods, &windows, &mut at_once).unwrap_err();
    assert!(refused.to_string().contains("whole pages"), "{refused}");
}
