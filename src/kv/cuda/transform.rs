//! A decode step's queries into the cache's space, and its outputs back.
#![allow(unsafe_code)]

use std::sync::Arc;

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, CudaView, CudaViewMut, LaunchConfig, PushKernelArg,
};
use half::bf16;

use crate::{Error, Result, cuda};

/// Threads of a block, at most.
const THREADS: usize = 512;

/// Rows times a matrix of their KV head, in f32. Made for few tokens: each block reads its matrix anew.
pub struct HeadTransform {
    stream: Arc<CudaStream>,
    four_rows: CudaFunction,
    eight_rows: CudaFunction,
    kv_heads: usize,
    head_dim: usize,
}

impl HeadTransform {
    /// # Errors
    /// Where the GPU cannot run the kernel.
    pub fn new(device: &CudaDevice, kv_heads: usize, head_dim: usize) -> Result<Self> {
        Ok(Self {
            stream: device.cuda_stream(),
            four_rows: cuda::function(device, "transform", "transform_4")?,
            eight_rows: cuda::function(device, "transform", "transform_8")?,
            kv_heads,
            head_dim,
        })
    }

    /// `x` and `y` (tokens, heads, head_dim): y = x · `matrix` of the head's KV head (kv_heads, head_dim, head_dim),
    /// plus its `row` (kv_heads, head_dim).
    ///
    /// # Errors
    /// Where sizes do not fit each other, or the launch is refused.
    pub fn run(
        &self,
        x: &CudaView<bf16>,
        heads: usize,
        matrix: &CudaView<f32>,
        row: Option<&CudaView<f32>>,
        y: &mut CudaViewMut<bf16>,
    ) -> Result<()> {
        let (d, kv_heads) = (self.head_dim, self.kv_heads);
        let sizes = heads > 0
            && heads.is_multiple_of(kv_heads)
            && x.len().is_multiple_of(heads * d)
            && y.len() == x.len()
            && matrix.len() == kv_heads * d * d
            && row.is_none_or(|row| row.len() == kv_heads * d);
        if !sizes {
            let problem = format!(
                "{} numbers of {heads} heads and matrices of {} do not fit {kv_heads} KV heads of {d} channels",
                x.len(),
                matrix.len()
            );
            return Err(Error::invalid("transform", problem));
        }
        let tokens = x.len() / (heads * d);
        if tokens == 0 {
            return Ok(());
        }
        let group = heads / kv_heads;
        // Few rows: more blocks rather than fewer readings.
        let (kernel, rows) = if tokens * group <= 16 {
            (&self.four_rows, 4)
        } else {
            (&self.eight_rows, 8)
        };
        let columns = [32, 16, 8]
            .into_iter()
            .find(|columns| d.is_multiple_of(*columns))
            .unwrap_or(d);
        let threads = THREADS / columns * columns;
        let config = LaunchConfig {
            grid_dim: (
                kv_heads as u32,
                (tokens * group).div_ceil(rows) as u32,
                (d / columns) as u32,
            ),
            block_dim: (threads as u32, 1, 1),
            shared_mem_bytes: (4 * rows * (d + threads)) as u32,
        };
        let null = 0u64;
        let [tokens, heads, group, d, columns] =
            [tokens, heads, group, d, columns].map(|n| n as i32);
        let mut launch = self.stream.launch_builder(kernel);
        launch.arg(x).arg(matrix);
        match row {
            Some(row) => launch.arg(row),
            None => launch.arg(&null),
        };
        launch
            .arg(y)
            .arg(&tokens)
            .arg(&heads)
            .arg(&group)
            .arg(&d)
            .arg(&columns);
        // SAFETY: the arguments are those of the kernel, and sizes were checked above.
        unsafe { launch.launch(config) }.w()?;
        Ok(())
    }
}
