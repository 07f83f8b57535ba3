//! Moments become entries: the released method exactly, ours far better where keys carry large offsets, the same bytes
//! on any number of threads, and something sane where there is nothing to fit.

mod metadata;

use metadata::metadata;
use nalgebra::DMatrix;
use oscar_kv::calib::accumulate::{Accumulator, HoldoutRows, output_metric};
use oscar_kv::calib::moments::{self, LayerRecord, Meta};
use oscar_kv::calib::{FitOptions, Fitted, Moments, fit};
use oscar_kv::kv::attention::{Dims, causal};
use oscar_kv::quant::Codec;
use oscar_kv::rotation::search::{Objective, OutputError};
use oscar_kv::rotation::{HeldOut, Transform, oscar};
use oscar_kv::zoo::{self, Entry, Metadata, Method, Rounding, Scope, SideName, VMoment};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Tokens that a layer's moments are of.
const TOKENS: usize = 1024;

/// A source of one layer's q, k, v.
#[derive(Clone)]
struct Toy {
    dims: Dims,
    /// Size of the constant that every key of a head carries, over the spread of keys.
    key_bias: f32,
    /// Channels of keys, queries and values that are always 0.
    dead_channels: usize,
    /// A KV head whose keys, queries and values are all 0.
    dead_head: Option<usize>,
    layers: usize,
    holdout: Vec<usize>,
}

impl Toy {
    fn new(head_dim: usize) -> Self {
        Self {
            dims: Dims::new(4, 2, head_dim).unwrap(),
            key_bias: 0.0,
            dead_channels: 0,
            dead_head: None,
            layers: 1,
            holdout: vec![384, 256],
        }
    }

    /// Rows (tokens, heads, d) with channels of very different size, mixed by a matrix of the head's own.
    fn rows(&self, seed: u64, tokens: usize, heads: usize, bias: f32) -> Vec<f32> {
        let d = self.dims.head_dim;
        // The source's own randomness is that of the layer; rows differ by `seed`.
        let mut fixed = ChaCha8Rng::seed_from_u64(seed % 100);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let normal = |rng: &mut ChaCha8Rng| {
            (0..6).map(|_| rng.random::<f32>() - 0.5).sum::<f32>() * 2f32.sqrt()
        };
        let mut out = vec![0.0; tokens * heads * d];
        let alive = d - self.dead_channels;
        for head in 0..heads {
            let scale: Vec<f32> = (0..alive)
                .map(|_| (normal(&mut fixed) * 0.8).exp())
                .collect();
            let mix: Vec<f32> = (0..alive * alive)
                .map(|_| normal(&mut fixed) / (alive as f32).sqrt())
                .collect();
            let offset: Vec<f32> = (0..alive).map(|_| bias * normal(&mut fixed)).collect();
            if self.dead_head == Some(head * self.dims.kv_heads / heads) {
                continue;
            }
            for token in 0..tokens {
                let row = &mut out[(token * heads + head) * d..][..alive];
                row.copy_from_slice(&offset);
                for (scale, mix) in scale.iter().zip(mix.chunks_exact(alive)) {
                    let x = scale * normal(&mut rng);
                    row.iter_mut().zip(mix).for_each(|(y, m)| *y += x * m);
                }
            }
        }
        out
    }

    fn qkv(&self, layer: usize, part: u64, tokens: usize) -> [Vec<f32>; 3] {
        let Dims {
            heads, kv_heads, ..
        } = self.dims;
        let seed = |what: u64| part * 100 + layer as u64 * 10 + what;
        let q = self.rows(seed(1), tokens, heads, 0.5);
        let k = self.rows(seed(2), tokens, kv_heads, self.key_bias);
        [q, k, self.rows(seed(3), tokens, kv_heads, 0.5)]
    }

    fn output_projection(&self, layer: usize) -> Vec<f32> {
        let width = self.dims.heads * self.dims.head_dim;
        let mut rng = ChaCha8Rng::seed_from_u64(900 + layer as u64);
        (0..48 * width).map(|_| rng.random::<f32>() - 0.5).collect()
    }

