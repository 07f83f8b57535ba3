//! The cache that serves: a pool of pages that sequences hold, share and give back.
//!
//! ```text
//!  k, v ──(x − mean)·encode──▶ bf16 ──▶ [ sink | recent ] BF16 pages
//!                                              │ the oldest page, when `recent` is full: clip, round, pack
//!                                              ▼
//!                                         [ history ] INT2 pages
//!  q ──·query──▶ attention over all three, one softmax ──·decode + mean──▶ o
//! ```
//!
//! A page holds [`PAGE_TOKENS`] tokens of one layer and one KV head; a page's number means the same slot in every
//! layer, so one table a sequence serves all. A sequence's first tokens stay in BF16 (`sink`), as do its latest: when
//! a token comes and `recent` is full, its oldest page becomes history. So a query reads between `recent` − 63 and
//! `recent` latest tokens exactly. What a sequence holds follows from its length alone ([`Rule`]).
//!
//! [`Pool`] keeps the books; a [`Store`] keeps the bytes, on the CPU or a GPU.

pub mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod ledger;
mod transforms;

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use candle_core::CudaDevice;
use candle_core::{Device, Tensor};

pub use ledger::{Moves, PageCounts, Rule, StepSequence};
pub use transforms::Transforms;

use super::attention::Dims;
use super::page::{Arrangement, PAGE_TOKENS, PageLayout, Side};
use crate::zoo::Windows;
use crate::{Error, Result};
use ledger::{LEDGER_BYTES, Ledger};

/// A page's number among those of its kind.
pub type PageId = u32;

/// A sequence of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    Bf16,
    Int2,
}

/// What a pool is made for.
#[derive(Clone, Debug)]
pub struct PoolShape {
    /// Layers of the model.
    pub layers: usize,
    pub dims: Dims,
    /// Both a multiple of [`PAGE_TOKENS`].
    pub windows: Windows,
    /// `None`: every token stays in BF16, as it came.
    pub transforms: Option<Arc<Transforms>>,
}

impl PoolShape {
    /// # Errors
    /// Windows that are not whole pages, an entry that does not fit the model.
    pub fn rule(&self) -> Result<Rule> {
        let Windows {
            sink_tokens: sink,
            recent_tokens: recent,
        } = self.windows;
        self.windows.check()?;
        let whole = sink.is_multiple_of(PAGE_TOKENS) && recent.is_multiple_of(PAGE_TOKENS);
        if !whole || recent == 0 {
            return Err(Error::invalid(
                "cache pool",
                format!("windows of {sink} and {recent} tokens are not whole pages of {PAGE_TOKENS}"),
            )
            .hint(format!(
                "give --sink and --recent as multiples of {PAGE_TOKENS}, --recent at least {PAGE_TOKENS}"
            )));
        }
        if let Some(transforms) = &self.transforms {
            transforms.check(self.layers, self.dims)?;
        }
        Ok(Rule {
            sink_pages: sink / PAGE_TOKENS,
            recent_pages: recent / PAGE_TOKENS,
            demotes: self.transforms.is_some(),
        })
    }

    /// # Errors
    /// A head_dim or group that no page has.
    pub fn layout(&self, arrangement: Arrangement) -> Result<PageLayout> {
        let d = self.dims.head_dim;
        let group = self.transforms.as_ref().map_or(d, |t| t.group());
        let layout = PageLayout::new(d, group, arrangement)?;
        if group.is_multiple_of(4) {
            return Ok(layout);
        }
        Err(Error::invalid(
            "cache pool",
            format!("groups of {group} channels do not fill whole bytes"),
        )
        .hint("fit the entry with a group that is a multiple of 4"))
    }

    /// Bytes of one page of each kind in all layers, its share of the tables counted.
    pub fn page_bytes(&self) -> Result<PageCounts> {
        let layout = self.layout(Arrangement::Rows)?;
        let pages = self.layers * self.dims.kv_heads;
        Ok(PageCounts {
            bf16: pages * layout.bf16_bytes() + LEDGER_BYTES,
            int2: pages * layout.int2_bytes() + LEDGER_BYTES,
        })
    }

    /// Pages that `sequences` of up to `tokens` tokens need, where a step appends at most `chunk` tokens to each.
    pub fn pages_for(&self, sequences: usize, tokens: usize, chunk: usize) -> Result<PageCounts> {
        let one = PageCounts::of_sequence(self.rule()?, tokens, chunk);
        Ok(PageCounts {
            bf16: one.bf16 * sequences,
            int2: one.int2 * sequences,
        })
    }

    /// Bytes of a pool of so many pages, the transforms counted.
    pub fn bytes(&self, pages: PageCounts) -> Result<usize> {
        let each = self.page_bytes()?;
        let transforms = self.transforms.as_ref().map_or(0, |t| t.bytes());
        Ok(pages.bf16 * each.bf16 + pages.int2 * each.int2 + transforms)
    }
}

