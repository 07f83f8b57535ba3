//! How a page of the cache lies in memory: [`PAGE_TOKENS`] tokens of one layer and one KV head, keys and values.
//!
//! This is the definition; kernels and the CPU's pool are faster ways to the same bytes. Zoo files do not know it.

use crate::{Error, Result};

pub use crate::zoo::SideName as Side;

pub const PAGE_TOKENS: usize = 64;

/// The order of a page's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Tokens one after the other, each from its first channel to its last. Any head_dim and group.
    Rows,
    /// As operands of tensor-core instructions: a lane's next 16 bytes are what its next instructions multiply, so
    /// that nothing is shuffled or converted (`kernels/int2_decode.cu`). For a head_dim of 64, 128 or 256 with one
    /// group.
    Mma,
}

/// Places in a page. Two kinds exist: an INT2 page holds codes, scales and zeros, a BF16 page holds numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLayout {
    pub head_dim: usize,
    /// Channels that share a scale and a zero.
    pub group: usize,
    pub arrangement: Arrangement,
}

impl PageLayout {
    /// # Errors
    /// Where head_dim is not a multiple of 8 up to 256, `group` does not divide it, or the arrangement does not fit.
    pub fn new(head_dim: usize, group: usize, arrangement: Arrangement) -> Result<Self> {
        let sound = head_dim.is_multiple_of(8)
            && (8..=256).contains(&head_dim)
            && group > 0
            && head_dim.is_multiple_of(group);
        let fits = arrangement == Arrangement::Rows
            || matches!(head_dim, 64 | 128 | 256) && group == head_dim;
        if sound && fits {
            return Ok(Self {
                head_dim,
                group,
                arrangement,
            });
        }
        Err(Error::invalid(
            "cache page",
            format!(
                "head_dim {head_dim} in groups of {group} cannot be arranged as {arrangement:?}"
            ),
        )
        .hint("head_dim must be a multiple of 8 up to 256, and of the group"))
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.head_dim / self.group
    }

    /// Bytes of an INT2 page: two bits a number, and a bf16 scale and zero a group.
    pub fn int2_bytes(&self) -> usize {
        PAGE_TOKENS * (self.head_dim / 2 + 8 * self.groups())
    }

    /// Bytes of a BF16 page.
    pub fn bf16_bytes(&self) -> usize {
        PAGE_TOKENS * 4 * self.head_dim
    }

    /// Tokens of a part that is complete in itself, codes before scales: what a warp takes at once.
    pub(crate) fn part_tokens(&self) -> usize {
        if self.arrangement == Arrangement::Mma && self.head_dim > 128 {
            32
        } else {
            PAGE_TOKENS
        }
    }

    /// Of an INT2 page: the byte of a code, and how far it is to be shifted right there.
    pub fn code(&self, side: Side, token: usize, channel: usize) -> (usize, usize) {
        let d = self.head_dim;
        match self.arrangement {
            Arrangement::Rows => {
                let row = token + if side == Side::V { PAGE_TOKENS } else { 0 };
                (row * d / 4 + channel / 4, 2 * (channel % 4))
            }
            Arrangement::Mma => {
                let part = self.part_tokens();
                let (start, t) = (token / part * part * (d / 2 + 8), token % part);
                let within = t % 32;
                match side {
                    // Four tokens share a byte: 8 apart, of one channel.
                    Side::K => {
                        let lane = 4 * (within % 8) + channel / (d / 4);
                        let word = t / 32 * (d / 16) + channel % (d / 4) / 4;
                        let byte = word / 4 * 512 + lane * 16 + word % 4 * 4 + channel % 4;
                        (start + byte, within / 8 * 2)
                    }
                    // Four channels share a byte: 16 apart, of one token.
                    Side::V => {
                        let lane = 4 * (channel % 8) + within % 8 / 2;
                        let quad = t / 32 * (d / 64) + channel / 64;
                        let word = within / 16 * 2 + channel % 16 / 8;
                        let byte = within % 16 / 8 + within % 2 * 2;
                        let codes = part * d / 4;
                        (
                            start + codes + quad * 512 + lane * 16 + word * 4 + byte,
                            channel / 16 % 4 * 2,
                        )
                    }
                }
            }
        }
    }

