use half::bf16;

use super::Encoded;
use crate::{Error, Result};

/// Rows as the cache holds them: four 2-bit codes a byte.
#[derive(Clone, PartialEq, Debug)]
pub struct Packed {
    pub head_dim: usize,
    pub levels: usize,
    pub group: usize,
    /// (n, d/4): byte b of a row holds channels b, b + d/4, b + d/2 and b + 3d/4, from its low bits up.
    pub bytes: Vec<u8>,
    /// (n, d/group).
    pub scale: Vec<bf16>,
    /// (n, d/group).
    pub zero: Vec<bf16>,
}

impl Encoded {
    /// # Errors
    /// Where codes need more than two bits, or d is not a multiple of four.
    pub fn pack(&self) -> Result<Packed> {
        let d = self.head_dim;
        if self.levels > 4 || d == 0 || !d.is_multiple_of(4) {
            return Err(Error::invalid(
                "packing",
                format!(
                    "{} levels of {d} channels do not pack four to a byte",
                    self.levels
                ),
            ));
        }
        let quarter = d / 4;
        let mut bytes = vec![0; self.codes.len() / 4];
        for (row, codes) in bytes
            .chunks_exact_mut(quarter)
            .zip(self.codes.chunks_exact(d))
        {
            let (low, high) = codes.split_at(2 * quarter);
            let ((a, b), (c, e)) = (low.split_at(quarter), high.split_at(quarter));
            for (i, byte) in row.iter_mut().enumerate() {
                *byte = a[i] | b[i] << 2 | c[i] << 4 | e[i] << 6;
            }
        }
        Ok(Packed {
            head_dim: d,
            levels: self.levels,
            group: self.group,
            bytes,
            scale: self.scale.clone(),
            zero: self.zero.clone(),
        })
    }
}

impl Packed {
    /// The inverse of [`Encoded::pack`].
    pub fn unpack(&self) -> Encoded {
        let quarter = self.head_dim / 4;
        let mut codes = vec![0; self.bytes.len() * 4];
        if quarter > 0 {
            for (row, bytes) in codes
                .chunks_exact_mut(4 * quarter)
                .zip(self.bytes.chunks_exact(quarter))
            {
                for (part, out) in row.chunks_exact_mut(quarter).enumerate() {
                    for (code, byte) in out.iter_mut().zip(bytes) {
                        *code = byte >> (2 * part) & 3;
                    }
                }
            }
        }
        Encoded {
            head_dim: self.head_dim,
            levels: self.levels,
            group: self.group,
            codes,
            scale: self.scale.clone(),
            zero: self.zero.clone(),
        }
    }
}
