//! Moments of tensors where they are: on any device, against f64 sums of the same numbers on the CPU.
//!
//! The same bodies run in candle's operations on the CPU; with a GPU, there as well.

#[cfg(feature = "cuda")]
use std::fs;

use candle_core::{DType, Device, Tensor};
use oscar_kv::calib::accumulate::{self, Accumulator};
use oscar_kv::calib::moments::{Sample, Sums};
use oscar_kv::calib::tensor_sums::{self, TensorAccumulator};
use oscar_kv::kv::attention::{Dims, causal, tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What moments on a GPU may miss, of their norm.
const TOLERANCE: f64 = 1e-3;

const DIMS: Dims = Dims {
    heads: 6,
    kv_heads: 2,
    head_dim: 32,
};
const SAMPLE: [usize; 3] = [0, 400, 777];

/// Packed sequences that fill blocks and do not.
const SEQUENCES: [&[usize]; 3] = [&[300, 1, 29], &[512], &[7]];

/// bf16 rows (tokens, heads, d) with heavy-tailed scales and channels eight times as large.
fn rows(random: &mut ChaCha8Rng, tokens: usize, heads: usize) -> Tensor {
    let d = DIMS.head_dim;
    let mut values = Vec::with_capacity(tokens * heads * d);
    for _ in 0..tokens * heads {
        let scale = 0.1 / random.random_range(0.05f32..1.0);
        for channel in 0..d {
            let outlier = if channel % 13 == 5 { 8.0 } else { 1.0 };
            values.push(random.random_range(-1.0f32..1.0) * scale * outlier);
        }
    }
    Tensor::from_vec(values, (tokens, heads, d), &Device::Cpu)
        .and_then(|x| x.to_dtype(DType::BF16)?.to_dtype(DType::F32))
        .unwrap()
}

/// q, k, v of every sequence, in f32.
fn activations() -> Vec<[Tensor; 3]> {
    let mut random = ChaCha8Rng::seed_from_u64(11);
    SEQUENCES
        .map(|prompts| {
            let heads = [DIMS.heads, DIMS.kv_heads, DIMS.kv_heads];
            heads.map(|heads| rows(&mut random, prompts.iter().sum(), heads))
        })
        .to_vec()
}

fn floats(x: &Tensor) -> Vec<f32> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn on_cpu() -> (Sums, Sample) {
    let tokens = SEQUENCES.iter().copied().flatten().sum();
    let mut accumulator = Accumulator::new(DIMS, tokens, SAMPLE.to_vec());
    for (prompts, qkv) in SEQUENCES.iter().zip(activations()) {
        let [q, k, v] = qkv.each_ref().map(floats);
        let out = causal(&q, &k, &v, DIMS, prompts, true).unwrap();
        let weights = out.key_weights.unwrap();
        accumulator
            .observe(0, &q, &k, &v, &out.o, &weights)
            .unwrap();
    }
    accumulator.finish()
}

fn on(device: &Device) -> (Sums, Sample) {
    let mut accumulator = TensorAccumulator::new(DIMS, SAMPLE.to_vec());
    for (prompts, qkv) in SEQUENCES.iter().zip(activations()) {
        let [q, k, v] = qkv.map(|x| x.to_device(device).unwrap());
        let (o, weights) = tensor::causal_in_place(&q, &k, &v, prompts, true).unwrap();
        accumulator
            .observe(0, &q, &k, &v, &o, &weights.unwrap())
            .unwrap();
    }
    accumulator.finish().unwrap()
}

/// ‖found − expected‖ / ‖expected‖; NaN where a number is missing.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    apart / norm(&mut expected.iter().copied())
}

