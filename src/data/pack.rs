//! Token ids into sequences: packed prompts for calibration, joined windows for evaluation.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::files::hex;
use crate::model::PackedSequence;
use crate::{Error, Result};

/// One prompt's token ids and where the prompt stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizedPrompt {
    /// File, and line or row where the file holds more than one.
    pub place: String,
    pub token_ids: Vec<u32>,
}

/// What to do with a prompt of more than `seq_len` tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlong {
    /// Its pieces of `seq_len` tokens become prompts of their own.
    #[default]
    Split,
    /// Keep its first `seq_len` tokens.
    Truncate,
    /// Refuse it by name.
    Error,
}

/// Sequences for one run, and the fingerprint of all their tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    /// Of at most `seq_len` tokens each.
    pub sequences: Vec<PackedSequence>,
    /// Of one prompt each; no token of theirs is in `sequences`. Empty in an evaluation corpus.
    pub holdout: Vec<PackedSequence>,
    /// Prompts in `sequences`: pieces of split prompts and evaluation windows count as one each.
    pub prompts: usize,
    /// Tokens in `sequences`.
    pub tokens: usize,
    /// Tokens in `holdout`.
    pub holdout_tokens: usize,
    pub seq_len: usize,
    pub seed: u64,
    /// SHA-256 over `sequences`, then `holdout`, all numbers as little-endian u32: the number of sequences, and of each
    /// sequence the number of its prompts, their lengths and the ids.
    pub token_ids_sha256: String,
}

/// How [`pack`] fills sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackOptions {
    pub seq_len: usize,
    /// Calibration tokens, the holdout not counted; `None` takes all there are.
    pub budget_tokens: Option<usize>,
    pub seed: u64,
    pub overlong: Overlong,
    /// Tokens to hold out, 0 for none; never more than a quarter of all tokens.
    pub holdout_tokens: usize,
    /// Longest held-out sequence, capped by `seq_len`: the smaller, the more documents are held out.
    pub holdout_seq_len: usize,
    /// Fewer calibration tokens than this are refused; see [`min_calibration_tokens`].
    pub min_tokens: usize,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            seq_len: 4096,
            budget_tokens: None,
            seed: 0,
            overlong: Overlong::default(),
            holdout_tokens: DEFAULT_HOLDOUT_TOKENS,
            holdout_seq_len: usize::MAX,
            min_tokens: MIN_CALIBRATION_TOKENS,
        }
    }
}

/// How [`windows`] cuts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowOptions {
    /// Tokens of every window.
    pub seq_len: usize,
    /// Upper bound of tokens; `None` takes every whole window.
    pub budget_tokens: Option<usize>,
    /// Chooses windows where the budget does not cover them all.
    pub seed: u64,
    /// Stands between two documents, see [`super::Tokenizer::separator`].
    pub separator: Option<u32>,
}

pub const DEFAULT_HOLDOUT_TOKENS: usize = 4096;

/// Below this, moments describe the prompts rather than the model.
pub const MIN_CALIBRATION_TOKENS: usize = 2048;

/// The least tokens to calibrate `head_dim` channels with: a moment of rank head_dim needs several times as many rows.
pub const fn min_calibration_tokens(head_dim: usize) -> usize {
    let by_rank = 8 * head_dim;
    if by_rank > MIN_CALIBRATION_TOKENS {
        by_rank
    } else {
        MIN_CALIBRATION_TOKENS
    }
}

