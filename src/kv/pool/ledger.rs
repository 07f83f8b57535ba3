//! Which pages exist and which sequence holds them: numbers alone, no bytes and no device.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{PageId, SequenceId};
use crate::kv::page::PAGE_TOKENS;
use crate::{Error, Result};

/// How many pages of each kind: held, needed or there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    pub bf16: usize,
    pub int2: usize,
}

impl PageCounts {
    /// Pages that one sequence of `tokens` holds at most while it takes `chunk` tokens a step.
    pub fn of_sequence(rule: Rule, tokens: usize, chunk: usize) -> Self {
        let int2 = rule.history_pages(tokens);
        let bf16 = if rule.demotes {
            let windows = rule.sink_pages + rule.recent_pages + chunk.div_ceil(PAGE_TOKENS);
            windows.min(tokens.div_ceil(PAGE_TOKENS))
        } else {
            tokens.div_ceil(PAGE_TOKENS)
        };
        Self { bf16, int2 }
    }
}

/// Where the tokens of a sequence lie, by its length alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub sink_pages: usize,
    pub recent_pages: usize,
    /// Whether what leaves `recent` becomes INT2; else all pages stay BF16.
    pub demotes: bool,
}

impl Rule {
    /// INT2 pages of a sequence of `tokens`: as few as leave no more than `recent` tokens behind them.
    pub fn history_pages(&self, tokens: usize) -> usize {
        let windows = (self.sink_pages + self.recent_pages) * PAGE_TOKENS;
        if self.demotes {
            tokens.saturating_sub(windows).div_ceil(PAGE_TOKENS)
        } else {
            0
        }
    }
}

const NONE: PageId = PageId::MAX;

/// Pages of one kind.
#[derive(Debug)]
struct Pages {
    holders: Vec<u32>,
    free: Vec<PageId>,
    /// The page of the other kind with the same tokens, while both live: sequences that share a BF16 page go on
    /// sharing once each of them demotes it.
    twin: Vec<PageId>,
}

impl Pages {
    fn new(n: usize) -> Self {
        Self {
            holders: vec![0; n],
            free: (0..n as PageId).rev().collect(),
            twin: vec![NONE; n],
        }
    }

    fn take(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    fn hold(&mut self, page: PageId) {
        self.holders[page as usize] += 1;
    }

    /// Returns the twin that is one no more where nobody holds the page now.
    fn release(&mut self, page: PageId) -> Option<PageId> {
        let at = page as usize;
        self.holders[at] -= 1;
        if self.holders[at] > 0 {
            return None;
        }
        self.free.push(page);
        let twin = std::mem::replace(&mut self.twin[at], NONE);
        (twin != NONE).then_some(twin)
    }

    fn used(&self) -> usize {
        self.holders.len() - self.free.len()
    }
}

/// What a step does to pages, in every layer alike: demotions first, then copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// (BF16 page, INT2 page)
    pub demotions: Vec<(PageId, PageId)>,
    /// (BF16 page, its copy)
    pub copies: Vec<(PageId, PageId)>,
}

/// One sequence of a step, as attention sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSequence {
    /// Tokens that the step appends; they are the last ones of the windows.
    pub new_tokens: usize,
    /// Tokens in BF16 pages, the new ones included; all of these pages are full but the last.
    pub window_tokens: usize,
    pub windows: Vec<PageId>,
    /// INT2 pages, all full.
    pub history: Vec<PageId>,
}

#[derive(Clone, Debug, Default)]
struct Sequence {
    tokens: usize,
    history: Vec<PageId>,
    /// Sink, then recent.
    windows: Vec<PageId>,
}

impl Sequence {
    fn window_tokens(&self) -> usize {
        self.tokens - self.history.len() * PAGE_TOKENS
    }
}

#[derive(Debug, Default)]
struct Pending {
    appends: Vec<(SequenceId, usize)>,
    /// INT2 pages for what [`Ledger::finish`] demotes.
    reserved: Vec<PageId>,
}

