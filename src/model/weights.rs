//! Where every tensor of a checkpoint lies, checked from headers alone, and how its rows become numbers.
//!
//! Files stay memory-mapped; a row is decoded to f32 from whatever is stored and converted to the dtype of activations.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, ggml_file};
use candle_core::{DType, Device, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use super::dense::finite;
use crate::{Error, Result, device, files};

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    /// E4M3 with one f32 scale a block of 128 x 128 in the tensor `<name>_scale_inv`.
    Float8,
    Ggml(GgmlDType),
}

/// Rows and columns of a [`Encoding::Float8`] block.
const FLOAT8_BLOCK: usize = 128;

/// Bytes of each end of a tensor that enter the fingerprint.
const FINGERPRINT_BYTES: usize = 64 << 10;

/// Elements decoded by one task.
const TASK_ELEMENTS: usize = 1 << 16;

/// A tensor inside a file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub file: usize,
    /// From the start of the file.
    pub start: usize,
    pub bytes: usize,
    pub encoding: Encoding,
    /// (rows, columns), or (columns).
    pub shape: Vec<usize>,
}

/// All tensors of a checkpoint, by the names of its files.
pub(super) struct Weights {
    files: Vec<(PathBuf, Mmap)>,
    tensors: BTreeMap<String, Stored>,
}

/// Which stored row becomes row i.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    AsStored,
    /// GGUF files of the llama family interleave the two halves of every head for their own RoPE; taken back here.
    Interleaved {
        head_dim: usize,
    },
}

impl RowOrder {
    fn stored_row(self, row: usize) -> usize {
        match self {
            Self::AsStored => row,
            Self::Interleaved { head_dim } => {
                let (head, channel) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (channel % half) + channel / half
            }
        }
    }
}

impl Weights {
    pub fn new(files: Vec<(PathBuf, Mmap)>, tensors: BTreeMap<String, Stored>) -> Self {
        Self { files, tensors }
    }

    /// Maps the shards of a safetensors checkpoint and checks their headers.
    pub fn from_safetensors(paths: &[PathBuf]) -> Result<Self> {
        let mut files = Vec::new();
        let mut tensors = BTreeMap::new();
        for path in paths {
            let map = map(path)?;
            let (header_bytes, metadata) = SafeTensors::read_metadata(&map).map_err(|e| {
                Error::invalid(path.display(), format!("not a whole safetensors file: {e}"))
                    .hint("fetch the file again")
            })?;
            let header = std::str::from_utf8(&map[8..8 + header_bytes]).unwrap_or_default();
            if let Some(name) = files::duplicate_key(header) {
                return Err(
                    Error::invalid(path.display(), format!("names tensor `{name}` twice"))
                        .hint("fetch the file again"),
                );
            }
            for (name, info) in metadata.tensors() {
                let encoding = match info.dtype {
                    Dtype::F32 => Encoding::F32,
                    Dtype::F16 => Encoding::F16,
                    Dtype::BF16 => Encoding::Bf16,
                    Dtype::F8_E4M3 => Encoding::Float8,
                    other => {
                        return Err(Error::invalid(
                            path.display(),
                            format!("tensor `{name}` has dtype {other:?}, which is not supported"),
                        )
                        .hint("supported are F32, F16, BF16 and F8_E4M3 with block scales"));
                    }
                };
                let stored = Stored {
                    file: files.len(),
                    start: 8 + header_bytes + info.data_offsets.0,
                    bytes: info.data_offsets.1 - info.data_offsets.0,
                    encoding,
                    shape: info.shape.clone(),
                };
                if let Some(Stored { file, .. }) = tensors.insert(name.clone(), stored)
                    && file < files.len()
                {
                    let other: &(PathBuf, Mmap) = &files[file];
                    return Err(Error::invalid(
                        path.display(),
                        format!("tensor `{name}` is also in `{}`", other.0.display()),
                    ));
                }
            }
            files.push((path.clone(), map));
        }
        Ok(Self::new(files, tensors))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.get(name)
    }

    pub fn path_of(&self, stored: &Stored) -> &Path {
        &self.files[stored.file].0
    }