    fn record(&self, layer: usize) -> LayerRecord {
        let [q, k, v] = self.qkv(layer, 1, TOKENS);
        let attention = causal(&q, &k, &v, self.dims, &[TOKENS], true).unwrap();
        let mut sums = Accumulator::new(self.dims, TOKENS, vec![]);
        let weights = attention.key_weights.unwrap();
        sums.observe(layer, &q, &k, &v, &attention.o, &weights)
            .unwrap();
        let (sums, sample) = sums.finish();
        let mut holdout = HoldoutRows::default();
        for (i, &len) in self.holdout.iter().enumerate() {
            let [q, k, v] = self.qkv(layer, 2 + i as u64, len);
            holdout.extend(&q, &k, &v);
        }
        LayerRecord {
            sums,
            wo: output_metric(&self.output_projection(layer), self.dims),
            sample,
            holdout,
        }
    }

    fn meta(&self) -> Meta {
        let Dims {
            heads,
            kv_heads,
            head_dim,
        } = self.dims;
        let Metadata {
            model,
            mut calibration,
            tool,
            ..
        } = metadata(self.layers, heads, kv_heads, head_dim);
        calibration.tokens = TOKENS;
        Meta {
            schema: moments::SCHEMA,
            model,
            calibration,
            holdout_tokens: self.holdout.iter().sum(),
            sample_rows: 0,
            tool,
            content_sha256: String::new(),
        }
    }

    fn moments(&self) -> Moments {
        self.moments_of(&(0..self.layers).map(|i| self.record(i)).collect::<Vec<_>>())
    }

    fn moments_of(&self, layers: &[LayerRecord]) -> Moments {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.moments");
        let lens: Vec<u32> = self.holdout.iter().map(|&n| n as u32).collect();
        moments::write(&path, &self.meta(), &lens, layers).unwrap();
        Moments::open(&path).unwrap()
    }

    /// Relative error of attention's output on tokens that neither moments nor search saw, keys and values apart.
    fn error(&self, entry: &Entry) -> [f64; 2] {
        let Dims {
            heads,
            kv_heads,
            head_dim: d,
        } = self.dims;
        let (tokens, group) = (512, heads / kv_heads);
        let [q, k, v] = self.qkv(0, 50, tokens);
        let positions: Vec<usize> = (64..tokens).step_by(3).collect();
        let identity: Vec<f32> = (0..d * d)
            .map(|i| f32::from(u8::from(i / d == i % d)))
            .collect();
        let mut total = [OutputError::default(); 2];
        for head in 0..kv_heads {
            let rows = |x: &[f32], of: usize, first: usize, n: usize, at: &[usize]| -> Vec<f32> {
                at.iter()
                    .flat_map(|i| x[(i * of + first) * d..(i * of + first + n) * d].to_vec())
                    .collect()
            };
            let all: Vec<usize> = (0..tokens).collect();
            let prompt = [HeldOut {
                head_dim: d,
                group,
                q: rows(&q, heads, head * group, group, &positions),
                k: rows(&k, kv_heads, head, 1, &all),
                v: rows(&v, kv_heads, head, 1, &all),
                positions: positions.clone(),
                sink: 8,
                recent: 32,
            }];
            let objective = Objective::new(&prompt, &identity).unwrap();
            for (total, side) in total.iter_mut().zip(SideName::ALL) {
                let error = objective
                    .error(side, &served(entry, 0, head, side))
                    .unwrap();
                *total = *total + error;
            }
        }
        total.map(|error| error.relative())
    }
}

fn served(entry: &Entry, layer: usize, head: usize, side: SideName) -> Transform {
    let layer = &entry.layers[&layer];
    let d = layer.head_dim;
    let parts = match side {
        SideName::K => &layer.k,
        SideName::V => &layer.v,
    };
    let parts = parts.for_head(head).unwrap();
    let codec = Codec {
        head_dim: d,
        levels: 4,
        group: entry.metadata.quantizer.group,
        clip: f64::from(parts.clip),
        feedback: parts.feedback.map(<[f32]>::to_vec),
    };
    let mean = parts.mean.map(<[f32]>::to_vec);
    Transform::new(parts.encode.to_vec(), parts.back(side, d), mean, codec).unwrap()
}

