//! Timing of our CUDA kernels: device events, a cold L2, medians, and the copy bandwidth of the same run beside them.
#![allow(unsafe_code)]

mod decode;
mod demote;
mod random;
mod step;

pub use decode::{DecodeShape, DecodeTimes, decode};
pub use demote::{DemoteShape, DemoteTimes, demote};
pub use step::{StepTimes, step};

use candle_core::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys,
};
use serde::Serialize;
use std::sync::Arc;

use crate::{Error, Result, cuda};

/// Several times the L2 of any GPU.
const FLUSH_BYTES: usize = 512 << 20;
/// Large enough that starting and ending do not count.
const COPY_BYTES: usize = 2 << 30;
const WARM_UP: usize = 5;

/// What a kernel took, over repeats.
#[derive(Clone, Debug, Serialize)]
pub struct Timed {
    pub us_median: f64,
    /// The tenth and the ninetieth percentile.
    pub us_p10: f64,
    pub us_p90: f64,
    pub repeats: usize,
    /// That must be read and written, each once.
    pub bytes: u64,
    /// `bytes` over the median.
    pub tb_per_s: f64,
    /// A device-to-device copy in the same run, its reads and writes counted.
    pub copy_tb_per_s: f64,
}

impl Timed {
    /// Of the copy's bandwidth.
    pub fn share_of_copy(&self) -> f64 {
        self.tb_per_s / self.copy_tb_per_s
    }
}

/// Times work on one device.
pub struct Stopwatch {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    read_through: CudaFunction,
    flush: CudaSlice<u8>,
    sink: CudaSlice<u32>,
    copy_tb_per_s: f64,
}

impl Stopwatch {
    /// Measures the copy bandwidth first.
    ///
    /// # Errors
    /// Where the device has less than 4.5 GiB free, or fails.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let allocate = |bytes: usize| {
            device.alloc_zeros::<u8>(bytes).map_err(|e| {
                Error::invalid("bench", format!("{bytes} bytes for the measurement: {e}"))
                    .hint("free memory of the device, see `oscar devices`")
            })
        };
        let (from, mut to) = (allocate(COPY_BYTES)?, allocate(COPY_BYTES)?);
        let mut watch = Self {
            device: device.clone(),
            read_through: cuda::function(device, "bench", "read_through")?,
            flush: allocate(FLUSH_BYTES)?,
            sink: device.alloc_zeros(1)?,
            stream: stream.clone(),
            copy_tb_per_s: f64::NAN,
        };
        let times = watch.times(10, &mut || {
            stream.memcpy_dtod(&from, &mut to).map_err(driver)
        })?;
        watch.copy_tb_per_s = 2.0 * COPY_BYTES as f64 / percentile(&times, 0.5) / 1e6;
        Ok(watch)
    }

    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// `work` queues launches on the device's stream that must move `bytes`.
    ///
    /// # Errors
    /// Those of `work` and of the device.
    pub fn time(
        &mut self,
        repeats: usize,
        bytes: u64,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Timed> {
        let times = self.times(repeats.max(1), work)?;
        let us_median = percentile(&times, 0.5);
        Ok(Timed {
            us_median,
            us_p10: percentile(&times, 0.1),
            us_p90: percentile(&times, 0.9),
            repeats: times.len(),
            bytes,
            tb_per_s: bytes as f64 / us_median / 1e6,
            copy_tb_per_s: self.copy_tb_per_s,
        })
    }

    /// Microseconds, ascending.
    fn times(&mut self, repeats: usize, work: &mut dyn FnMut() -> Result<()>) -> Result<Vec<f64>> {
        for _ in 0..WARM_UP {
            work()?;
        }
        let event = || {
            self.stream
                .record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
                .map_err(driver)
        };
        let mut events = Vec::new();
        for _ in 0..repeats {
            let vectors = FLUSH_BYTES / 16;
            let config = LaunchConfig {
                grid_dim: (528, 1, 1),
                block_dim: (512, 1, 1),
                shared_mem_bytes: 0,
            };
            let mut launch = self.stream.launch_builder(&self.read_through);
            launch.arg(&self.flush).arg(&vectors).arg(&self.sink);
            // SAFETY: reads FLUSH_BYTES of a buffer of that size; `sink` holds one word.
            unsafe { launch.launch(config) }.map_err(driver)?;
            let start = event()?;
            work()?;
            events.push((start, event()?));
        }
        self.stream.synchronize().map_err(driver)?;
        let mut times = events
            .iter()
            .map(|(start, end)| Ok(f64::from(start.elapsed_ms(end).map_err(driver)?) * 1e3))
            .collect::<Result<Vec<_>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times)
    }
}

pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

#[allow(clippy::needless_pass_by_value)]
fn driver(error: DriverError) -> Error {
    Error::invalid("bench", format!("the GPU failed: {error}"))
}
