//! Rotations and codec equal the numpy reference, and the released tool's own output (tests/fixtures/README.md).

use std::cmp::Ordering;
use std::path::Path;

use nalgebra::DMatrix;
use oscar_kv::quant::{Codec, feedback_matrix, row_major};
use oscar_kv::rotation::{Balanced, balanced, bit_reversal, eigen, hadamard, oscar};
use safetensors::{Dtype, SafeTensors};

const CASES: [&str; 3] = ["d16_mha_bias", "d64_gqa3", "d128_gqa4_bias"];

struct Golden {
    bytes: Vec<u8>,
    d: usize,
    kv_heads: usize,
    p: f64,
    k_clip: f64,
    v_clip: f64,
}

impl Golden {
    fn open(case: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/golden")
            .join(case)
            .with_extension("safetensors");
        let mut golden = Self {
            bytes: std::fs::read(path).unwrap(),
            d: 0,
            kv_heads: 0,
            p: 0.0,
            k_clip: 0.0,
            v_clip: 0.0,
        };
        let settings = golden.array("settings").unwrap();
        golden.kv_heads = settings[3] as usize;
        golden.d = settings[4] as usize;
        [golden.p, golden.k_clip, golden.v_clip] = [settings[6], settings[7], settings[8]];
        golden
    }

    /// Elements in row-major order; nothing where the case leaves `name` out.
    fn array(&self, name: &str) -> Option<Vec<f64>> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).ok()?;
        let data = tensor.data();
        Some(match tensor.dtype() {
            Dtype::U8 => data.iter().map(|&x| f64::from(x)).collect(),
            Dtype::F32 => data
                .as_chunks()
                .0
                .iter()
                .map(|&x| f64::from(f32::from_le_bytes(x)))
                .collect(),
            Dtype::F64 => data
                .as_chunks()
                .0
                .iter()
                .map(|&x| f64::from_le_bytes(x))
                .collect(),
            other => panic!("{name} is {other:?}"),
        })
    }

    fn matrix(&self, name: &str) -> Option<DMatrix<f64>> {
        Some(DMatrix::from_row_slice(self.d, self.d, &self.array(name)?))
    }

    /// One head's matrix of `moment_{name}`.
    fn moment(&self, name: &str, head: usize) -> DMatrix<f64> {
        let all = self.array(&format!("moment_{name}")).unwrap();
        let size = self.d * self.d;
        DMatrix::from_row_slice(self.d, self.d, &all[head * size..(head + 1) * size])
    }

    fn layer_moment(&self, name: &str) -> DMatrix<f64> {
        (0..self.kv_heads)
            .map(|head| self.moment(name, head))
            .sum::<DMatrix<f64>>()
            / self.kv_heads as f64
    }

    /// (d): a head's mean key.
    fn k_mean(&self, head: usize) -> DMatrix<f64> {
        let all = self.array("moment_k_mean").unwrap();
        DMatrix::from_row_slice(1, self.d, &all[head * self.d..(head + 1) * self.d])
    }

    fn balanced(&self, head: usize) -> Balanced {
        let mean = self.k_mean(head);
        let covariance = self.moment("kk", head) - mean.tr_mul(&mean);
        balanced(&self.moment("qq", head), &covariance, self.p).unwrap()
    }

    fn feedback(&self, head: usize, query: &DMatrix<f64>) -> DMatrix<f64> {
        feedback_matrix(&(query.tr_mul(&self.moment("qq", head)) * query)).unwrap()
    }

    /// (tokens, d) of one head of k or v.
    fn rows(&self, name: &str, head: usize) -> DMatrix<f64> {
        let all = self.array(name).unwrap();
        let row = self.kv_heads * self.d;
        DMatrix::from_fn(all.len() / row, self.d, |t, i| {
            all[t * row + head * self.d + i]
        })
    }

    /// One head's keys as the codec sees them.
    fn encoded_keys(&self, head: usize, encode: &DMatrix<f64>) -> DMatrix<f64> {
        let mut keys = self.rows("k", head);
        let mean = self.k_mean(head);
        for mut row in keys.row_iter_mut() {
            row -= &mean;
        }
        keys * encode
    }

    fn codec(&self, clip: f64, feedback: Option<&DMatrix<f64>>) -> Codec<f64> {
        Codec {
            head_dim: self.d,
            levels: 4,
            group: self.d,
            clip,
            feedback: feedback.map(row_major),
        }
    }
}

fn assert_close(what: &str, got: &DMatrix<f64>, want: &DMatrix<f64>, tolerance: f64) {
    let off = (got - want).amax() / want.amax();
    assert!(off < tolerance, "{what} is off by {off:e}");
}

/// How many elements differ at all.
fn differing(got: impl Iterator<Item = f64>, want: &[f64]) -> usize {
    got.zip(want)
        .filter(|(got, want)| got.partial_cmp(want) != Some(Ordering::Equal))
        .count()
}

/// U of R = U·H·P, each eigenvector with its largest entry positive.
fn basis(rotation: &DMatrix<f64>) -> DMatrix<f64> {
    let d = rotation.ncols();
    let mut mixed = rotation.clone();
    for (to, from) in bit_reversal::columns(d).into_iter().enumerate() {
        mixed.set_column(from, &rotation.column(to));
    }
    let mut basis = mixed * hadamard::matrix(d).transpose();
    for mut column in basis.column_iter_mut() {
        if column[column.iamax()] < 0.0 {
            column.neg_mut();
        }
    }
    basis
}

