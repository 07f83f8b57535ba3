//! From 16 to 2 bits: clip, quantize, pack.
#![allow(unsafe_code)]

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaView, LaunchConfig, PushKernelArg,
};

use super::super::page::{PAGE_TOKENS, PageLayout};
use super::demote_hopper::Fused;
use super::params::{EntryParams, PoolShape, Rows};
use crate::cuda::{allow_shared_memory, function, refused};
use crate::{Error, Result};

/// Codes are those of [`Codec`](crate::quant::Codec) for x' rounded to bf16; with feedback, errors and F are bf16 where
/// they reach past 16 channels.
pub struct Demote {
    device: CudaDevice,
    shape: PoolShape,
    pages: CudaFunction,
    rows: CudaFunction,
    /// Its fast twin, where there is one.
    fused: Option<Fused>,
}

impl Demote {
    pub fn new(device: &CudaDevice, shape: PoolShape) -> Result<Self> {
        Ok(Self {
            fused: Fused::new(device, shape)?,
            ..Self::plain(device, shape)?
        })
    }

    /// Without the kernels that are made for some shapes: what they are tested against.
    ///
    /// # Errors
    /// Where the GPU lacks the shared memory.
    pub fn plain(device: &CudaDevice, shape: PoolShape) -> Result<Self> {
        let kernel = |name| -> Result<CudaFunction> {
            let kernel = function(device, "demote", name)?;
            let limit = allow_shared_memory(device, &kernel)?;
            let needed = shared_bytes(shape.layout);
            if needed > limit {
                let problem =
                    format!("{needed} bytes of shared memory are more than the GPU's {limit}");
                return Err(
                    Error::invalid("demotion", problem).hint("use larger groups of channels")
                );
            }
            Ok(kernel)
        };
        Ok(Self {
            device: device.clone(),
            shape,
            pages: kernel("demote_pages")?,
            rows: kernel("demote_rows")?,
            fused: None,
        })
    }

    /// Whole BF16 pages to INT2 pages, all layers in one launch. `moves` holds (BF16 page, INT2 page) of each, both
    /// the same in every layer; a pair with a negative number is passed over.
    ///
    /// # Errors
    /// Where lengths do not fit, or the launch is refused.
    pub fn demote_pages(
        &self,
        params: &EntryParams,
        moves: &CudaView<i32>,
        bf16_pool: &CudaSlice<u8>,
        int2_pool: &mut CudaSlice<u8>,
    ) -> Result<()> {
        params.check(self.shape, 0)?;
        let layout = self.shape.layout;
        let bf16_pages = self.shape.pages(bf16_pool.len(), layout.bf16_bytes())? as i32;
        let int2_pages = self.shape.pages(int2_pool.len(), layout.int2_bytes())? as i32;
        if !moves.len().is_multiple_of(2) {
            return Err(Error::invalid(
                "demotion",
                format!("{} page numbers are no pairs", moves.len()),
            ));
        }
        if moves.is_empty() {
            return Ok(());
        }
        let null = 0u64;
        let feedback = [params.feedback(0, None), params.feedback(1, None)];
        let ranks = params.ranks();
        let (kernel_layout, heads) = (self.shape.kernel_layout(), self.shape.kv_heads as i32);
        let stream = self.device.cuda_stream();
        let mut launch = stream.launch_builder(&self.pages);
        launch.arg(bf16_pool).arg(int2_pool).arg(moves);
        for feedback in &feedback {
            match feedback {
                Some(feedback) => launch.arg(feedback),
                None => launch.arg(&null),
            };
        }
        launch
            .arg(&ranks)
            .arg(&kernel_layout)
            .arg(&bf16_pages)
            .arg(&int2_pages)
            .arg(&heads);
        let config = self.grid(moves.len() / 2, self.shape.layers);
        // SAFETY: the arguments are those of the kernel; which pages are read and written is the caller's.
        unsafe { launch.launch(config) }.map_err(|e| refused("demote_pages", e))?;
        Ok(())
    }

    /// Raw rows of one layer, 64 tokens for each of `pages`, encoded on the way. The same codes as
    /// [`Append::append`](super::append::Append::append) and [`Demote::demote_pages`] make, up to bf16 rounding of
    /// values on a boundary.
    ///
    /// # Errors
    /// Where lengths do not fit, or the launch is refused.
    pub fn demote_rows(
        &self,
        params: &EntryParams,
        layer: usize,
        k: Rows,
        v: Rows,
        pages: &CudaView<i32>,
        int2_pool: &mut CudaSlice<u8>,
    ) -> Result<()> {
        params.check(self.shape, layer)?;
        k.check(pages.len() * PAGE_TOKENS, self.shape.row())?;
        v.check(pages.len() * PAGE_TOKENS, self.shape.row())?;
        let mut pool = self
            .shape
            .layer_mut(int2_pool, self.shape.layout.int2_bytes(), layer)?;
        if pages.is_empty() {
            return Ok(());
        }
        if let (Some(fused), Some(params)) = (&self.fused, params.fused(layer)) {
            return fused.demote_rows(&params, k, v, pages, &mut pool);
        }
        let null = 0u64;
        let (encode, bias, ranks) = (
            params.encode(layer),
            params.bias(layer),
            params.ranks_of(layer),
        );
        let feedback = [
            params.feedback(0, Some(layer)),
            params.feedback(1, Some(layer)),
        ];
        let (kernel_layout, heads) = (self.shape.kernel_layout(), self.shape.kv_heads as i32);
        let stream = self.device.cuda_stream();
        let mut launch = stream.launch_builder(&self.rows);
        launch
            .arg(k.data)
            .arg(v.data)
            .arg(&k.stride)
            .arg(&v.stride)
            .arg(&encode)
            .arg(&bias);
        for feedback in &feedback {
            match feedback {
                Some(feedback) => launch.arg(feedback),
                None => launch.arg(&null),
            };
        }
        launch
            .arg(&ranks)
            .arg(pages)
            .arg(&mut pool)
            .arg(&kernel_layout)
            .arg(&heads);
        let config = self.grid(pages.len(), 1);
        // SAFETY: the arguments are those of the kernel, rows were counted above; page numbers are the caller's.
        unsafe { launch.launch(config) }.map_err(|e| refused("demote_rows", e))?;
        Ok(())
    }

    fn grid(&self, pages: usize, layers: usize) -> LaunchConfig {
        LaunchConfig {
            grid_dim: (pages as u32, 2 * self.shape.kv_heads as u32, layers as u32),
            block_dim: (64, 1, 1),
            shared_mem_bytes: shared_bytes(self.shape.layout) as u32,
        }
    }
}

/// Of a block of two warps: `Scratch` in `kernels/demote.cu`.
fn shared_bytes(layout: PageLayout) -> usize {
    let d = layout.head_dim;
    let x = (((d + 8) / 8) | 1) * 16;
    let moved = 80;
    let codes = (d.div_ceil(16) | 1) * 16;
    let ranges = (layout.groups() | 1) * 4;
    PAGE_TOKENS * (x + moved + codes + ranges)
}
