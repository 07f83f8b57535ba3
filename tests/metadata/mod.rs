//! What an entry of a made-up model says about itself.

use oscar_kv::zoo::{
    Calibration, KMoment, Metadata, Method, ModelInfo, Quantizer, SCHEMA, Scope, Tool, VMoment,
    Windows,
};

/// Of a balanced entry of a llama, one transform a head, in groups of head_dim.
pub fn metadata(layers: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Metadata {
    Metadata {
        schema: SCHEMA,
        method: Method::Balanced,
        scope: Scope::Head,
        k_moment: Some(KMoment::Qq),
        v_moment: Some(VMoment::Oo),
        quantizer: Quantizer {
            bits: 2,
            group: head_dim,
            codec: "uniform".into(),
            scale_dtype: "bfloat16".into(),
        },
        windows: Windows {
            sink_tokens: 64,
            recent_tokens: 256,
        },
        model: ModelInfo {
            id: "org/model".into(),
            revision: None,
            architecture: "llama".into(),
            config_sha256: "c".into(),
            weights_fingerprint: "w".into(),
            layers,
            heads: vec![heads; layers],
            kv_heads: vec![kv_heads; layers],
            head_dim: vec![head_dim; layers],
        },
        calibration: Calibration {
            tokens: 24_000,
            prompts: 7,
            seq_len: 4096,
            token_ids_sha256: "t".into(),
            tokenizer_sha256: "k".into(),
            seed: 5,
            dtype: "f32".into(),
            device: "cpu".into(),
        },
        tool: Tool {
            name: "oscar-kv".into(),
            version: "0.1.0".into(),
            algorithm: 1,
        },
        fit: None,
        imported: None,
        content_sha256: String::new(),
    }
}
