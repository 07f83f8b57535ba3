//! All layers of a decode step as one CUDA graph: queued once, replayed for every token after.
//!
//! A graph reads and writes the memory it was captured with: the hidden states that go in, how far they turn, and what
//! comes out lie in tensors of its own; the cache's tables lie where they lie as long as the pool's key says so.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::CudaGraph;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::{CudaDevice, Tensor};

use super::Pooled;
use crate::kv::pool::Pool;
use crate::model::{DecoderLayer, Turns};
use crate::{Error, Result};

pub(super) struct StepGraph {
    key: u64,
    graph: CudaGraph,
    hidden: Tensor,
    turns: Turns,
    out: Tensor,
}

impl StepGraph {
    /// Runs the pool's step that is under way, and captures it. Returns the step's output as well.
    ///
    /// # Errors
    /// Those of the layers; a driver that refuses to capture: the step was then carried out all the same.
    pub fn capture(
        device: &CudaDevice,
        layers: &[DecoderLayer],
        pool: &mut Pool,
        key: u64,
        hidden: Tensor,
        turns: Turns,
    ) -> Result<(Tensor, Result<Self>)> {
        let out = hidden.zeros_like()?;
        let mut queue = || -> Result<()> {
            let mut x = hidden.clone();
            for layer in layers {
                x = layer.queue(&x, &turns, &mut Pooled(pool))?;
            }
            Ok(out.slice_set(&x, 0, 0)?)
        };
        // Small arrays that kernels are handed must be on the device before a capture, which cannot copy from the host.
        let _kept = device.enable_cuda_graph_htod_cache();
        queue()?;
        let step = out.copy()?;
        let stream = device.cuda_stream();
        let mut captured = || -> Result<CudaGraph> {
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).w()?;
            let queued = queue();
            // Whatever happened, the stream must leave its capture.
            let graph = stream.end_capture(CUgraphInstantiate_flags(0)).w();
            queued?;
            graph?.ok_or_else(|| Error::numeric("decode step", "nothing was captured"))
        };
        let graph = captured();
        Ok((
            step,
            graph.map(|graph| Self {
                key,
                graph,
                hidden,
                turns,
                out,
            }),
        ))
    }

    /// Whether a step of this key queues what was captured.
    pub fn fits(&self, key: u64) -> bool {
        self.key == key
    }

    /// The pool's step that is under way: hidden states (batch, hidden) in and out.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn replay(&self, hidden: &Tensor, turns: &Turns) -> Result<Tensor> {
        self.hidden.slice_set(hidden, 0, 0)?;
        self.turns.cos.slice_set(&turns.cos, 0, 0)?;
        self.turns.sin.slice_set(&turns.sin, 0, 0)?;
        self.launch()?;
        Ok(self.out.copy()?)
    }

    /// The same step again.
    ///
    /// # Errors
    /// A driver that refuses.
    pub fn launch(&self) -> Result<()> {
        Ok(self.graph.launch().w()?)
    }
}