#[test]
fn layer_rotations_equal_the_reference() {
    for case in CASES {
        let golden = Golden::open(case);
        for (name, moment) in [("oscar_k_layer", "qq"), ("oscar_v_layer_vwv", "vwv")] {
            if let Some(want) = golden.matrix(name) {
                let got = oscar(&golden.layer_moment(moment)).unwrap();
                assert_close(&format!("{case} {name}"), &got.matrix, &want, 1e-8);
            }
        }
    }
}

#[test]
fn layer_rotations_equal_the_released_tool() {
    let golden = Golden::open("d64_gqa3");
    for (side, moment) in [("k", "qq"), ("v", "vwv")] {
        let got = oscar(&golden.layer_moment(moment)).unwrap();
        let want = golden.matrix(&format!("released_{side}_rotation")).unwrap();
        assert_close(side, &basis(&got.matrix), &basis(&want), 1e-6);

        let ascending = golden
            .array(&format!("released_{side}_eigenvalues"))
            .unwrap();
        for (got, want) in got.spectrum.iter().rev().zip(&ascending) {
            assert!(
                (got - want).abs() < 1e-6 * want.abs(),
                "{side}: {got} {want}"
            );
        }
    }
}

#[test]
fn head_transforms_equal_the_reference() {
    for case in CASES {
        let golden = Golden::open(case);
        for head in 0..golden.kv_heads {
            let Balanced { encode, query, .. } = golden.balanced(head);
            let feedback = golden.feedback(head, &query);
            let v_encode = golden
                .array("moment_oo")
                .map(|_| oscar(&golden.moment("oo", head)).unwrap().matrix);
            for (name, got) in [
                ("encode", Some(encode)),
                ("query", Some(query)),
                ("feedback", Some(feedback)),
                ("v_encode", v_encode),
            ] {
                let name = format!("h{head}_{name}");
                if let Some(want) = golden.matrix(&name) {
                    assert_close(&format!("{case} {name}"), &got.unwrap(), &want, 1e-8);
                }
            }
        }
    }
}

#[test]
fn codes_equal_the_reference() {
    for case in CASES {
        let golden = Golden::open(case);
        for head in 0..golden.kv_heads {
            let Balanced { encode, query, .. } = golden.balanced(head);
            let feedback = golden.feedback(head, &query);
            let keys = row_major::<f64>(&golden.encoded_keys(head, &encode));
            let shaped = golden
                .codec(golden.k_clip, Some(&feedback))
                .encode(&keys)
                .unwrap();
            let nearest = golden.codec(golden.k_clip, None).encode(&keys).unwrap();
            let bytes = shaped.pack().unwrap().bytes;
            let wide = |x: &[half::bf16]| x.iter().map(|x| x.to_f64()).collect();
            let codes = |x: &[u8]| x.iter().map(|&x| f64::from(x)).collect();
            let mut checks: Vec<(&str, Vec<f64>)> = vec![
                ("k_codes_feedback", codes(&shaped.codes)),
                ("k_codes_nearest", codes(&nearest.codes)),
                ("k_packed_feedback", codes(&bytes)),
                ("k_scale", wide(&shaped.scale)),
                ("k_zero", wide(&shaped.zero)),
            ];
            if let Some(v_encode) = golden.matrix(&format!("h{head}_v_encode")) {
                let values = row_major::<f64>(&(golden.rows("v", head) * v_encode));
                let values = golden.codec(golden.v_clip, None).encode(&values).unwrap();
                checks.push(("v_codes", codes(&values.codes)));
                checks.push(("v_scale", wide(&values.scale)));
                checks.push(("v_zero", wide(&values.zero)));
            }
            for (name, got) in checks {
                if let Some(want) = golden.array(&format!("h{head}_{name}")) {
                    let differ = differing(got.iter().copied(), &want);
                    assert_eq!(got.len(), want.len());
                    assert_eq!(differ, 0, "{case} head {head}: {name}");
                }
            }
        }
    }
}

/// What the cache runs in f32 differs from f64 only where a value lies within rounding of a threshold.
#[test]
fn single_precision_codes_hardly_differ() {
    let golden = Golden::open("d64_gqa3");
    let Balanced { encode, query, .. } = golden.balanced(0);
    let feedback = golden.feedback(0, &query);
    let keys = golden.encoded_keys(0, &encode);
    let codec = Codec {
        head_dim: golden.d,
        levels: 4,
        group: golden.d,
        clip: golden.k_clip,
        feedback: Some(row_major::<f32>(&feedback)),
    };
    let got = codec.encode(&row_major::<f32>(&keys)).unwrap();
    let want = golden.array("h0_k_codes_feedback").unwrap();
    let differ = differing(got.codes.iter().map(|&x| f64::from(x)), &want);
    assert!(
        differ * 1000 < want.len(),
        "{differ} of {} codes",
        want.len()
    );
}

#[test]
fn released_column_order_flattens_importance() {
    let golden = Golden::open("d64_gqa3");
    let moment = golden.layer_moment("qq");
    let rotation = oscar(&moment).unwrap().matrix;
    let importance = (rotation.tr_mul(&moment) * &rotation).diagonal();
    let flat = moment.trace() / golden.d as f64;
    assert!(importance.iter().all(|x| (x / flat - 1.0).abs() < 1e-9));
    assert!(eigen::orthogonality_error(&rotation) < 1e-10);
}