fn bytes(fitted: &Fitted) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    fitted.entry.write(folder.path(), false).unwrap();
    std::fs::read(folder.path().join(zoo::FILE)).unwrap()
}

#[test]
fn key_biases_that_dwarf_the_spread_do_not_hurt() {
    let toy = Toy {
        key_bias: 40.0,
        ..Toy::new(32)
    };
    let moments = toy.moments();
    let released = toy.error(&fit(&moments, &FitOptions::released()).unwrap().entry);
    let ours = toy.error(&fit(&moments, &FitOptions::default()).unwrap().entry);
    assert!(
        ours[0] < 0.25 * released[0],
        "keys: {ours:?}, released {released:?}"
    );
    assert!(
        ours[1] < released[1],
        "values: {ours:?}, released {released:?}"
    );
    let easy = Toy::new(32);
    let easy = easy.error(&fit(&easy.moments(), &FitOptions::default()).unwrap().entry);
    assert!(ours[0] < 2.0 * easy[0], "{ours:?}, without biases {easy:?}");
}

#[test]
fn released_options_give_the_released_composition() {
    let toy = Toy::new(16);
    let moments = toy.moments();
    let entry = fit(&moments, &FitOptions::released()).unwrap().entry;
    let layer = &entry.layers[&0];
    let sums = moments.layer(0).unwrap();
    for (side, moment, clip) in [(&layer.k, &sums.qq, 0.96), (&layer.v, &sums.vwv, 0.92)] {
        let mean = (&moment[0] + &moment[1]) / 2.0;
        let expected = oscar(&mean).unwrap();
        let encode = DMatrix::from_row_slice(16, 16, &side.encode[0]).cast::<f64>();
        assert!((encode - expected.matrix).amax() < 1e-7);
        assert_eq!(side.encode.len(), 1);
        assert_eq!(side.clip, [clip]);
        assert!(side.dual.is_none() && side.mean.is_none() && side.feedback.is_none());
        let spectrum = &side.spectrum.as_ref().unwrap()[0];
        assert!(spectrum.is_sorted_by(|a, b| a >= b));
    }
    assert_eq!(entry.metadata.v_moment, Some(VMoment::Vwv));
    assert_eq!(entry.metadata.quantizer.group, 16);
}

#[test]
fn every_combination_makes_an_entry_that_verifies() {
    for d in [16, 24] {
        let toy = Toy::new(d);
        let moments = toy.moments();
        for (i, &method) in Method::ALL.iter().enumerate() {
            for &scope in Scope::ALL {
                for &rounding in Rounding::ALL {
                    let options = FitOptions {
                        method,
                        scope,
                        rounding,
                        center: [None, Some(true), Some(false)][i % 3],
                        group: (rounding == Rounding::Nearest).then_some(d / 2),
                        ..FitOptions::default()
                    };
                    let fitted = fit(&moments, &options).unwrap();
                    assert_eq!(fitted.warnings, [""; 0]);
                    let folder = tempfile::tempdir().unwrap();
                    fitted.entry.write(folder.path(), false).unwrap();
                    let entry = Entry::open(folder.path()).unwrap();
                    let transforms = if scope == Scope::Head { 2 } else { 1 };
                    let k = &entry.layers[&0].k;
                    assert_eq!(k.encode.len(), transforms);
                    assert_eq!(k.dual.is_some(), method == Method::Balanced);
                    assert_eq!(k.feedback.is_some(), rounding == Rounding::Feedback);
                    let means = k.mean.as_ref().map(Vec::len);
                    assert_eq!(
                        means,
                        options
                            .center
                            .unwrap_or(method == Method::Balanced)
                            .then_some(2)
                    );
                    let [k, v] = toy.error(&entry);
                    let worst = if method == Method::Balanced { 0.7 } else { 1.5 };
                    assert!(k < worst && v < worst, "{options:?}: errors {k} and {v}");
                }
            }
        }
    }
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let toy = Toy {
        layers: 3,
        ..Toy::new(16)
    };
    let moments = toy.moments();
    let [one, two, five] = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        bytes(
            &pool
                .install(|| fit(&moments, &FitOptions::default()))
                .unwrap(),
        )
    });
    assert!(one == two && one == five);
}

