//! Device memory full of plausible random contents.

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, CudaViewMut, LaunchConfig, PushKernelArg,
};
use half::bf16;
use std::sync::Arc;

use crate::kv::page::PageLayout;
use crate::{Result, cuda};

pub(super) struct Random {
    stream: Arc<CudaStream>,
    bits: CudaFunction,
    scales: CudaFunction,
    numbers: CudaFunction,
}

const CONFIG: LaunchConfig = LaunchConfig {
    grid_dim: (1024, 1, 1),
    block_dim: (256, 1, 1),
    shared_mem_bytes: 0,
};

impl Random {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let kernel = |name| cuda::function(device, "bench", name);
        Ok(Self {
            stream: device.cuda_stream(),
            bits: kernel("random_bits")?,
            scales: kernel("random_scales")?,
            numbers: kernel("random_numbers")?,
        })
    }

    /// INT2 pages: any codes, and scales and zeros as the codec makes them.
    pub fn codes(&self, pages: &mut CudaSlice<u8>, layout: PageLayout) -> Result<()> {
        let words = pages.len() / 4;
        let part = layout.part_tokens();
        let code_words = (part * layout.head_dim / 8) as u32;
        let part_words = code_words + (part * 2 * layout.groups()) as u32;
        let parts = words / part_words as usize;
        let mut launch = self.stream.launch_builder(&self.bits);
        launch.arg(&mut *pages).arg(&words).arg(&1u32);
        // SAFETY: writes as many words as the buffer has.
        unsafe { launch.launch(CONFIG) }.w()?;
        let mut launch = self.stream.launch_builder(&self.scales);
        launch
            .arg(pages)
            .arg(&parts)
            .arg(&part_words)
            .arg(&code_words);
        // SAFETY: reads and writes `parts` parts of the buffer's words.
        unsafe { launch.launch(CONFIG) }.w()?;
        Ok(())
    }

    /// bf16 numbers, nearly normal, of deviation `scale`.
    pub fn numbers(&self, bytes: &mut CudaViewMut<u8>, scale: f32) -> Result<()> {
        let words = bytes.len() / 4;
        let mut launch = self.stream.launch_builder(&self.numbers);
        launch.arg(bytes).arg(&words).arg(&2u32).arg(&scale);
        // SAFETY: writes as many words as the buffer has.
        unsafe { launch.launch(CONFIG) }.w()?;
        Ok(())
    }

    /// `count` of them.
    pub fn bf16(&self, count: usize, scale: f32) -> Result<CudaSlice<bf16>> {
        let mut numbers = self.stream.alloc_zeros::<bf16>(count).w()?;
        let words = count / 2;
        let mut launch = self.stream.launch_builder(&self.numbers);
        launch.arg(&mut numbers).arg(&words).arg(&3u32).arg(&scale);
        // SAFETY: two numbers a word.
        unsafe { launch.launch(CONFIG) }.w()?;
        Ok(numbers)
    }
}