fn moments_agree(device: &Device) {
    let ((found, sample), (expected, expected_sample)) = (on(device), on_cpu());
    assert_eq!(found.tokens, expected.tokens);
    let d = DIMS.head_dim;
    for (name, found, expected, width) in [
        ("qq", &found.qq, &expected.qq, d * d),
        ("kk", &found.kk, &expected.kk, d * d),
        ("oo", &found.oo, &expected.oo, d * d),
        ("vv", &found.vv, &expected.vv, d * d),
        ("vsv", &found.vsv, &expected.vsv, d * d),
        ("vwv", &found.vwv, &expected.vwv, d * d),
        ("k_sum", &found.k_sum, &expected.k_sum, d),
        ("v_sum", &found.v_sum, &expected.v_sum, d),
        ("vsv_weight", &found.vsv_weight, &expected.vsv_weight, 1),
        ("vwv_weight", &found.vwv_weight, &expected.vwv_weight, 1),
    ] {
        for head in 0..DIMS.kv_heads {
            let of_head = head * width..(head + 1) * width;
            let apart = distance(&found[of_head.clone()], &expected[of_head]);
            println!("{name} of KV head {head}: {apart:.1e} of its norm");
            assert!(apart < TOLERANCE, "{name} of KV head {head}: {apart}");
        }
    }
    assert_eq!(sample.rows, SAMPLE.len());
    assert_eq!(
        (&sample.q, &sample.k, &sample.v),
        (&expected_sample.q, &expected_sample.k, &expected_sample.v)
    );
    for (a, b) in sample.o.iter().zip(&expected_sample.o) {
        assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{a} is not {b}");
    }
    assert_eq!(on(device).0, found, "the same bits twice");
}

fn output_metrics_agree(device: &Device) {
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let projection = rows(&mut random, 48, DIMS.heads)
        .reshape((48, DIMS.heads * DIMS.head_dim))
        .unwrap();
    let expected = accumulate::output_metric(&floats(&projection), DIMS);
    let projection = projection.to_device(device).unwrap();
    let found = tensor_sums::output_metric(&projection, DIMS).unwrap();
    assert!(distance(&found, &expected) < TOLERANCE);
}

fn broken_numbers_are_named(device: &Device) {
    let tensor = |heads: usize, bad: Option<usize>| {
        let mut values = vec![1f32; 3 * heads * DIMS.head_dim];
        if let Some(at) = bad {
            values[at] = f32::NEG_INFINITY;
        }
        Tensor::from_vec(values, (3, heads, DIMS.head_dim), device).unwrap()
    };
    let weights = Tensor::ones((3, DIMS.kv_heads), DType::F32, device).unwrap();
    let mut accumulator = TensorAccumulator::new(DIMS, Vec::new());
    let q = tensor(DIMS.heads, None);
    let k = tensor(DIMS.kv_heads, Some(5 * DIMS.head_dim + 3));
    let v = tensor(DIMS.kv_heads, None);
    let error = accumulator.observe(7, &q, &k, &v, &q, &weights);
    assert_eq!(
        error.unwrap_err().to_string(),
        "layer 7: `k` is -inf in head 1 at token 2 of a sequence"
    );
}

#[test]
fn candle_operations_on_the_cpu() {
    moments_agree(&Device::Cpu);
    output_metrics_agree(&Device::Cpu);
    broken_numbers_are_named(&Device::Cpu);
}

#[cfg(feature = "cuda")]
fn gpu() -> Option<Device> {
    if oscar_kv::cuda::count() == 0 {
        println!("skipped: no GPU");
        return None;
    }
    Some(oscar_kv::cuda::open(0).unwrap())
}

#[cfg(feature = "cuda")]
#[test]
fn candle_operations_on_a_gpu() {
    let Some(gpu) = gpu() else { return };
    moments_agree(&gpu);
    output_metrics_agree(&gpu);
    broken_numbers_are_named(&gpu);
}

/// q, k, v of every layer as a forward pass in bf16 shows them, moved to the CPU.
#[cfg(feature = "cuda")]
#[derive(Default)]
struct Seen(Vec<Vec<([Tensor; 3], Vec<usize>)>>);

#[cfg(feature = "cuda")]
impl oscar_kv::model::Attention for Seen {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        prompt_lens: &[usize],
    ) -> oscar_kv::Result<Tensor> {
        self.0.resize(self.0.len().max(layer + 1), Vec::new());
        let move_ = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F32);
        self.0[layer].push(([move_(q)?, move_(k)?, move_(v)?], prompt_lens.to_vec()));
        Ok(tensor::causal(q, k, v, prompt_lens, false)?.0)
    }
}