/// Calibration sequences: prompts shuffled by `seed`, cut at `budget_tokens`, packed so that none attends to another.
///
/// Prompts of fewer than two tokens are dropped. Same input and options, same result.
///
/// # Errors
/// Fewer than `min_tokens` tokens, a prompt of more than `seq_len` tokens under [`Overlong::Error`], `seq_len` below 2.
pub fn pack(prompts: &[TokenizedPrompt], options: &PackOptions) -> Result<Corpus> {
    if options.seq_len < 2 {
        return Err(Error::invalid(
            "`--seq-len`",
            format!("{} is too short, it must be at least 2", options.seq_len),
        ));
    }
    let mut pieces = pieces(prompts, options)?;
    pieces.shuffle(&mut ChaCha8Rng::seed_from_u64(options.seed));
    let holdout = take_holdout(&mut pieces, options);
    let holdout_tokens = holdout.iter().map(|s| s.token_ids.len()).sum();

    let mut left = options.budget_tokens.unwrap_or(usize::MAX);
    let mut kept = Vec::with_capacity(pieces.len());
    for piece in pieces.iter().filter(|piece| piece.ids.len() >= 2) {
        if left == 0 {
            break;
        }
        let ids = &piece.ids[..piece.ids.len().min(left)];
        left -= ids.len();
        kept.push(ids);
    }
    let tokens: usize = kept.iter().map(|ids| ids.len()).sum();
    if tokens < options.min_tokens {
        let held_out = match holdout_tokens {
            0 => String::new(),
            n => format!(" (and {n} held out)"),
        };
        let error = Error::invalid(
            "calibration data",
            format!(
                "{tokens} tokens{held_out} are too few to calibrate with, at least {} are needed",
                options.min_tokens
            ),
        );
        return Err(if left == 0 {
            error.hint("raise `--tokens`")
        } else {
            error.hint("give more or longer prompts")
        });
    }
    Ok(Corpus::new(
        first_fit(&kept, options.seq_len),
        holdout,
        options.seq_len,
        options.seed,
    ))
}

/// Evaluation windows: documents joined end to end, cut in windows of exactly `seq_len` tokens that are one prompt each.
/// The rest after the last whole window is dropped.
///
/// # Errors
/// Not one whole window, or a budget below one window.
pub fn windows(prompts: &[TokenizedPrompt], options: &WindowOptions) -> Result<Corpus> {
    let seq_len = options.seq_len;
    if seq_len < 2 {
        return Err(Error::invalid(
            "`--seq-len`",
            format!("{seq_len} is too short, it must be at least 2"),
        ));
    }
    let mut joined: Vec<u32> = Vec::new();
    for prompt in prompts {
        if let (Some(separator), Some(&last)) = (options.separator, joined.last())
            && last != separator
            && prompt.token_ids.first() != Some(&separator)
        {
            joined.push(separator);
        }
        joined.extend(&prompt.token_ids);
    }
    let available = joined.len() / seq_len;
    if available == 0 {
        return Err(Error::invalid(
            "evaluation data",
            format!(
                "{} tokens do not fill one window of {seq_len}",
                joined.len()
            ),
        )
        .hint("give more text, or lower `--seq-len`"));
    }
    let wanted = options.budget_tokens.map_or(available, |n| n / seq_len);
    if wanted == 0 {
        return Err(Error::invalid(
            "evaluation data",
            format!(
                "a budget of {} tokens is less than one window of {seq_len}",
                options.budget_tokens.unwrap_or(0)
            ),
        )
        .hint("raise `--tokens`, or lower `--seq-len`"));
    }
    let mut chosen: Vec<usize> = (0..available).collect();
    chosen.shuffle(&mut ChaCha8Rng::seed_from_u64(options.seed));
    chosen.truncate(wanted);
    chosen.sort_unstable();
    let sequences = chosen
        .into_iter()
        .map(|i| one_prompt(&joined[i * seq_len..(i + 1) * seq_len]))
        .collect();
    Ok(Corpus::new(sequences, Vec::new(), seq_len, options.seed))
}

impl Corpus {
    fn new(
        sequences: Vec<PackedSequence>,
        holdout: Vec<PackedSequence>,
        seq_len: usize,
        seed: u64,
    ) -> Self {
        Self {
            prompts: sequences.iter().map(|s| s.prompt_lens.len()).sum(),
            tokens: sequences.iter().map(|s| s.token_ids.len()).sum(),
            holdout_tokens: holdout.iter().map(|s| s.token_ids.len()).sum(),
            token_ids_sha256: fingerprint(&[&sequences, &holdout]),
            sequences,
            holdout,
            seq_len,
            seed,
        }
    }
}

/// A prompt, or a part of one.
struct Piece<'a> {
    document: usize,
    ids: &'a [u32],
}