    /// Where tensor `name` stands, for messages.
    pub fn place(&self, name: &str) -> String {
        let path = self.get(name).map_or_else(
            || match self.files.as_slice() {
                [(path, _)] => path.as_path(),
                several => several
                    .first()
                    .and_then(|(path, _)| path.parent())
                    .unwrap_or(Path::new("")),
            },
            |stored| self.path_of(stored),
        );
        format!("{}: tensor `{name}`", path.display())
    }

    /// Checks that `name` is there with this shape, in an encoding that rows of it can be decoded from.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<&Stored> {
        let Some(stored) = self.get(name) else {
            return Err(Error::invalid(self.place(name), "missing"));
        };
        if stored.shape != shape {
            return Err(Error::invalid(
                self.place(name),
                format!("has shape {:?}, where {shape:?} is expected", stored.shape),
            ));
        }
        match stored.encoding {
            Encoding::Float8 => {
                let &[rows, columns] = shape else {
                    return Err(Error::invalid(
                        self.place(name),
                        "is F8_E4M3, which is supported for matrices alone",
                    ));
                };
                let scale = scale_name(name);
                let blocks = [rows.div_ceil(FLOAT8_BLOCK), columns.div_ceil(FLOAT8_BLOCK)];
                let scale_stored = self.expect(&scale, &blocks)?;
                if scale_stored.encoding == Encoding::Float8 {
                    return Err(Error::invalid(self.place(&scale), "is F8_E4M3 itself"));
                }
            }
            Encoding::Ggml(dtype) => {
                let columns = shape.last().copied().unwrap_or(1);
                if !columns.is_multiple_of(dtype.block_size()) {
                    return Err(Error::invalid(
                        self.place(name),
                        format!(
                            "has rows of {columns}, which blocks of {} of {dtype:?} do not fill",
                            dtype.block_size()
                        ),
                    ));
                }
            }
            Encoding::F32 | Encoding::F16 | Encoding::Bf16 => {}
        }
        Ok(stored)
    }

    /// Stacks the rows of several tensors that passed [`Self::expect`], as `dtype` on `device`; vectors are stacked
    /// end to end. NaN and infinities are refused by name; `what` says which part of the model is loaded.
    pub fn stack(
        &self,
        what: &str,
        parts: &[(String, RowOrder)],
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        match dtype {
            DType::F32 => self.stack_as::<f32>(what, parts, device),
            DType::BF16 => self.stack_as::<bf16>(what, parts, device),
            DType::F16 => self.stack_as::<f16>(what, parts, device),
            other => Err(Error::invalid(
                "dtype",
                format!("`{}` is not supported for activations", other.as_str()),
            )
            .hint("supported are f32, bf16 and f16")),
        }
    }

    fn stack_as<T: Number>(
        &self,
        what: &str,
        parts: &[(String, RowOrder)],
        device: &Device,
    ) -> Result<Tensor> {
        let mut stored = Vec::new();
        for (name, order) in parts {
            let Some(tensor) = self.get(name) else {
                return Err(Error::invalid(self.place(name), "missing"));
            };
            self.fetch(tensor);
            stored.push((name, *order, tensor));
        }
        let elements: usize = stored.iter().map(|(.., t)| t.elements()).sum();
        let mut all = T::zeros(elements);
        let mut rest = all.as_mut_slice();
        for &(name, order, tensor) in &stored {
            let (out, after) = rest.split_at_mut(tensor.elements());
            rest = after;
            let row_elements = tensor.row_elements();
            let rows_a_task = (TASK_ELEMENTS / row_elements).max(1);
            out.par_chunks_mut(rows_a_task * row_elements)
                .enumerate()
                .try_for_each_init(
                    || vec![0f32; row_elements],
                    |decoded, (task, out)| {
                        for (i, out) in out.chunks_mut(row_elements).enumerate() {
                            let row = order.stored_row(task * rows_a_task + i);
                            let all_finite = if tensor.encoding == T::ENCODING {
                                let bytes = self.row_bytes(tensor, row);
                                bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
                                T::all_finite(out)
                            } else {
                                self.decode_row(name, tensor, row, decoded)?;
                                T::convert(decoded, out);
                                finite(decoded)
                            };
                            if !all_finite {
                                return Err(Error::invalid(
                                    self.place(name),
                                    format!("{what} has a NaN or an infinity in row {row}"),
                                ));
                            }
                        }
                        Ok(())
                    },
                )?;
            self.release(tensor);
        }
        match stored.first() {
            Some((.., Stored { shape, .. })) if shape.len() == 2 => {
                device::upload(all, (elements / shape[1], shape[1]), device)
            }
            _ => device::upload(all, elements, device),
        }
    }

    /// Has the system read a tensor ahead of the tasks, which each see a piece of it alone.
    fn fetch(&self, tensor: &Stored) {
        #[cfg(unix)]
        {
            let map = &self.files[tensor.file].1;
            let _ = map.advise_range(memmap2::Advice::WillNeed, tensor.start, tensor.bytes);
        }
    }

    /// Takes the pages of a tensor that was loaded out of this process's memory: it holds a layer, not the file.
    fn release(&self, tensor: &Stored) {
        #[cfg(unix)]
        {
            #[allow(unsafe_code)]
            // SAFETY: the map is a shared one of a file and read-only, so that dropped pages keep their content.
            let _ = unsafe {
                self.files[tensor.file].1.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    tensor.start,
                    tensor.bytes,
                )
            };
        }
    }

    /// Rows of a matrix, in f32.
    pub fn gather(&self, name: &str, rows: &[u32]) -> Result<Vec<f32>> {
        let stored = self
            .get(name)
            .ok_or_else(|| Error::invalid(self.place(name), "missing"))?;
        let columns = stored.row_elements();
        let mut out = vec![0f32; rows.len() * columns];
        out.par_chunks_mut(columns)
            .zip(rows)
            .try_for_each(|(out, &row)| {
                self.decode_row(name, stored, row as usize, out)?;
                if finite(out) {
                    return Ok(());
                }
                Err(Error::invalid(
                    self.place(name),
                    format!("has a NaN or an infinity in row {row}"),
                ))
            })?;
        Ok(out)
    }

    fn row_bytes(&self, stored: &Stored, row: usize) -> &[u8] {
        let row_bytes = stored.encoding.bytes(stored.row_elements());
        let start = stored.start + row * row_bytes;
        &self.files[stored.file].1[start..start + row_bytes]
    }

    fn decode_row(&self, name: &str, stored: &Stored, row: usize, out: &mut [f32]) -> Result<()> {
        let columns = out.len();
        let bytes = self.row_bytes(stored, row);
        match stored.encoding {
            Encoding::F32 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
            Encoding::F16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = f16::from_le_bytes(*bytes).to_f32();
                }
            }
            Encoding::Bf16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = bf16::from_le_bytes(*bytes).to_f32();
                }
            }
            Encoding::Float8 => {
                let scale = scale_name(name);
                let Some(scales) = self.get(&scale) else {
                    return Err(Error::invalid(self.place(&scale), "missing"));
                };
                let mut row_scales = vec![0f32; scales.row_elements()];
                self.decode_row(&scale, scales, row / FLOAT8_BLOCK, &mut row_scales)?;
                for (block, (out, bytes)) in out
                    .chunks_mut(FLOAT8_BLOCK)
                    .zip(bytes.chunks(FLOAT8_BLOCK))
                    .enumerate()
                {
                    for (out, &byte) in out.iter_mut().zip(bytes) {
                        *out = e4m3(byte) * row_scales[block];
                    }
                }
            }
            Encoding::Ggml(dtype) => {
                let tensor =
                    ggml_file::qtensor_from_ggml(dtype, bytes, vec![columns], &Device::Cpu)?
                        .dequantize(&Device::Cpu)?;
                out.copy_from_slice(&tensor.to_vec1::<f32>()?);
            }
        }
        Ok(())
    }

    /// SHA-256 over every tensor in the order of names: its name, a zero byte, its encoding and shape as text, a
    /// zero byte, its length in bytes as a little-endian u64, and its first and last 64 KiB (all of it up to 128 KiB).
    pub fn fingerprint(&self) -> String {
        let mut hasher = Sha256::new();
        for (name, stored) in &self.tensors {
            let data = &self.files[stored.file].1[stored.start..stored.start + stored.bytes];
            hasher.update(name.as_bytes());
            hasher.update([0]);
            hasher.update(format!("{:?} {:?}", stored.encoding, stored.shape).as_bytes());
            hasher.update([0]);
            hasher.update((data.len() as u64).to_le_bytes());
            if data.len() <= 2 * FINGERPRINT_BYTES {
                hasher.update(data);
            } else {
                hasher.update(&data[..FINGERPRINT_BYTES]);
                hasher.update(&data[data.len() - FINGERPRINT_BYTES..]);
            }
        }
        files::hex(&hasher.finalize())
    }
}

