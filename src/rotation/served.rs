use crate::linalg::{Op, View, matmul};
use crate::quant::{Codec, Encoded};
use crate::{Error, Result};

/// What the cache does to one KV head's keys or values, and back: transform, encode, pack; unpack, decode, undo.
///
/// Matrices are (d, d), row-major, and multiply rows from the left.
#[derive(Clone, Debug)]
pub struct Transform {
    /// x' = (x − mean) · encode
    encode: Vec<f32>,
    /// x = x' · back + mean
    back: Vec<f32>,
    mean: Option<Vec<f32>>,
    codec: Codec<f32>,
}

impl Transform {
    /// `back` undoes `encode`: queryᵀ for keys, decode for values, encodeᵀ where that is orthogonal.
    ///
    /// # Errors
    /// Where sizes do not fit the codec's head_dim, or the codec's settings are impossible.
    pub fn new(
        encode: Vec<f32>,
        back: Vec<f32>,
        mean: Option<Vec<f32>>,
        codec: Codec<f32>,
    ) -> Result<Self> {
        codec.check()?;
        let d = codec.head_dim;
        if encode.len() != d * d
            || back.len() != d * d
            || mean.as_ref().is_some_and(|mean| mean.len() != d)
        {
            return Err(Error::invalid(
                "transform",
                format!(
                    "matrices of {} and {} elements and a mean of {:?} do not fit head_dim {d}",
                    encode.len(),
                    back.len(),
                    mean.map(|mean| mean.len())
                ),
            ));
        }
        Ok(Self {
            encode,
            back,
            mean,
            codec,
        })
    }

    pub fn codec(&self) -> &Codec<f32> {
        &self.codec
    }

    /// (d, d) in x' = (x − mean) · encode.
    pub fn encode(&self) -> &[f32] {
        &self.encode
    }

    /// (d, d) in x = x' · back + mean.
    pub fn back(&self) -> &[f32] {
        &self.back
    }

    /// (d); `None`: not centered.
    pub fn mean(&self) -> Option<&[f32]> {
        self.mean.as_deref()
    }

    /// The same transform with other rounding.
    #[must_use]
    pub fn with_codec(self, codec: Codec<f32>) -> Self {
        Self { codec, ..self }
    }

    /// (x − mean) · encode of rows (n, d).
    pub fn forward(&self, rows: &[f32]) -> Vec<f32> {
        let d = self.codec.head_dim;
        match &self.mean {
            None => product(Op::Nn, rows, &self.encode, d),
            Some(mean) => {
                let mut centered = rows.to_vec();
                for row in centered.chunks_exact_mut(mean.len()) {
                    row.iter_mut().zip(mean).for_each(|(x, m)| *x -= m);
                }
                product(Op::Nn, &centered, &self.encode, d)
            }
        }
    }

    /// x' · back + mean of encoded rows (n, d).
    pub fn backward(&self, rows: &[f32]) -> Vec<f32> {
        let mut out = product(Op::Nn, rows, &self.back, self.codec.head_dim);
        if let Some(mean) = &self.mean {
            for row in out.chunks_exact_mut(mean.len()) {
                row.iter_mut().zip(mean).for_each(|(x, m)| *x += m);
            }
        }
        out
    }

    /// q · backᵀ of queries (n, d), whose products with encoded keys are those of the queries with the keys.
    pub fn query(&self, rows: &[f32]) -> Vec<f32> {
        product(Op::Nt, rows, &self.back, self.codec.head_dim)
    }

    /// Rows (n, d) as attention reads them from the cache: through codes packed four to a byte, where they fit two
    /// bits.
    ///
    /// # Errors
    /// Where `rows` is no whole number of rows.
    pub fn roundtrip(&self, rows: &[f32]) -> Result<Vec<f32>> {
        let encoded = self.codec.encode(&self.forward(rows))?;
        let encoded: Encoded = if self.codec.levels <= 4 {
            encoded.pack()?.unpack()
        } else {
            encoded
        };
        Ok(self.backward(&encoded.decode()))
    }
}

fn product(op: Op, rows: &[f32], matrix: &[f32], d: usize) -> Vec<f32> {
    let n = rows.len() / d;
    let mut out = vec![0.0; n * d];
    let rows = View::contiguous(&rows[..n * d], n, d);
    let matrix = View::contiguous(matrix, d, d);
    matmul(op, rows, matrix, &mut out, d, false, 1.0, 0.0);
    out
}
