//! Attention equals the numpy reference (tests/fixtures/README.md), over exact keys and over a 2-bit cache.

use std::path::Path;

use oscar_kv::kv::attention::{Dims, causal, windowed};
use safetensors::SafeTensors;

const CASES: [&str; 2] = ["d16_mha_bias", "d64_gqa3"];

struct Golden(Vec<u8>);

impl Golden {
    fn open(case: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden");
        Self(std::fs::read(folder.join(case).with_extension("safetensors")).unwrap())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.0)
            .unwrap()
            .tensor(name)
            .unwrap()
            .data()
            .to_vec()
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.bytes(name);
        bytes
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes(x.try_into().unwrap()))
            .collect()
    }

    fn f64(&self, name: &str) -> Vec<f64> {
        let bytes = self.bytes(name);
        bytes
            .chunks_exact(8)
            .map(|x| f64::from_le_bytes(x.try_into().unwrap()))
            .collect()
    }

    /// Decoded rows (tokens, d) · `basis`ᵀ of one side of one head.
    fn decoded(&self, codes: &str, scale: &str, zero: &str, basis: &str) -> Vec<f64> {
        let (codes, basis) = (self.bytes(codes), self.f64(basis));
        let (scale, zero) = (self.f64(scale), self.f64(zero));
        let d = codes.len() / scale.len();
        let row = |(t, codes): (usize, &[u8])| {
            let x: Vec<f64> = codes
                .iter()
                .map(|&c| (f64::from(c) - zero[t]) * scale[t])
                .collect();
            let dot = |column: &[f64]| x.iter().zip(column).map(|(x, b)| x * b).sum();
            basis.chunks_exact(d).map(dot).collect::<Vec<f64>>()
        };
        codes.chunks_exact(d).enumerate().flat_map(row).collect()
    }
}

fn assert_close(case: &str, ours: &[f32], golden: &[f32]) {
    assert_eq!(ours.len(), golden.len());
    let largest = golden.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
    for (a, b) in ours.iter().zip(golden) {
        assert!((a - b).abs() < 1e-5 * largest, "{case}: {a}, not {b}");
    }
}

#[test]
fn outputs_are_those_of_the_reference() {
    for case in CASES {
        let golden = Golden::open(case);
        let settings: Vec<usize> = golden.f64("settings").iter().map(|&x| x as usize).collect();
        let [tokens, heads, kv_heads, d] = settings[1..5] else {
            unreachable!()
        };
        let [sink, recent] = settings[9..] else {
            unreachable!()
        };
        let dims = Dims::new(heads, kv_heads, d).unwrap();
        let [q, k, v] = ["q", "k", "v"].map(|name| golden.f32(name));
        let o = causal(&q, &k, &v, dims, &[tokens], false).unwrap().o;
        assert_close(case, &o, &golden.f32("o"));

        let (mut k_hat, mut v_hat) = (vec![0.0; k.len()], vec![0.0; v.len()]);
        let mean = golden.f64("moment_k_mean");
        for h in 0..kv_heads {
            let name = |suffix: &str| format!("h{h}_{suffix}");
            let side = |codes: &str, side: &str, basis: &str| {
                let [scale, zero] = ["scale", "zero"].map(|x| name(&format!("{side}_{x}")));
                golden.decoded(&name(codes), &scale, &zero, &name(basis))
            };
            let (k, v) = (
                side("k_codes_feedback", "k", "query"),
                side("v_codes", "v", "v_encode"),
            );
            for (t, i) in (0..tokens).flat_map(|t| (0..d).map(move |i| (t, i))) {
                let at = (t * kv_heads + h) * d + i;
                k_hat[at] = (k[t * d + i] + mean[h * d + i]) as f32;
                v_hat[at] = v[t * d + i] as f32;
            }
        }
        let o = windowed(&q, &k, &v, &k_hat, &v_hat, dims, &[tokens], sink, recent, 1).unwrap();
        assert_close(case, &o, &golden.f32("o_int2"));
    }
}
