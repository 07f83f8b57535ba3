//! Row-major dense matrices handed to the `gemm` crate.

use pulp::Simd;
use rayon::prelude::*;

/// Which operand of [`matmul`] is read transposed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// A (m, k) · B (k, n)
    Nn,
    /// A (m, k) · B (n, k)ᵀ
    Nt,
    /// A (k, m)ᵀ · B (k, n)
    Tn,
}

/// A row-major view: `rows` × `cols` with `stride` elements between rows.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    pub data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a, T> View<'a, T> {
    /// Rows that follow each other without a gap.
    pub fn contiguous(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// # Panics
    /// Where `data` is shorter than the view reaches.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            rows == 0 || cols <= stride && data.len() >= (rows - 1) * stride + cols,
            "view of {rows}x{cols} stride {stride} over {} elements",
            data.len()
        );
        Self {
            data,
            rows,
            cols,
            stride,
        }
    }
}

/// out (m, n, `out_stride` between rows) = `beta` · out + `alpha` · A·B, on this thread alone: callers spread
/// independent products over rayon, so results do not depend on the number of threads.
///
/// # Panics
/// Where shapes do not fit.
#[allow(unsafe_code)]
pub fn matmul<T: Copy + 'static>(
    op: Op,
    a: View<T>,
    b: View<T>,
    out: &mut [T],
    out_stride: usize,
    accumulate: bool,
    alpha: T,
    beta: T,
) {
    let (m, k, a_row, a_col) = match op {
        Op::Nn | Op::Nt => (a.rows, a.cols, a.stride, 1),
        Op::Tn => (a.cols, a.rows, 1, a.stride),
    };
    let (k_b, n, b_row, b_col) = match op {
        Op::Nn | Op::Tn => (b.rows, b.cols, b.stride, 1),
        Op::Nt => (b.cols, b.rows, 1, b.stride),
    };
    assert_eq!(k, k_b, "inner dimensions");
    if m == 0 || n == 0 {
        return;
    }
    assert!(
        n <= out_stride && out.len() >= (m - 1) * out_stride + n,
        "output too short"
    );
    // SAFETY: `View` and the assertion above hold every index inside its slice; gemm reads a and b, writes out.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            accumulate,
            a.data.as_ptr(),
            a_col as isize,
            a_row as isize,
            b.data.as_ptr(),
            b_col as isize,
            b_row as isize,
            beta,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// out (R, n, `out_stride` between rows) = a (R, width) · b (n, width)ᵀ for a handful of rows, which read every row of b
/// from memory once. For a caller that `pulp` has dispatched.
#[inline(always)]
pub(crate) fn few_rows<S: Simd, const R: usize>(
    simd: S,
    a: &[f32],
    b: &[f32],
    width: usize,
    out: &mut [f32],
    out_stride: usize,
) {
    let a: [&[f32]; R] = std::array::from_fn(|r| &a[r * width..(r + 1) * width]);
    let vectors: [&[S::f32s]; R] = std::array::from_fn(|r| S::as_simd_f32s(a[r]).0);
    for (n, b) in b.chunks_exact(width).enumerate() {
        let (b_vectors, b_rest) = S::as_simd_f32s(b);
        let first_rest = width - b_rest.len();
        let mut sums = [simd.splat_f32s(0.0); R];
        for (c, &b) in b_vectors.iter().enumerate() {
            for (sum, a) in sums.iter_mut().zip(&vectors) {
                *sum = simd.mul_add_e_f32s(a[c], b, *sum);
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            let mut sum = simd.reduce_sum_f32s(sum);
            for (a, b) in a[r][first_rest..].iter().zip(b_rest) {
                sum += a * b;
            }
            out[r * out_stride + n] = sum;
        }
    }
}

/// Adds xᵀ·x of f32 rows (n, d; `stride` elements between rows) to the f64 sum `into` (d, d), in f64.
pub fn add_gram(rows: View<f32>, into: &mut [f64]) {
    let d = rows.cols;
    let mut wide = Vec::with_capacity(rows.rows * d);
    for row in 0..rows.rows {
        let at = row * rows.stride;
        wide.extend(rows.data[at..at + d].iter().map(|&x| f64::from(x)));
    }
    let view = View::contiguous(&wide, rows.rows, d);
    matmul(Op::Tn, view, view, into, d, true, 1.0, 1.0);
}

/// Runs `task` for every index in parallel and collects the results in order.
pub fn parallel<R: Send>(n: usize, task: impl Fn(usize) -> R + Sync + Send) -> Vec<R> {
    (0..n).into_par_iter().map(task).collect()
}
