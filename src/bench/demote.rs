//! Demotion of one layer's raw keys and values, as prefill does it.

use candle_core::cuda_backend::WrapErr;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::random::Random;
use super::{Stopwatch, Timed};
use crate::kv::cuda::decode::arrangement;
use crate::kv::cuda::demote::Demote;
use crate::kv::cuda::{EntryParams, PoolShape, Rows, SideParams};
use crate::kv::page::{PAGE_TOKENS, PageLayout};
use crate::zoo::Rounding;
use crate::{Error, Result};

/// Tokens that leave the windows at once.
#[derive(Clone, Debug, Serialize)]
pub struct DemoteShape {
    /// A multiple of [`PAGE_TOKENS`].
    pub tokens: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Channels that share a scale and a zero.
    pub group: usize,
    /// Of both sides.
    pub clip: f64,
    pub rounding: Rounding,
}

/// What [`demote`] measured.
#[derive(Clone, Debug, Serialize)]
pub struct DemoteTimes {
    pub shape: DemoteShape,
    /// Keys and values, encoded, clipped, rounded and packed. Bytes: the rows read and the pages written.
    #[serde(flatten)]
    pub both_sides: Timed,
}

/// Times the demotion of one layer's keys and values, with a random matrix a head.
///
/// # Errors
/// Where the shape is impossible or device memory runs out.
pub fn demote(watch: &mut Stopwatch, shape: &DemoteShape, repeats: usize) -> Result<DemoteTimes> {
    let device = watch.device().clone();
    let stream = device.cuda_stream();
    let DemoteShape {
        tokens,
        kv_heads,
        head_dim: d,
        group,
        clip,
        rounding,
    } = *shape;
    if tokens == 0 || !tokens.is_multiple_of(PAGE_TOKENS) || kv_heads == 0 {
        let problem = format!("{tokens} tokens of {kv_heads} KV heads");
        return Err(Error::invalid("bench demote", problem)
            .hint(format!("tokens leave in pages of {PAGE_TOKENS}")));
    }
    if !(0.0..=1.0).contains(&clip) {
        return Err(Error::invalid(
            "--clip",
            format!("{clip} is not between 0 and 1"),
        ));
    }
    let (arrangement, _) = arrangement(&device, d, group, 1)?;
    let pool = PoolShape {
        layout: PageLayout::new(d, group, arrangement)?,
        layers: 1,
        kv_heads,
    };
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut matrix = |scale: f32, keep: &dyn Fn(usize, usize) -> bool| -> Vec<f32> {
        let cells = (0..kv_heads * d * d).map(|i| (i / d % d, i % d));
        cells
            .map(|(row, column)| {
                let x = scale * (rng.random::<f32>() - 0.5);
                if keep(row, column) { x } else { 0.0 }
            })
            .collect()
    };
    let encode = matrix((12.0 / d as f32).sqrt(), &|_, _| true);
    let feedback =
        (rounding == Rounding::Feedback).then(|| matrix(0.3, &|row, column| row < column));
    // As the codec counts: the threshold is the magnitude at this place of the ascending row.
    let place = ((clip * d as f64).floor() as usize).min(d - 1);
    let ranks = vec![d - place; kv_heads];
    let side = SideParams {
        encode: &encode,
        mean: None,
        feedback: feedback.as_deref(),
        ranks: &ranks,
    };
    let params = EntryParams::new(&device, pool, side, side)?;
    let kernel = Demote::new(&device, pool)?;

    let random = Random::new(&device)?;
    let row = kv_heads * d;
    let (k, v) = (
        random.bf16(tokens * row, 1.0)?,
        random.bf16(tokens * row, 1.0)?,
    );
    let mut ids: Vec<i32> = (0..(tokens / PAGE_TOKENS) as i32).collect();
    ids.shuffle(&mut rng);
    let ids = stream.clone_htod(&ids).w()?;
    let page_bytes = ids.len() * kv_heads * pool.layout.int2_bytes();
    let mut pages = stream.alloc_zeros::<u8>(page_bytes).w()?;
    let bytes = (2 * 2 * tokens * row + page_bytes) as u64;
    let (k, v) = (k.as_view(), v.as_view());
    let both_sides = watch.time(repeats, bytes, &mut || {
        let rows = |data| Rows { data, stride: row };
        kernel.demote_rows(&params, 0, rows(&k), rows(&v), &ids.as_view(), &mut pages)
    })?;
    Ok(DemoteTimes {
        shape: shape.clone(),
        both_sides,
    })
}
