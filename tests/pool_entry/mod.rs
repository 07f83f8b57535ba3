//! An entry that was fitted to nothing, for what takes any.

#[path = "../metadata/mod.rs"]
mod metadata;

use metadata::metadata;
use nalgebra::DMatrix;
use oscar_kv::kv::attention::Dims;
use oscar_kv::quant::turboquant::random_orthogonal;
use oscar_kv::quant::{feedback_matrix, row_major};
use oscar_kv::zoo::{self, Entry, Layer, SideName as Side};

/// An entry of another transform, clip ratio and rounding in every layer and head.
pub fn entry(layers: usize, dims: Dims, group: usize, seed: u64) -> Entry {
    let Dims {
        heads,
        kv_heads,
        head_dim: d,
    } = dims;
    let side = |layer: usize, name: Side| {
        let mut side = zoo::Side::default();
        let mut means = Vec::new();
        let mut duals = Vec::new();
        let mut feedback = Vec::new();
        for head in 0..kv_heads {
            let seed = seed ^ (1 + 64 * layer + 2 * head + usize::from(name == Side::V)) as u64;
            let turn = random_orthogonal(d, seed);
            let stretch = DMatrix::from_fn(d, d, |i, j| {
                if i == j {
                    0.5 + 1.5 * ((i * 7) % 5) as f64 / 4.0
                } else {
                    0.0
                }
            });
            let shrink = stretch.map(|x| if x == 0.0 { 0.0 } else { 1.0 / x });
            side.encode.push(row_major(&(&stretch * &turn)));
            duals.push(row_major(&match name {
                Side::K => shrink * &turn,
                Side::V => turn.transpose() * shrink,
            }));
            means.push(
                (0..d)
                    .map(|c| if c == 5 { 4.0 } else { 0.01 * c as f32 })
                    .collect(),
            );
            let metric = &turn * stretch * turn.transpose();
            feedback.push(row_major(&feedback_matrix(&metric).unwrap()));
            side.clip.push(1.0 - 0.04 * ((layer + head) % 3) as f32);
        }
        side.dual = Some(duals);
        side.mean = (name == Side::K || layer > 0).then_some(means);
        side.feedback = (name == Side::K || layer > 0).then_some(feedback);
        side
    };
    let layer = |index| Layer {
        head_dim: d,
        k: side(index, Side::K),
        v: side(index, Side::V),
    };
    let mut metadata = metadata(layers, heads, kv_heads, d);
    metadata.quantizer.group = group;
    Entry {
        metadata,
        layers: (0..layers).map(|index| (index, layer(index))).collect(),
    }
}
