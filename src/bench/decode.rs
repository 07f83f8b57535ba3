//! Decode attention of one layer, over random pages in random order.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use half::bf16;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::random::Random;
use super::{Stopwatch, Timed};
use crate::kv::cuda::Tables;
use crate::kv::cuda::decode::{Decode, LayerPages, Output, Shape, arrangement};
use crate::kv::page::{PAGE_TOKENS, PageLayout};
use crate::zoo::Windows;
use crate::{Error, Result};

/// What a batch of sequences of one length asks of one layer.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeShape {
    pub batch: usize,
    /// Tokens a sequence, windows counted.
    pub context: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Channels that share a scale and a zero.
    pub group: usize,
    /// Tokens that stay in bf16; all of them where none.
    pub windows: Option<Windows>,
}

/// What [`decode`] measured.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeTimes {
    pub shape: DecodeShape,
    pub kernel: &'static str,
    /// Why it is not the fast one, where it is not.
    pub fallback: Option<String>,
    /// Attention of one layer, all segments merged. Bytes: pages, queries and outputs.
    #[serde(flatten)]
    pub attention: Timed,
    /// The division of the work, once a step for all layers.
    pub plan: Timed,
}

/// Times a decode step of one layer.
///
/// # Errors
/// Where the shape is impossible or device memory runs out.
pub fn decode(watch: &mut Stopwatch, shape: &DecodeShape, repeats: usize) -> Result<DecodeTimes> {
    let device = watch.device().clone();
    let stream = device.cuda_stream();
    let DecodeShape {
        batch,
        context,
        heads,
        kv_heads,
        head_dim: d,
        group,
        ..
    } = *shape;
    if batch == 0 || context == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads == 0
    {
        let problem = format!("{batch} × {context} tokens, {heads} heads, {kv_heads} KV heads");
        return Err(Error::invalid("bench decode", problem)
            .hint("none may be 0, and `--heads` is a multiple of `--kv-heads`"));
    }
    let (arrangement, fallback) = arrangement(&device, d, group, heads / kv_heads)?;
    let layout = PageLayout::new(d, group, arrangement)?;
    let exact = shape.windows.map_or(context, |windows| {
        windows.sink_tokens + windows.recent_tokens
    });
    let history = context.saturating_sub(exact).div_ceil(PAGE_TOKENS);
    let window_tokens = context - history * PAGE_TOKENS;
    let windows = window_tokens.div_ceil(PAGE_TOKENS);

    let pool = |pages: usize, page_bytes: usize| -> Result<CudaSlice<u8>> {
        let bytes = pages.max(1) * kv_heads * page_bytes;
        let (free, _) = stream.context().mem_get_info().w()?;
        if bytes > free {
            let problem = format!("{bytes} bytes of pages are needed, and {free} are free");
            return Err(
                Error::invalid("bench decode", problem).hint("lower `--batch` or `--context`")
            );
        }
        Ok(stream.alloc_zeros(bytes).w()?)
    };
    let mut int2 = pool(batch * history, layout.int2_bytes())?;
    let mut bf16_pages = pool(batch * windows, layout.bf16_bytes())?;
    let random = Random::new(&device)?;
    let q = random.bf16(batch * heads * d, 1.0)?;
    random.codes(&mut int2, layout)?;
    random.numbers(&mut bf16_pages.slice_mut(..), 1.0)?;
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut ids = |pages: usize| {
        let mut ids: Vec<i32> = (0..(batch * pages).max(1) as i32).collect();
        ids.shuffle(&mut rng);
        stream.clone_htod(&ids).w()
    };
    let (history_ids, window_ids) = (ids(history)?, ids(windows)?);
    let history_pages = stream.clone_htod(&vec![history as i32; batch]).w()?;
    let window_counts = stream.clone_htod(&vec![window_tokens as i32; batch]).w()?;
    let tables = Tables {
        history: history_ids.slice(..batch * history),
        history_pages: history_pages.as_view(),
        windows: window_ids.slice(..batch * windows),
        window_tokens: window_counts.as_view(),
    };
    let pages = LayerPages {
        int2: int2.as_view(),
        bf16: bf16_pages.as_view(),
    };
    let mut out = stream.alloc_zeros::<bf16>(batch * heads * d).w()?;
    let mut lse = stream.alloc_zeros::<f32>(batch * heads).w()?;
    let mut attention = Decode::new(
        &device,
        Shape {
            layout,
            heads,
            kv_heads,
            max_batch: batch,
        },
    )?;
    let plan = watch.time(
        repeats,
        (4 * batch * (history + windows)) as u64,
        &mut || attention.plan(&tables),
    )?;
    let page_bytes = history * layout.int2_bytes() + window_tokens * 4 * d;
    let bytes = batch * (kv_heads * page_bytes + 4 * heads * d);
    let times = watch.time(repeats, bytes as u64, &mut || {
        attention.run(
            &tables,
            &pages,
            &q.as_view(),
            &mut Output {
                values: out.as_view_mut(),
                lse: lse.as_view_mut(),
                exact: None,
            },
        )
    })?;
    Ok(DecodeTimes {
        shape: shape.clone(),
        kernel: attention.kernel(),
        fallback,
        attention: times,
        plan,
    })
}
