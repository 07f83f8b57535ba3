//! Promise: text that goes through the cache is the text that the model would write, and comes as it is made.

mod checkpoint;
mod pool_entry;

use std::sync::Arc;

use candle_core::{IndexOp, Tensor};
use oscar_kv::kv::pool::{Pool, PoolShape, Transforms};
use oscar_kv::model::{FullAttention, Model, OpenOptions};
use oscar_kv::serve::{Engine, GenerateOptions, Resident, Sampling, Stop, generate};
use oscar_kv::zoo::Windows;

use checkpoint::{Checkpoint, VOCAB};

fn model(folder: &std::path::Path) -> Model {
    Checkpoint::llama().write_folder(folder, 1);
    Model::open(folder.to_str().unwrap(), &OpenOptions::default()).unwrap()
}

fn pool(model: &Model, int2: bool) -> Pool {
    let dims = Resident::dims(model).unwrap();
    let layers = model.config().num_hidden_layers;
    let entry = pool_entry::entry(layers, dims, dims.head_dim, 1);
    let shape = PoolShape {
        layers,
        dims,
        windows: Windows {
            sink_tokens: 64,
            recent_tokens: 64,
        },
        transforms: int2.then(|| Arc::new(Transforms::new(&entry).unwrap())),
    };
    let capacity = shape.pages_for(3, 512, 512).unwrap();
    Pool::cpu(shape, capacity).unwrap()
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i + i / 7) % VOCAB) as u32).collect()
}

/// Logits (tokens, vocab) of the model without a cache.
fn plain(model: &Model, tokens: &[u32]) -> Tensor {
    let mut hidden = model.embed(tokens).unwrap();
    for index in 0..model.config().num_hidden_layers {
        let layer = model.layer(index).unwrap();
        hidden = layer
            .forward(&hidden, &[tokens.len()], &mut FullAttention)
            .unwrap();
    }
    model.head().unwrap().logits(&hidden).unwrap()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
    let apart = (a - b).unwrap().abs().unwrap();
    apart.max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn steps_of_any_size_are_the_whole_prompt_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let resident = Resident::load(&model).unwrap();
    let all = tokens(200);
    let exact = plain(&model, &all);
    let spread = largest_difference(&exact, &exact.roll(1, 0).unwrap());
    for steps in [
        vec![200],
        vec![1; 200],
        vec![3, 90, 1, 1, 105],
        vec![64, 64, 72],
    ] {
        let mut engine = Engine::new(&resident, pool(&model, false));
        let (id, other) = (engine.pool.create(), engine.pool.create());
        let mut at = 0;
        for n in steps {
            // A second sequence beside it, of other positions.
            let hidden = engine
                .step(&[(other, &all[..1]), (id, &all[at..at + n])])
                .unwrap();
            let ours = engine.logits(&hidden.narrow(0, 1, n).unwrap()).unwrap();
            let error = largest_difference(&ours, &exact.narrow(0, at, n).unwrap());
            assert!(error < 0.02 * spread, "{error} of {spread} after {at}");
            at += n;
        }
    }
}

#[test]
fn greedy_text_in_bf16_is_the_model_s_own() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let resident = Resident::load(&model).unwrap();
    let prompt = tokens(70);
    let options = GenerateOptions {
        max_tokens: 12,
        stop: Vec::new(),
        sampling: Sampling::default(),
        chunk: 33,
    };
    let mut engine = Engine::new(&resident, pool(&model, false));
    let mut streamed = Vec::new();
    let generated = generate(&mut engine, &prompt, &options, &mut |token| {
        streamed.push(token);
        Ok(())
    })
    .unwrap();
    assert_eq!(
        (&generated.token_ids, generated.stop),
        (&streamed, Stop::MaxTokens)
    );
    assert_eq!(
        generated.cached_tokens,
        70 + 11,
        "the last token is not looked at"
    );
    assert_eq!(engine.pool.usage().used.bf16, 0);
    let mut all = prompt.clone();
    for &token in &generated.token_ids {
        let logits = plain(&model, &all).i(all.len() - 1).unwrap();
        let logits = logits.to_vec1::<f32>().unwrap();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert!(logits[token as usize] > best - 0.02, "token {}", all.len());
        all.push(token);
    }

    let stop = GenerateOptions {
        stop: vec![generated.token_ids[3]],
        ..options.clone()
    };
    let first = generated
        .token_ids
        .iter()
        .position(|t| stop.stop.contains(t))
        .unwrap();
    let stopped = generate(&mut engine, &prompt, &stop, &mut |_| Ok(())).unwrap();
    assert_eq!(stopped.token_ids, generated.token_ids[..first]);
    assert_eq!(stopped.stop, Stop::EndOfText);
    assert!(generate(&mut engine, &[], &options, &mut |_| Ok(())).is_err());
}

#[test]
fn an_int2_cache_is_smaller_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let resident = Resident::load(&model).unwrap();
    let options = GenerateOptions {
        max_tokens: 100,
        stop: Vec::new(),
        sampling: Sampling::default(),
        chunk: 100,
    };
    let bytes = [true, false].map(|int2| {
        let mut engine = Engine::new(&resident, pool(&model, int2));
        let generated = generate(&mut engine, &tokens(400), &options, &mut |_| Ok(())).unwrap();
        assert_eq!(generated.token_ids.len(), 100);
        generated.cache_bytes as f64
    });
    assert!(bytes[0] < 0.6 * bytes[1], "{bytes:?}");
}

#[test]
fn a_seed_gives_one_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let resident = Resident::load(&model).unwrap();
    let run = |sampling: Sampling| {
        let options = GenerateOptions {
            max_tokens: 30,
            stop: Vec::new(),
            sampling,
            chunk: 512,
        };
        let mut engine = Engine::new(&resident, pool(&model, true));
        generate(&mut engine, &tokens(20), &options, &mut |_| Ok(())).map(|text| text.token_ids)
    };
    let warm = Sampling {
        temperature: 1.5,
        seed: 1,
        ..Sampling::default()
    };
    let text = run(warm).unwrap();
    assert_eq!(run(warm).unwrap(), text);
    assert_ne!(run(Sampling { seed: 2, ..warm }).unwrap(), text);
    let greedy = run(Sampling::default()).unwrap();
    let one = Sampling {
        top_k: Some(1),
        ..warm
    };
    assert_eq!(
        run(one).unwrap(),
        greedy,
        "the likeliest one is all there is to choose"
    );
    let cold = Sampling {
        temperature: 1e-300,
        ..warm
    };
    assert_eq!(run(cold).unwrap(), greedy);
    for wrong in [
        Sampling {
            temperature: -1.0,
            ..warm
        },
        Sampling {
            temperature: f64::NAN,
            ..warm
        },
        Sampling {
            top_k: Some(0),
            ..warm
        },
        Sampling {
            top_p: Some(0.0),
            ..warm
        },
        Sampling {
            top_p: Some(1.1),
            ..warm
        },
    ] {
        assert!(run(wrong).is_err(), "{wrong:?}");
    }
}
