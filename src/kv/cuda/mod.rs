//! The cache on an NVIDIA GPU: what a token costs there, one kernel at a time.

pub mod append;
pub mod decode;
pub mod demote;
mod demote_hopper;
mod params;
pub mod prefill;
pub mod transform;

use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, CudaView};

pub use params::{EntryParams, PoolShape, Rows, SideParams};

use crate::kv::page::PAGE_TOKENS;
use crate::{Error, Result};

/// Where the tokens of a batch lie: the same pages in every layer, so that these are made once a step.
///
/// A sequence is its window pages (BF16: sink, then recent; all full but the last) and its history pages (INT2, all
/// full). Attention knows no order among them.
pub struct Tables<'a> {
    /// INT2 page ids, (batch, most history pages of a sequence); a row counts as far as `history_pages` says.
    pub history: CudaView<'a, i32>,
    /// (batch)
    pub history_pages: CudaView<'a, i32>,
    /// BF16 page ids, (batch, most window pages of a sequence); a row counts as far as `window_tokens` says.
    pub windows: CudaView<'a, i32>,
    /// (batch)
    pub window_tokens: CudaView<'a, i32>,
}

impl Tables<'_> {
    pub fn batch(&self) -> usize {
        self.window_tokens.len()
    }

    /// Columns of `history` and of `windows`.
    ///
    /// # Errors
    /// Where the four do not belong to one batch.
    fn columns(&self) -> Result<(usize, usize)> {
        let batch = self.batch();
        let fits = batch > 0
            && self.history_pages.len() == batch
            && self.history.len().is_multiple_of(batch)
            && self.windows.len().is_multiple_of(batch);
        if fits {
            return Ok((self.history.len() / batch, self.windows.len() / batch));
        }
        Err(Error::invalid(
            "page tables",
            format!(
                "{} history ids, {} history counts, {} window ids and {batch} window counts are no batch",
                self.history.len(),
                self.history_pages.len(),
                self.windows.len(),
            ),
        ))
    }

    /// Reads the tables back and looks at every id: for debugging, since it waits for the GPU.
    ///
    /// # Errors
    /// Where a sequence has more pages than columns, or names a page that is not one of `int2_pages` or `bf16_pages`.
    pub fn check(
        &self,
        stream: &Arc<CudaStream>,
        int2_pages: usize,
        bf16_pages: usize,
    ) -> Result<()> {
        let (history_columns, window_columns) = self.columns()?;
        let read = |view: &CudaView<'_, i32>| -> Result<Vec<i32>> {
            let mut host = vec![0; view.len()];
            stream.memcpy_dtoh(view, &mut host).w()?;
            Ok(host)
        };
        let (history, windows) = (read(&self.history)?, read(&self.windows)?);
        let (pages, tokens) = (read(&self.history_pages)?, read(&self.window_tokens)?);
        stream.synchronize().w()?;
        let sound = |kind: &str, b: usize, table: &[i32], columns, count: usize, there: usize| {
            let place = format!("{kind} of sequence {b}");
            if count > columns {
                let problem = format!("{count} pages do not fit the table's {columns} columns");
                return Err(Error::invalid(place, problem));
            }
            let row = &table[b * columns..][..count];
            let wrong = |id: &i32| usize::try_from(*id).map_or(true, |id| id >= there);
            match row.iter().position(wrong) {
                None => Ok(()),
                Some(at) => Err(Error::invalid(
                    place,
                    format!("entry {at} is page {}, and the pool has {there}", row[at]),
                )),
            }
        };
        for (b, (&pages, &tokens)) in pages.iter().zip(&tokens).enumerate() {
            let (Ok(pages), Ok(tokens)) = (usize::try_from(pages), usize::try_from(tokens)) else {
                let problem = format!("{pages} history pages and {tokens} window tokens");
                return Err(Error::invalid(format!("sequence {b}"), problem));
            };
            sound("history", b, &history, history_columns, pages, int2_pages)?;
            let pages = tokens.div_ceil(PAGE_TOKENS);
            sound("windows", b, &windows, window_columns, pages, bf16_pages)?;
        }
        Ok(())
    }
}