fn pieces<'a>(prompts: &'a [TokenizedPrompt], options: &PackOptions) -> Result<Vec<Piece<'a>>> {
    let seq_len = options.seq_len;
    let mut pieces = Vec::with_capacity(prompts.len());
    for (document, prompt) in prompts.iter().enumerate() {
        let ids = match options.overlong {
            Overlong::Truncate => &prompt.token_ids[..prompt.token_ids.len().min(seq_len)],
            Overlong::Error if prompt.token_ids.len() > seq_len => {
                return Err(Error::invalid(
                    &prompt.place,
                    format!(
                        "prompt of {} tokens is longer than a sequence of {seq_len}",
                        prompt.token_ids.len()
                    ),
                )
                .hint("raise `--seq-len`, or let long prompts be split or truncated"));
            }
            Overlong::Split | Overlong::Error => &prompt.token_ids[..],
        };
        pieces.extend(
            ids.chunks(seq_len)
                .filter(|ids| ids.len() >= 2)
                .map(|ids| Piece { document, ids }),
        );
    }
    Ok(pieces)
}

/// Moves about `holdout_tokens` out of `pieces`: long ones first, where each further piece of a document counts for less.
fn take_holdout(pieces: &mut [Piece<'_>], options: &PackOptions) -> Vec<PackedSequence> {
    let cap = options.holdout_seq_len.min(options.seq_len);
    let total: usize = pieces.iter().map(|piece| piece.ids.len()).sum();
    let target = options.holdout_tokens.min(total / 4);
    let mut taken_of: HashMap<usize, usize> = HashMap::new();
    let score = |piece: &Piece<'_>, taken: usize| piece.ids.len().min(cap) / (1 + taken);
    // Scores only ever fall, so the top of the heap is the best piece once its score is up to date.
    let mut heap: BinaryHeap<(usize, Reverse<usize>)> = pieces
        .iter()
        .enumerate()
        .map(|(i, piece)| (score(piece, 0), Reverse(i)))
        .collect();
    let mut left = target;
    let mut holdout = Vec::new();
    while left >= 2
        && left >= target / 8
        && let Some((noted, Reverse(i))) = heap.pop()
    {
        let taken = taken_of.entry(pieces[i].document).or_default();
        let now = score(&pieces[i], *taken);
        if now < noted {
            heap.push((now, Reverse(i)));
            continue;
        }
        *taken += 1;
        let (head, rest) = pieces[i]
            .ids
            .split_at(pieces[i].ids.len().min(cap).min(left));
        left -= head.len();
        holdout.push(one_prompt(head));
        pieces[i].ids = rest;
    }
    holdout
}

fn one_prompt(ids: &[u32]) -> PackedSequence {
    PackedSequence {
        token_ids: ids.to_vec(),
        prompt_lens: vec![ids.len()],
    }
}

/// Each prompt goes into the first open sequence that has room.
fn first_fit(prompts: &[&[u32]], seq_len: usize) -> Vec<PackedSequence> {
    // Older sequences are nearly full; looking at all of them would take time quadratic in the number of prompts.
    const OPEN: usize = 64;
    let mut sequences: Vec<PackedSequence> = Vec::new();
    for ids in prompts {
        let open = sequences.len().saturating_sub(OPEN);
        let place = sequences[open..]
            .iter_mut()
            .find(|s| s.token_ids.len() + ids.len() <= seq_len);
        if let Some(sequence) = place {
            sequence.token_ids.extend_from_slice(ids);
            sequence.prompt_lens.push(ids.len());
        } else {
            sequences.push(one_prompt(ids));
        }
    }
    sequences
}

fn fingerprint(lists: &[&[PackedSequence]]) -> String {
    let mut hasher = Sha256::new();
    for sequences in lists {
        hasher.update((sequences.len() as u32).to_le_bytes());
        for sequence in *sequences {
            hasher.update((sequence.prompt_lens.len() as u32).to_le_bytes());
            for &len in &sequence.prompt_lens {
                hasher.update((len as u32).to_le_bytes());
            }
            for id in &sequence.token_ids {
                hasher.update(id.to_le_bytes());
            }
        }
    }
    hex(&hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documents whose ids tell document and position: `1000 · document + position`.
    fn documents(lens: &[usize]) -> Vec<TokenizedPrompt> {
        lens.iter()
            .enumerate()
            .map(|(i, &len)| TokenizedPrompt {
                place: format!("d{i}"),
                token_ids: (0..len).map(|t| (1000 * i + t) as u32).collect(),
            })
            .collect()
    }

    fn options() -> PackOptions {
        PackOptions {
            seq_len: 100,
            holdout_tokens: 0,
            min_tokens: 0,
            ..PackOptions::default()
        }
    }

    fn ids_of(sequences: &[PackedSequence]) -> Vec<u32> {
        let mut ids: Vec<u32> = sequences.iter().flat_map(|s| s.token_ids.clone()).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn packs_every_token_once() {
        let prompts = documents(&[250, 30, 1, 0, 99, 100, 101, 40, 2]);
        let corpus = pack(&prompts, &options()).unwrap();
        let mut expected: Vec<u32> = prompts.iter().flat_map(|p| p.token_ids.clone()).collect();
        // The one-token prompt, and the one-token rest of 101 after splitting.
        expected.retain(|&id| id != 2000 && id != 6100);
        assert_eq!(ids_of(&corpus.sequences), expected);
        assert_eq!(corpus.tokens, expected.len());
        assert_eq!(corpus.prompts, 3 + 1 + 1 + 1 + 1 + 1 + 1);
        for sequence in &corpus.sequences {
            assert!(sequence.token_ids.len() <= 100);
            assert_eq!(
                sequence.prompt_lens.iter().sum::<usize>(),
                sequence.token_ids.len()
            );
            let mut at = 0;
            for &len in &sequence.prompt_lens {
                let prompt = &sequence.token_ids[at..at + len];
                assert!(prompt.windows(2).all(|w| w[1] == w[0] + 1));
                at += len;
            }
        }
        // 622 tokens cannot lie in fewer than 7 sequences of 100; first fit wastes little.
        assert!(corpus.sequences.len() <= 8, "{}", corpus.sequences.len());
    }

    #[test]
    fn the_seed_decides_the_order_and_nothing_else_does() {
        let prompts = documents(&[20; 40]);
        let zero = pack(&prompts, &options()).unwrap();
        assert_eq!(zero, pack(&prompts, &options()).unwrap());
        let one = pack(
            &prompts,
            &PackOptions {
                seed: 1,
                ..options()
            },
        )
        .unwrap();
        assert_ne!(zero.sequences, one.sequences);
        assert_ne!(zero.token_ids_sha256, one.token_ids_sha256);
        assert_eq!(ids_of(&zero.sequences), ids_of(&one.sequences));
    }

    #[test]
    fn reaches_the_budget_exactly() {
        let prompts = documents(&[33; 30]);
        for budget in [2, 33, 34, 100, 500, 989] {
            let corpus = pack(
                &prompts,
                &PackOptions {
                    budget_tokens: Some(budget),
                    ..options()
                },
            )
            .unwrap();
            assert_eq!(corpus.tokens, budget);
        }
    }

    #[test]
    fn overlong_prompts_are_truncated_or_refused_on_request() {
        let prompts = documents(&[250, 50]);
        let truncate = PackOptions {
            overlong: Overlong::Truncate,
            ..options()
        };
        assert_eq!(pack(&prompts, &truncate).unwrap().tokens, 150);
        let refuse = PackOptions {
            overlong: Overlong::Error,
            ..options()
        };
        let message = pack(&prompts, &refuse).unwrap_err().to_string();
        assert!(message.contains("d0: prompt of 250 tokens"), "{message}");
    }

    #[test]
    fn holds_out_long_prompts_of_different_documents() {
        let prompts = documents(&[300, 300, 10, 20, 300, 40, 90, 300]);
        let corpus = pack(
            &prompts,
            &PackOptions {
                holdout_tokens: 300,
                ..options()
            },
        )
        .unwrap();
        let lens: Vec<_> = corpus.holdout.iter().map(|s| &s.prompt_lens[..]).collect();
        assert_eq!(lens, [[100], [100], [100]]);
        let mut from: Vec<u32> = corpus
            .holdout
            .iter()
            .map(|s| s.token_ids[0] / 1000)
            .collect();
        from.sort_unstable();
        from.dedup();
        assert_eq!(from.len(), 3, "three documents");

        let all = pack(&prompts, &options()).unwrap();
        let mut both = ids_of(&corpus.sequences);
        both.extend(ids_of(&corpus.holdout));
        both.sort_unstable();
        assert_eq!(both, ids_of(&all.sequences), "disjoint, and nothing lost");
        assert_ne!(corpus.token_ids_sha256, all.token_ids_sha256);
    }

    #[test]
    fn a_short_holdout_length_spreads_over_documents_and_keeps_the_rest() {
        let prompts = documents(&[100; 8]);
        let corpus = pack(
            &prompts,
            &PackOptions {
                holdout_tokens: 160,
                holdout_seq_len: 40,
                ..options()
            },
        )
        .unwrap();
        assert_eq!(corpus.holdout.len(), 4);
        assert_eq!(corpus.holdout_tokens, 160);
        assert_eq!(corpus.tokens, 640);
    }

    #[test]
    fn a_small_corpus_is_not_eaten_by_the_holdout() {
        let corpus = pack(
            &documents(&[50; 8]),
            &PackOptions {
                holdout_tokens: 4096,
                ..options()
            },
        )
        .unwrap();
        assert_eq!((corpus.tokens, corpus.holdout_tokens), (300, 100));
    }

    #[test]
    fn too_few_tokens_are_refused_with_their_number() {
        let few = PackOptions {
            min_tokens: min_calibration_tokens(64),
            ..options()
        };
        let message = pack(&documents(&[12]), &few).unwrap_err().to_string();
        assert!(
            message.contains("12 tokens") && message.contains("2048"),
            "{message}"
        );
        assert!(message.contains("more or longer prompts"), "{message}");
        let starved = PackOptions {
            budget_tokens: Some(12),
            ..few
        };
        let message = pack(&documents(&[100; 50]), &starved)
            .unwrap_err()
            .to_string();
        assert!(message.contains("raise `--tokens`"), "{message}");
        assert_eq!(min_calibration_tokens(512), 4096);
    }

    #[test]
    fn the_fingerprint_depends_on_lengths_too() {
        let one = pack(&documents(&[10]), &options()).unwrap();
        let expected: Vec<u8> = [1u32, 1, 10]
            .into_iter()
            .chain(0..10)
            .chain([0])
            .flat_map(u32::to_le_bytes)
            .collect();
        assert_eq!(one.token_ids_sha256, crate::files::sha256_bytes(&expected));
    }

    #[test]
    fn windows_are_whole_and_joined_by_the_separator() {
        let prompts = documents(&[7, 6, 9]);
        let options = WindowOptions {
            seq_len: 5,
            budget_tokens: None,
            seed: 0,
            separator: Some(77),
        };
        let corpus = windows(&prompts, &options).unwrap();
        let ids: Vec<u32> = corpus
            .sequences
            .iter()
            .flat_map(|s| s.token_ids.clone())
            .collect();
        let mut joined: Vec<u32> = (0..7).collect();
        joined.push(77);
        joined.extend(1000..1006);
        joined.push(77);
        joined.extend(2000..2009);
        assert_eq!(ids, joined[..20]);
        assert!(corpus.sequences.iter().all(|s| s.prompt_lens == [5]));
        assert_eq!((corpus.prompts, corpus.tokens), (4, 20));

        let budgeted = windows(
            &prompts,
            &WindowOptions {
                budget_tokens: Some(14),
                ..options
            },
        )
        .unwrap();
        assert_eq!(budgeted.sequences.len(), 2);
        assert!(
            budgeted
                .sequences
                .iter()
                .all(|s| corpus.sequences.contains(s))
        );
    }

    #[test]
    fn evaluation_needs_one_whole_window() {
        let options = WindowOptions {
            seq_len: 50,
            budget_tokens: None,
            seed: 0,
            separator: None,
        };
        let message = windows(&documents(&[20, 20]), &options)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("40 tokens do not fill one window of 50"),
            "{message}"
        );
        let message = windows(
            &documents(&[100]),
            &WindowOptions {
                budget_tokens: Some(49),
                ..options
            },
        )
        .unwrap_err()
        .to_string();
        assert!(message.contains("a budget of 49 tokens"), "{message}");
    }
}