impl Stored {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// A vector is one row.
    fn row_elements(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl Encoding {
    /// Bytes of `elements` numbers, a multiple of the block.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => elements * 4,
            Self::F16 | Self::Bf16 => elements * 2,
            Self::Float8 => elements,
            Self::Ggml(dtype) => elements / dtype.block_size() * dtype.type_size(),
        }
    }
}

/// What activations and loaded weights are made of.
trait Number: WithDType + bytemuck::Pod {
    /// How files store just these numbers.
    const ENCODING: Encoding;

    /// Memory that the system zeroes as it is first written, by all threads.
    fn zeros(n: usize) -> Vec<Self>;

    fn convert(from: &[f32], to: &mut [Self]);

    fn all_finite(values: &[Self]) -> bool;
}

impl Number for f32 {
    const ENCODING: Encoding = Encoding::F32;

    fn zeros(n: usize) -> Vec<Self> {
        vec![0.0; n]
    }

    fn convert(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn all_finite(values: &[Self]) -> bool {
        finite(values)
    }
}

macro_rules! half_number {
    ($number:ty, $encoding:ident, $infinity:expr) => {
        impl Number for $number {
            const ENCODING: Encoding = Encoding::$encoding;

            fn zeros(n: usize) -> Vec<Self> {
                vec![0u16; n].reinterpret_into()
            }

            fn convert(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }

            fn all_finite(values: &[Self]) -> bool {
                // The largest exponent marks NaN and infinity; signed 16-bit maxima are vectorised on any machine.
                let exponents = values.iter().map(|x| (x.to_bits() & $infinity) as i16);
                exponents.fold(0, i16::max) < $infinity
            }
        }
    };
}

half_number!(bf16, Bf16, 0x7f80);
half_number!(f16, F16, 0x7c00);

/// Scales of a Float8 tensor, in the names of the Hugging Face format.
pub(super) fn scale_name(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Maps a whole file for reading.
#[allow(unsafe_code)]
pub(super) fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    // SAFETY: the map is only read. As with every program that maps its model, a file that another process cuts
    // short meanwhile ends this one; what is read as numbers has no invalid bit patterns.
    unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))
}

/// One E4M3 number (sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity, one NaN a sign).
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte >> 7 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // equal to the bit
mod tests {
    use super::*;

    #[test]
    fn every_half_that_is_not_finite_is_seen() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert_eq!(Number::all_finite(&[bf16::ONE, b]), b.is_finite(), "{b}");
            assert_eq!(Number::all_finite(&[f16::ONE, h]), h.is_finite(), "{h}");
        }
    }

    #[test]
    fn e4m3_is_candles() {
        let bytes: Vec<u8> = (0..=255).collect();
        let theirs = Tensor::from_raw_buffer(&bytes, DType::F8E4M3, &[256], &Device::Cpu)
            .and_then(|t| t.to_dtype(DType::F32)?.to_vec1::<f32>())
            .unwrap();
        for (byte, theirs) in bytes.into_iter().zip(theirs) {
            let ours = e4m3(byte);
            assert!(ours == theirs || ours.is_nan() && theirs.is_nan(), "{byte}");
        }
    }

    #[test]
    fn interleaved_rows_are_taken_apart() {
        let order = RowOrder::Interleaved { head_dim: 6 };
        let rows: Vec<_> = (0..12).map(|row| order.stored_row(row)).collect();
        assert_eq!(rows, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