#[derive(Debug)]
pub struct Ledger {
    rule: Rule,
    bf16: Pages,
    int2: Pages,
    sequences: BTreeMap<SequenceId, Sequence>,
    next: u64,
    pending: Option<Pending>,
    /// Of one page of each kind, all that it takes.
    page_bytes: PageCounts,
}

/// Bytes a page costs here: holders, twin, its place among the free ones and one in a page table.
pub const LEDGER_BYTES: usize = 4 * size_of::<PageId>();

impl Ledger {
    pub fn new(rule: Rule, capacity: PageCounts, page_bytes: PageCounts) -> Self {
        Self {
            rule,
            bf16: Pages::new(capacity.bf16),
            int2: Pages::new(capacity.int2),
            sequences: BTreeMap::new(),
            next: 0,
            pending: None,
            page_bytes,
        }
    }

    pub fn capacity(&self) -> PageCounts {
        PageCounts {
            bf16: self.bf16.holders.len(),
            int2: self.int2.holders.len(),
        }
    }

    pub fn used(&self) -> PageCounts {
        PageCounts {
            bf16: self.bf16.used(),
            int2: self.int2.used(),
        }
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or_else(|| unknown(id))
    }

    pub fn tokens(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.tokens)
    }

    pub fn create(&mut self) -> SequenceId {
        self.insert(Sequence::default())
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, sequence);
        id
    }

    /// A sequence with the same tokens, which takes no page until one of the two goes on.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        self.abort();
        let sequence = self.get(id)?.clone();
        for &page in &sequence.windows {
            self.bf16.hold(page);
        }
        for &page in &sequence.history {
            self.int2.hold(page);
        }
        Ok(self.insert(sequence))
    }

    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.abort();
        let sequence = self.sequences.remove(&id).ok_or_else(|| unknown(id))?;
        for page in sequence.windows {
            self.release_bf16(page);
        }
        for page in sequence.history {
            self.release_int2(page);
        }
        Ok(())
    }

    fn release_bf16(&mut self, page: PageId) {
        if let Some(twin) = self.bf16.release(page) {
            self.int2.twin[twin as usize] = NONE;
        }
    }

    fn release_int2(&mut self, page: PageId) {
        if let Some(twin) = self.int2.release(page) {
            self.bf16.twin[twin as usize] = NONE;
        }
    }

    /// Takes every page that appending so many tokens to these sequences needs, or none.
    ///
    /// A page is demoted now where even one more token would not fit `recent`. What a longer append pushes out beyond
    /// that is demoted by [`Self::finish`], so that all of its tokens still read it exactly.
    ///
    /// # Errors
    /// The pages needed and there, where they do not suffice: nothing has changed then. A sequence that does not
    /// exist or is named twice; no tokens.
    pub fn begin(&mut self, appends: &[(SequenceId, usize)]) -> Result<Moves> {
        self.abort();
        let need = self.need(appends)?;
        if need.bf16.0 > need.bf16.1 || need.int2.0 > need.int2.1 {
            return Err(self.out_of_pages(&need));
        }

        let mut moves = Moves::default();
        for &(id, _) in appends {
            let now = self.demoted_at(id, 1)?;
            self.demote(id, now, &mut Vec::new(), &mut moves)?;
        }
        let mut reserved = Vec::new();
        for &(id, new) in appends {
            let later = self.demoted_at(id, new)?;
            for _ in 0..later {
                reserved.push(self.int2.take().ok_or_else(lost)?);
            }
            let mut sequence = self.sequences.remove(&id).ok_or_else(|| unknown(id))?;
            let last = sequence.windows.last().copied();
            if let Some(page) =
                last.filter(|_| !sequence.window_tokens().is_multiple_of(PAGE_TOKENS))
                && self.bf16.holders[page as usize] > 1
            {
                let copy = self.bf16.take().ok_or_else(lost)?;
                self.release_bf16(page);
                moves.copies.push((page, copy));
                sequence.windows.pop();
                sequence.windows.push(copy);
            }
            let pages = (sequence.window_tokens() + new).div_ceil(PAGE_TOKENS);
            while sequence.windows.len() < pages {
                sequence.windows.push(self.bf16.take().ok_or_else(lost)?);
            }
            self.sequences.insert(id, sequence);
        }
        self.pending = Some(Pending {
            appends: appends.to_vec(),
            reserved,
        });
        Ok(moves)
    }

    /// Pages that `id` has to demote before it holds `new` tokens more.
    fn demoted_at(&self, id: SequenceId, new: usize) -> Result<usize> {
        let sequence = self.get(id)?;
        let pages = self.rule.history_pages(sequence.tokens + new);
        Ok(pages.saturating_sub(sequence.history.len()))
    }

    /// (needed, at hand) of each kind.
    fn need(&self, appends: &[(SequenceId, usize)]) -> Result<Need> {
        let (mut bf16, mut int2) = (0, 0);
        let mut freed = 0;
        let mut named = HashSet::new();
        let mut demoted = HashSet::new();
        let mut released: HashMap<PageId, u32> = HashMap::new();
        for &(id, new) in appends {
            if !named.insert(id) || new == 0 {
                let problem = format!("cannot append {new} tokens to {id} in one step");
                return Err(Error::invalid("cache pool", problem)
                    .hint("name every sequence once, with at least one token"));
            }
            let sequence = self.get(id)?;
            let now = self.demoted_at(id, 1)?;
            int2 += self.demoted_at(id, new)? - now;
            for &page in sequence.windows.iter().skip(self.rule.sink_pages).take(now) {
                let at = page as usize;
                int2 += usize::from(self.bf16.twin[at] == NONE && demoted.insert(page));
                let released = released.entry(page).or_default();
                *released += 1;
                freed += usize::from(*released == self.bf16.holders[at]);
            }
        }
        for &(id, new) in appends {
            let sequence = self.get(id)?;
            let kept = sequence.windows.len() - self.demoted_at(id, 1)?;
            let tokens = sequence.window_tokens() - (sequence.windows.len() - kept) * PAGE_TOKENS;
            bf16 += (tokens + new).div_ceil(PAGE_TOKENS) - kept;
            if let Some(&page) = sequence.windows.last()
                && !tokens.is_multiple_of(PAGE_TOKENS)
            {
                let released = released.entry(page).or_default();
                if self.bf16.holders[page as usize] - *released > 1 {
                    bf16 += 1;
                    *released += 1;
                }
            }
        }
        Ok(Need {
            bf16: (bf16, self.bf16.free.len() + freed),
            int2: (int2, self.int2.free.len()),
        })
    }

    fn out_of_pages(&self, need: &Need) -> Error {
        let (capacity, bytes) = (self.capacity(), self.page_bytes);
        let kind = |name, (need, free): (usize, usize), all: usize, bytes: usize| {
            format!(
                "{need} {name} pages ({} bytes), where {free} of {all} are free ({} of {} bytes)",
                need * bytes,
                free * bytes,
                all * bytes
            )
        };
        Error::invalid(
            "cache pool",
            format!(
                "out of memory: the step needs {}, and {}",
                kind("BF16", need.bf16, capacity.bf16, bytes.bf16),
                kind("INT2", need.int2, capacity.int2, bytes.int2)
            ),
        )
        .hint("free a sequence, or make the pool larger")
    }

    /// Turns the `n` oldest recent pages of `id` into history.
    fn demote(
        &mut self,
        id: SequenceId,
        n: usize,
        reserved: &mut Vec<PageId>,
        moves: &mut Moves,
    ) -> Result<()> {
        let sink = self.rule.sink_pages;
        let sequence = self.sequences.get_mut(&id).ok_or_else(|| unknown(id))?;
        if n == 0 {
            return Ok(());
        }
        let pages: Vec<_> = sequence.windows.drain(sink..sink + n).collect();
        for page in pages {
            let at = page as usize;
            let twin = self.bf16.twin[at];
            let code = if twin == NONE {
                let code = reserved.pop().or_else(|| self.int2.take());
                let code = code.ok_or_else(lost)?;
                moves.demotions.push((page, code));
                self.bf16.twin[at] = code;
                self.int2.twin[code as usize] = page;
                code
            } else {
                self.int2.hold(twin);
                twin
            };
            sequence.history.push(code);
            if let Some(twin) = self.bf16.release(page) {
                self.int2.twin[twin as usize] = NONE;
            }
        }
        Ok(())
    }

    /// The sequences of the step that is under way, in its order.
    pub fn step(&self) -> Result<Vec<StepSequence>> {
        let pending = self.pending.as_ref().ok_or_else(no_step)?;
        let sequences = pending.appends.iter().map(|&(id, new_tokens)| {
            let sequence = self.get(id)?;
            Ok(StepSequence {
                new_tokens,
                window_tokens: sequence.window_tokens() + new_tokens,
                windows: sequence.windows.clone(),
                history: sequence.history.clone(),
            })
        });
        sequences.collect()
    }

    /// The pages and tokens of `id`, those of a step that is under way counted.
    pub fn held(&self, id: SequenceId) -> Result<StepSequence> {
        let sequence = self.get(id)?;
        let appends = self.pending.iter().flat_map(|pending| &pending.appends);
        let new_tokens = appends.filter(|(of, _)| *of == id).map(|(_, n)| n).sum();
        Ok(StepSequence {
            new_tokens,
            window_tokens: sequence.window_tokens() + new_tokens,
            windows: sequence.windows.clone(),
            history: sequence.history.clone(),
        })
    }

    /// Ends the step: its tokens are part of their sequences now, and what they pushed out of `recent` is demoted.
    pub fn finish(&mut self) -> Result<Moves> {
        let Pending {
            appends,
            mut reserved,
        } = self.pending.take().ok_or_else(no_step)?;
        let mut moves = Moves::default();
        for (id, new) in appends {
            let n = self.demoted_at(id, new)?;
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.tokens += new;
            }
            self.demote(id, n, &mut reserved, &mut moves)?;
        }
        for page in reserved {
            self.release_int2(page);
        }
        Ok(moves)
    }

    /// Undoes a step that was begun and not finished: its sequences hold the tokens that they held before.
    pub fn abort(&mut self) {
        let Some(Pending { appends, reserved }) = self.pending.take() else {
            return;
        };
        for page in reserved {
            self.release_int2(page);
        }
        for (id, _) in appends {
            let Some(sequence) = self.sequences.get_mut(&id) else {
                continue;
            };
            let pages = sequence.window_tokens().div_ceil(PAGE_TOKENS);
            for page in sequence.windows.split_off(pages) {
                self.release_bf16(page);
            }
        }
    }

    /// Whether every page has just as many holders as sequences name it.
    pub fn adds_up(&self) -> bool {
        let mut held = [
            vec![0; self.bf16.holders.len()],
            vec![0; self.int2.holders.len()],
        ];
        for sequence in self.sequences.values() {
            for (held, pages) in held.iter_mut().zip([&sequence.windows, &sequence.history]) {
                for &page in pages {
                    held[page as usize] += 1;
                }
            }
        }
        for page in self.pending.iter().flat_map(|pending| &pending.reserved) {
            held[1][*page as usize] += 1;
        }
        [&self.bf16, &self.int2]
            .iter()
            .zip(&held)
            .all(|(pages, held)| {
                let free = held.iter().filter(|&&n| n == 0).count();
                pages.holders == *held && pages.free.len() == free
            })
    }
}

struct Need {
    bf16: (usize, usize),
    int2: (usize, usize),
}

fn unknown(id: SequenceId) -> Error {
    Error::invalid("cache pool", format!("there is no {id}"))
}

fn no_step() -> Error {
    Error::invalid("cache pool", "no step is under way").hint("call `begin` first")
}

/// What [`Ledger::need`] counted was not there.
fn lost() -> Error {
    Error::numeric("cache pool", "the count of free pages is wrong")
}