    /// Of an INT2 page: the byte of a group's bf16 scale; its bf16 zero follows.
    pub fn scale(&self, side: Side, token: usize, group: usize) -> usize {
        let (d, v) = (self.head_dim, usize::from(side == Side::V));
        match self.arrangement {
            Arrangement::Rows => {
                PAGE_TOKENS * d / 2 + ((2 * token + v) * self.groups() + group) * 4
            }
            Arrangement::Mma => {
                let part = self.part_tokens();
                let (start, t) = (token / part * part * (d / 2 + 8), token % part);
                start + part * d / 2 + (t / 16 * 8 + t % 8) * 16 + v * 8 + t % 16 / 8 * 4
            }
        }
    }

    /// Of a BF16 page: the byte of a number.
    pub fn number(&self, side: Side, token: usize, channel: usize) -> usize {
        let d = self.head_dim;
        match self.arrangement {
            Arrangement::Rows => {
                let row = token + if side == Side::V { PAGE_TOKENS } else { 0 };
                2 * (row * d + channel)
            }
            // Tiles of 8 tokens, which fit where a part of an INT2 page does: keys, then values.
            Arrangement::Mma => {
                let (tile, t) = (token / 8 * 32 * d, token % 8);
                match side {
                    Side::K => {
                        let (lane, at) = (4 * t + channel / (d / 4), channel % (d / 4));
                        tile + at / 8 * 512 + lane * 16 + at % 8 * 2
                    }
                    // Two tokens share a word.
                    Side::V => {
                        let (lane, word) = (4 * (channel % 8) + t / 2, channel / 8);
                        tile + 16 * d + word / 4 * 512 + lane * 16 + word % 4 * 4 + t % 2 * 2
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_page_has_one_use() {
        for (d, group, arrangement) in [
            (64, 64, Arrangement::Mma),
            (128, 128, Arrangement::Mma),
            (256, 256, Arrangement::Mma),
            (80, 80, Arrangement::Rows),
            (128, 32, Arrangement::Rows),
            (8, 4, Arrangement::Rows),
        ] {
            let layout = PageLayout::new(d, group, arrangement).unwrap();
            let mut int2 = vec![0u8; layout.int2_bytes()];
            let mut bf16 = vec![0u8; layout.bf16_bytes()];
            for side in [Side::K, Side::V] {
                for token in 0..PAGE_TOKENS {
                    for channel in 0..d {
                        let (byte, shift) = layout.code(side, token, channel);
                        assert_eq!(int2[byte] >> shift & 3, 0);
                        int2[byte] |= 3 << shift;
                        let byte = layout.number(side, token, channel);
                        bf16[byte] += 1;
                        bf16[byte + 1] += 1;
                    }
                    for group in 0..layout.groups() {
                        let byte = layout.scale(side, token, group);
                        for byte in &mut int2[byte..byte + 4] {
                            assert_eq!(*byte, 0);
                            *byte = 0xff;
                        }
                    }
                }
            }
            assert!(int2.iter().all(|&byte| byte == 0xff), "{layout:?}");
            assert!(bf16.iter().all(|&byte| byte == 1), "{layout:?}");
        }
    }

    #[test]
    fn impossible_pages_are_refused() {
        for (d, group, arrangement) in [
            (0, 1, Arrangement::Rows),
            (128, 0, Arrangement::Rows),
            (128, 48, Arrangement::Rows),
            (264, 264, Arrangement::Rows),
            (12, 12, Arrangement::Rows),
            (128, 64, Arrangement::Mma),
            (80, 80, Arrangement::Mma),
        ] {
            assert!(
                PageLayout::new(d, group, arrangement).is_err(),
                "{d} {group}"
            );
        }
    }
}