/// A whole collection of a random model on a GPU: its moments are those, in f64 on the CPU, of the activations that
/// the same model shows on that GPU; a second run writes the same bytes; memory stays under what was planned.
#[cfg(feature = "cuda")]
#[test]
fn a_collection_on_a_gpu() {
    use oscar_kv::calib::progress::Silent;
    use oscar_kv::calib::{CollectOptions, Moments, collect, plan};
    use oscar_kv::data::Corpus;
    use oscar_kv::model::{Model, OpenOptions, PackedSequence, synthetic};

    let Some(device) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    let json = serde_json::json!({
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 300, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096,
        "tie_word_embeddings": false,
    });
    fs::write(&config, json.to_string()).unwrap();
    let locator = folder.path().join("model");
    synthetic::write(&config, &locator, 3).unwrap();
    let options = OpenOptions {
        device,
        dtype: None,
    };
    let model = Model::open(locator.to_str().unwrap(), &options).unwrap();
    assert_eq!(model.dtype(), DType::BF16);

    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut sequence = |prompt_lens: &[usize]| PackedSequence {
        token_ids: (0..prompt_lens.iter().sum())
            .map(|_| random.random_range(0..300))
            .collect(),
        prompt_lens: prompt_lens.to_vec(),
    };
    let corpus = Corpus {
        sequences: vec![sequence(&[700, 40]), sequence(&[512])],
        holdout: vec![sequence(&[100])],
        tokens: 1252,
        prompts: 3,
        holdout_tokens: 100,
        seq_len: 740,
        seed: 0,
        token_ids_sha256: "of this test".to_owned(),
    };
    let run = |name: &str| {
        let path = folder.path().join(name);
        let options = CollectOptions::new(&path, "tokenizer");
        let collected = collect(&model, &corpus, &options, &mut Silent).unwrap();
        let planned = plan(&model, &corpus, &options).unwrap();
        println!("{:?}", collected.timings);
        let (peak, planned) = (collected.peak_device_bytes, planned.peak_device_bytes);
        println!("peak {peak:?}, planned {planned:?}");
        // The driver hands out memory in pieces of 32 MiB.
        assert!(peak.unwrap() > 0 && peak.unwrap() < planned.unwrap() + (64 << 20));
        path
    };
    let (first, second) = (run("first.safetensors"), run("second.safetensors"));
    assert!(fs::read(&first).unwrap() == fs::read(second).unwrap());

    let mut seen = Seen::default();
    for sequence in &corpus.sequences {
        let mut hidden = model.embed(&sequence.token_ids).unwrap();
        for i in 0..3 {
            let layer = model.layer(i).unwrap();
            hidden = layer
                .forward(&hidden, &sequence.prompt_lens, &mut seen)
                .unwrap();
        }
    }
    let moments = Moments::open(&first).unwrap();
    moments.verify().unwrap();
    let dims = Dims::new(8, 2, 64).unwrap();
    for (i, sequences) in seen.0.iter().enumerate() {
        let mut accumulator = Accumulator::new(dims, 1252, Vec::new());
        for (qkv, prompts) in sequences {
            let [q, k, v] = qkv.each_ref().map(floats);
            let out = causal(&q, &k, &v, dims, prompts, true).unwrap();
            let weights = out.key_weights.unwrap();
            accumulator
                .observe(i, &q, &k, &v, &out.o, &weights)
                .unwrap();
        }
        let sums = accumulator.finish().0;
        let layer = moments.layer(i).unwrap();
        for head in 0..2 {
            let of_head = head * 64 * 64..(head + 1) * 64 * 64;
            let tokens = 1252.0;
            for (name, found, sum, count) in [
                ("qq", &layer.qq, &sums.qq, 4.0 * tokens),
                ("oo", &layer.oo, &sums.oo, 4.0 * tokens),
                ("kk", &layer.kk, &sums.kk, tokens),
                ("vv", &layer.vv, &sums.vv, tokens),
                ("vsv", &layer.vsv, &sums.vsv, sums.vsv_weight[head]),
                ("vwv", &layer.vwv, &sums.vwv, sums.vwv_weight[head]),
            ] {
                let expected: Vec<f64> = sum[of_head.clone()].iter().map(|x| x / count).collect();
                let apart = distance(found[head].as_slice(), &expected);
                println!("layer {i} {name} of KV head {head}: {apart:.1e} of its norm");
                assert!(apart < TOLERANCE, "layer {i} {name}: {apart}");
            }
        }
    }
}