/// See [`Store::gpu_pages`].
#[cfg(feature = "cuda")]
pub struct GpuPages<'a> {
    pub layout: PageLayout,
    pub bf16: &'a mut candle_core::cuda_backend::cudarc::driver::CudaSlice<u8>,
    pub int2: &'a mut candle_core::cuda_backend::cudarc::driver::CudaSlice<u8>,
}

/// Where the pages lie. Its methods are called in the order of a step: `begin`, `attend` of every layer, `finish`.
pub trait Store: Send {
    /// Carries out `moves` in all layers, and takes note of who attends to what.
    fn begin(&mut self, moves: &Moves, step: Vec<StepSequence>) -> Result<()>;

    /// Appends the step's keys and values to the windows and attends to all that each token sees. `q` (tokens, heads,
    /// head_dim), `k` and `v` (tokens, kv_heads, head_dim), the step's sequences one after the other; returns o, as q.
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;

    /// Where `attend` only queues work for a GPU: equal for steps that queue the same, so that what one of them queued
    /// can be replayed in the others.
    fn replay_key(&self) -> Option<u64> {
        None
    }

    /// BF16 and INT2 pages where they lie on a GPU, for measurements that fill them.
    #[cfg(feature = "cuda")]
    fn gpu_pages(&mut self) -> Option<GpuPages<'_>> {
        None
    }

    /// Carries out `moves` in all layers.
    fn finish(&mut self, moves: &Moves) -> Result<()>;

    /// All rows (tokens, head_dim) of a page as attention reads them, encoded: for tests.
    fn read(
        &self,
        layer: usize,
        kv_head: usize,
        side: Side,
        kind: PageKind,
        page: PageId,
    ) -> Result<Vec<f32>>;
}

/// Sequences of tokens in the pages of one store.
pub struct Pool {
    shape: PoolShape,
    ledger: Ledger,
    store: Box<dyn Store>,
    page_bytes: PageCounts,
    /// Of the step that is under way.
    step_tokens: usize,
    warning: Option<String>,
}

/// Pages and bytes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub used: PageCounts,
    pub capacity: PageCounts,
    pub used_bytes: usize,
    pub capacity_bytes: usize,
}

impl Pool {
    /// A pool of `capacity` pages in CPU memory.
    ///
    /// # Errors
    /// A shape that no page has, windows that are not whole pages, an entry that does not fit; too little memory.
    pub fn cpu(shape: PoolShape, capacity: PageCounts) -> Result<Self> {
        let layout = shape.layout(Arrangement::Rows)?;
        let rule = shape.rule()?;
        let store = cpu::CpuStore::new(&shape, layout, capacity)?;
        Self::new(shape, rule, capacity, Box::new(store))
    }