#[test]
fn search_beats_a_bad_choice_and_keeps_a_given_one() {
    let toy = Toy::new(32);
    let moments = toy.moments();
    let error = |options: &FitOptions| {
        let entry = fit(&moments, options).unwrap().entry;
        (toy.error(&entry), entry)
    };
    let (searched, _) = error(&FitOptions::default());
    let given = FitOptions {
        k_clip: Some(0.6),
        v_clip: Some(0.6),
        exponent: Some(0.2),
        ..FitOptions::default()
    };
    let (bad, entry) = error(&given);
    assert!(
        searched[0] < 0.8 * bad[0] && searched[1] < 0.8 * bad[1],
        "{searched:?} {bad:?}"
    );
    let layer = &entry.layers[&0];
    assert_eq!(
        (&layer.k.clip[..], &layer.v.clip[..]),
        (&[0.6; 2][..], &[0.6; 2][..])
    );
    assert_eq!(entry.metadata.fit.unwrap().k[&0].exponent, [0.2; 2]);
}

#[test]
fn dead_heads_and_channels_give_finite_entries_and_warnings() {
    let toy = Toy {
        dead_channels: 5,
        dead_head: Some(1),
        ..Toy::new(16)
    };
    let moments = toy.moments();
    for &method in Method::ALL {
        for &scope in Scope::ALL {
            let options = FitOptions {
                method,
                scope,
                ..FitOptions::default()
            };
            let fitted = fit(&moments, &options).unwrap();
            let folder = tempfile::tempdir().unwrap();
            fitted.entry.write(folder.path(), false).unwrap();
            let warnings = fitted.warnings.join("\n");
            assert!(
                warnings.contains("layer 0 KV head 1: queries have no energy"),
                "{warnings}"
            );
            assert!(!warnings.contains("KV head 0"), "{warnings}");
            let [k, v] = toy.error(&fitted.entry);
            assert!(k < 0.7 && v < 0.7, "{method} {scope}: errors {k} and {v}");
        }
    }
}

#[test]
fn without_held_out_prompts_defaults_stand_in() {
    let toy = Toy {
        holdout: vec![],
        ..Toy::new(16)
    };
    let fitted = fit(&toy.moments(), &FitOptions::default()).unwrap();
    assert!(fitted.warnings.join("\n").contains("no held-out prompts"));
    let [k, v] = toy.error(&fitted.entry);
    assert!(k < 0.5 && v < 0.5, "errors {k} and {v}");
}

#[test]
fn wrong_options_are_named() {
    let moments = Toy::new(16).moments();
    let default = FitOptions::default;
    let cases = [
        (
            FitOptions {
                k_clip: Some(0.0),
                ..default()
            },
            "--k-clip",
        ),
        (
            FitOptions {
                v_clip: Some(f64::NAN),
                ..default()
            },
            "--v-clip",
        ),
        (
            FitOptions {
                exponent: Some(-1.0),
                ..default()
            },
            "--p",
        ),
        (
            FitOptions {
                method: Method::Oscar,
                exponent: Some(0.4),
                ..default()
            },
            "`oscar` has no exponent",
        ),
        (
            FitOptions {
                method: Method::Hadamard,
                v_moment: Some(VMoment::Vv),
                ..default()
            },
            "--v-moment",
        ),
        (
            FitOptions {
                group: Some(5),
                ..default()
            },
            "5 does not divide head_dim 16",
        ),
    ];
    for (options, expected) in cases {
        let error = fit(&moments, &options).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn nan_in_moments_is_named_by_layer() {
    let toy = Toy {
        layers: 2,
        ..Toy::new(16)
    };
    let mut layers = [toy.record(0), toy.record(1)];
    layers[1].sums.kk[7] = f64::NAN;
    let error = fit(&toy.moments_of(&layers), &FitOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("layer 1") || error.contains("layers.1"),
        "{error}"
    );
    assert!(error.contains("kk"), "{error}");
}
