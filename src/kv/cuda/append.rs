//! Writing in 16 bits.
#![allow(unsafe_code)]

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaView, CudaViewMut, LaunchConfig, PushKernelArg,
};
use half::bf16;

use super::super::page::PAGE_TOKENS;
use super::params::{EntryParams, PoolShape, Rows};
use crate::cuda::{function, refused};
use crate::{Error, Result};

/// Tokens of a block, and the channels that its four warps take at once.
const BLOCK_TOKENS: usize = 16;
const BLOCK_CHANNELS: usize = 32;

/// Encodes rows in bf16 products with f32 sums, rounds them to bf16 and puts them where they belong.
pub struct Append {
    device: CudaDevice,
    shape: PoolShape,
    to_pages: CudaFunction,
    to_rows: CudaFunction,
    copy: CudaFunction,
}

impl Append {
    pub fn new(device: &CudaDevice, shape: PoolShape) -> Result<Self> {
        let kernel = |name| function(device, "append", name);
        Ok(Self {
            device: device.clone(),
            shape,
            to_pages: kernel("append")?,
            to_rows: kernel("encode")?,
            copy: kernel("copy_page")?,
        })
    }

    /// Tokens of one layer to BF16 pages. `places` holds page·64 + slot of each; negative ones are passed over, and a
    /// place that occurs twice ends up holding either. Without `params`, numbers are stored as they are.
    ///
    /// # Errors
    /// Where lengths do not fit, or the launch is refused.
    pub fn append(
        &self,
        params: Option<&EntryParams>,
        layer: usize,
        k: Rows,
        v: Rows,
        places: &CudaView<i32>,
        pool: &mut CudaSlice<u8>,
    ) -> Result<()> {
        let tokens = places.len();
        k.check(tokens, self.shape.row())?;
        v.check(tokens, self.shape.row())?;
        let mut pages = self
            .shape
            .layer_mut(pool, self.shape.layout.bf16_bytes(), layer)?;
        if tokens == 0 {
            return Ok(());
        }
        let matrices = self.matrices(params, layer)?;
        let null = 0u64;
        let (layout, n, heads) = (
            self.shape.kernel_layout(),
            tokens as i32,
            self.shape.kv_heads as i32,
        );
        let stream = self.device.cuda_stream();
        let mut launch = stream.launch_builder(&self.to_pages);
        launch.arg(k.data).arg(v.data).arg(&k.stride).arg(&v.stride);
        match &matrices {
            Some((encode, bias)) => launch.arg(encode).arg(bias),
            None => launch.arg(&null).arg(&null),
        };
        launch
            .arg(places)
            .arg(&mut pages)
            .arg(&layout)
            .arg(&n)
            .arg(&heads);
        // SAFETY: the arguments are those of the kernel; it reads rows and places that were counted above, and writes
        // to pages of this layer, whose numbers are the caller's.
        unsafe { launch.launch(self.grid(tokens)) }.map_err(|e| refused("append", e))?;
        Ok(())
    }

    /// The same numbers to `k_out` and `v_out`, each (tokens, kv_heads, d).
    ///
    /// # Errors
    /// Where lengths do not fit, or the launch is refused.
    pub fn encode(
        &self,
        params: Option<&EntryParams>,
        layer: usize,
        k: Rows,
        v: Rows,
        k_out: &mut CudaViewMut<bf16>,
        v_out: &mut CudaViewMut<bf16>,
    ) -> Result<()> {
        let row = self.shape.row();
        let tokens = k_out.len() / row;
        if k_out.len() != tokens * row || v_out.len() != tokens * row {
            return Err(Error::invalid(
                "encoded rows",
                format!(
                    "room for {} and {} numbers is no room for rows of {row}",
                    k_out.len(),
                    v_out.len()
                ),
            ));
        }
        k.check(tokens, row)?;
        v.check(tokens, row)?;
        if tokens == 0 {
            return Ok(());
        }
        let matrices = self.matrices(params, layer)?;
        let null = 0u64;
        let (n, heads, d) = (
            tokens as i32,
            self.shape.kv_heads as i32,
            self.shape.layout.head_dim as i32,
        );
        let stream = self.device.cuda_stream();
        let mut launch = stream.launch_builder(&self.to_rows);
        launch.arg(k.data).arg(v.data).arg(&k.stride).arg(&v.stride);
        match &matrices {
            Some((encode, bias)) => launch.arg(encode).arg(bias),
            None => launch.arg(&null).arg(&null),
        };
        launch.arg(k_out).arg(v_out).arg(&n).arg(&heads).arg(&d);
        // SAFETY: the arguments are those of the kernel, and all lengths were checked above.
        unsafe { launch.launch(self.grid(tokens)) }.map_err(|e| refused("encode", e))?;
        Ok(())
    }

    /// The first `tokens` tokens of BF16 page `from` to page `to`, in all layers; what `to` held past them is lost.
    ///
    /// # Errors
    /// Where there are no such pages, or the launch is refused.
    pub fn copy_page(
        &self,
        pool: &mut CudaSlice<u8>,
        from: usize,
        to: usize,
        tokens: usize,
    ) -> Result<()> {
        let pages = self
            .shape
            .pages(pool.len(), self.shape.layout.bf16_bytes())?;
        if from >= pages || to >= pages || tokens > PAGE_TOKENS {
            return Err(Error::invalid(
                "cache pool",
                format!(
                    "{tokens} tokens cannot be copied from page {from} to page {to} of {pages}"
                ),
            ));
        }
        if tokens == 0 || from == to {
            return Ok(());
        }
        let (pages, from, to, tokens) = (pages as i32, from as i32, to as i32, tokens as i32);
        let layout = self.shape.kernel_layout();
        let stream = self.device.cuda_stream();
        let mut launch = stream.launch_builder(&self.copy);
        launch
            .arg(pool)
            .arg(&pages)
            .arg(&from)
            .arg(&to)
            .arg(&tokens)
            .arg(&layout);
        let config = LaunchConfig {
            grid_dim: (self.shape.layers as u32, self.shape.kv_heads as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the arguments are those of the kernel, and both pages are in the pool.
        unsafe { launch.launch(config) }.map_err(|e| refused("copy_page", e))?;
        Ok(())
    }

    fn matrices<'a>(
        &self,
        params: Option<&'a EntryParams>,
        layer: usize,
    ) -> Result<Option<(CudaView<'a, bf16>, CudaView<'a, f32>)>> {
        let Some(params) = params else {
            return Ok(None);
        };
        params.check(self.shape, layer)?;
        Ok(Some((params.encode(layer), params.bias(layer))))
    }

    /// Few tokens leave most of the GPU idle, unless channels are shared out too.
    fn grid(&self, tokens: usize) -> LaunchConfig {
        let blocks = tokens.div_ceil(BLOCK_TOKENS) * 2 * self.shape.kv_heads;
        let shares = 256usize
            .div_ceil(blocks)
            .min(self.shape.layout.head_dim.div_ceil(BLOCK_CHANNELS));
        LaunchConfig {
            grid_dim: (
                tokens.div_ceil(BLOCK_TOKENS) as u32,
                2 * self.shape.kv_heads as u32,
                shares as u32,
            ),
            block_dim: (128, 1, 1),
            shared_mem_bytes: 0,
        }
    }
}