    /// A pool where the model runs. [`Self::warning`] says where the fast kernels do not.
    ///
    /// # Errors
    /// As [`Self::cpu`].
    pub fn on(device: &Device, shape: PoolShape, capacity: PageCounts) -> Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let rule = shape.rule()?;
                let (store, warning) = cuda::CudaStore::new(device, &shape, capacity)?;
                let pool = Self::new(shape, rule, capacity, Box::new(store))?;
                Ok(Self { warning, ..pool })
            }
            _ => Self::cpu(shape, capacity),
        }
    }

    /// A pool on a GPU with pages of one arrangement, for tests.
    ///
    /// # Errors
    /// As [`Self::on`].
    #[cfg(feature = "cuda")]
    pub fn cuda(
        device: &CudaDevice,
        shape: PoolShape,
        capacity: PageCounts,
        arrangement: Arrangement,
    ) -> Result<Self> {
        let rule = shape.rule()?;
        let store = cuda::CudaStore::arranged(device, &shape, capacity, arrangement)?;
        Self::new(shape, rule, capacity, Box::new(store))
    }

    fn new(
        shape: PoolShape,
        rule: Rule,
        capacity: PageCounts,
        store: Box<dyn Store>,
    ) -> Result<Self> {
        let page_bytes = shape.page_bytes()?;
        Ok(Self {
            ledger: Ledger::new(rule, capacity, page_bytes),
            shape,
            store,
            page_bytes,
            step_tokens: 0,
            warning: None,
        })
    }

    pub fn shape(&self) -> &PoolShape {
        &self.shape
    }

    /// What a person should know about the speed of this pool.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// A sequence of no tokens and no pages.
    pub fn create(&mut self) -> SequenceId {
        self.ledger.create()
    }

    /// A sequence with the tokens of `id`. The two share every page, until one of them goes on in a page that is
    /// partly filled: it then gets a copy of its own.
    ///
    /// # Errors
    /// No such sequence.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        self.ledger.fork(id)
    }

    /// Gives back every page that no other sequence holds.
    ///
    /// # Errors
    /// No such sequence.
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.ledger.free(id)
    }

    /// # Errors
    /// No such sequence.
    pub fn tokens(&self, id: SequenceId) -> Result<usize> {
        self.ledger.tokens(id)
    }

    /// Begins a step that appends so many tokens to each of these sequences: takes all pages that it needs. A step
    /// that was begun before and not finished is undone.
    ///
    /// # Errors
    /// Out of pages, with the numbers; a sequence that does not exist or is named twice; no tokens. Every sequence is
    /// then as it was.
    pub fn begin(&mut self, appends: &[(SequenceId, usize)]) -> Result<()> {
        self.step_tokens = 0;
        let moves = self.ledger.begin(appends)?;
        self.store.begin(&moves, self.ledger.step()?)?;
        self.step_tokens = appends.iter().map(|&(_, n)| n).sum();
        Ok(())
    }

    /// Appends the step's keys and values of one layer and attends: see [`Store::attend`].
    ///
    /// # Errors
    /// Shapes that do not fit the pool's or the step's; a layer beyond the last.
    pub fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Dims {
            heads,
            kv_heads,
            head_dim,
        } = self.shape.dims;
        let tokens = self.step_tokens;
        let kv = [tokens, kv_heads, head_dim];
        let fits = q.dims() == [tokens, heads, head_dim] && k.dims() == kv && v.dims() == kv;
        if tokens == 0 || layer >= self.shape.layers || !fits {
            return Err(Error::invalid(
                "cache pool",
                format!(
                    "q {:?}, k {:?} and v {:?} of layer {layer} do not fit a step of {tokens} tokens of {} layers",
                    q.shape(),
                    k.shape(),
                    v.shape(),
                    self.shape.layers
                ),
            ));
        }
        self.store.attend(layer, q, k, v)
    }

    /// [`Store::gpu_pages`].
    #[cfg(feature = "cuda")]
    pub(crate) fn gpu_pages(&mut self) -> Option<GpuPages<'_>> {
        self.store.gpu_pages()
    }

    /// [`Store::replay_key`] of the step that is under way.
    #[cfg(feature = "cuda")]
    pub(crate) fn replay_key(&self) -> Option<u64> {
        self.store.replay_key()
    }

    /// Ends the step: its tokens belong to their sequences, and what they pushed out of `recent` becomes history.
    ///
    /// # Errors
    /// No step is under way.
    pub fn finish(&mut self) -> Result<()> {
        self.step_tokens = 0;
        let moves = self.ledger.finish()?;
        self.store.finish(&moves)
    }

    /// All tokens of a sequence, (tokens, head_dim), as attention reads them from one layer, encoded: sink, history,
    /// recent; the tokens of a step that is under way are among them.
    ///
    /// # Errors
    /// No such sequence.
    pub fn read(
        &self,
        id: SequenceId,
        layer: usize,
        kv_head: usize,
        side: Side,
    ) -> Result<Vec<f32>> {
        let pages = self.ledger.held(id)?;
        let sink = (self.shape.windows.sink_tokens / PAGE_TOKENS).min(pages.windows.len());
        let (sink, recent) = pages.windows.split_at(sink);
        let of = |kind, pages: &[PageId]| {
            let pages: Vec<_> = pages.iter().map(|&page| (kind, page)).collect();
            pages
        };
        let mut rows = Vec::new();
        for (kind, page) in [
            of(PageKind::Bf16, sink),
            of(PageKind::Int2, &pages.history),
            of(PageKind::Bf16, recent),
        ]
        .concat()
        {
            rows.extend(self.store.read(layer, kv_head, side, kind, page)?);
        }
        let tokens = self.tokens(id)? + pages.new_tokens;
        rows.truncate(tokens * self.shape.dims.head_dim);
        Ok(rows)
    }

    pub fn usage(&self) -> Usage {
        let (used, capacity) = (self.ledger.used(), self.ledger.capacity());
        let bytes = |pages: PageCounts| {
            pages.bf16 * self.page_bytes.bf16 + pages.int2 * self.page_bytes.int2
        };
        let transforms = self.shape.transforms.as_ref().map_or(0, |t| t.bytes());
        Usage {
            used,
            capacity,
            used_bytes: bytes(used) + transforms,
            capacity_bytes: bytes(capacity) + transforms,
        }
    }

    /// Bytes that `id` holds, shared pages counted in full.
    ///
    /// # Errors
    /// No such sequence.
    pub fn sequence_bytes(&self, id: SequenceId) -> Result<usize> {
        let pages = self.ledger.held(id)?;
        Ok(pages.windows.len() * self.page_bytes.bf16 + pages.history.len() * self.page_bytes.int2)
    }

    /// Whether every page has as many holders as there are sequences that name it: for tests.
    pub fn adds_up(&self) -> bool {
        self.ledger.adds_up()
    }
}
