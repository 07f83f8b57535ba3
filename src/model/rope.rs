/// Rotary position embedding over the whole head, in half-split order: channel i turns with channel i + head_dim/2.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How inverse frequencies differ from θ^(−2i/head_dim).
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, a smooth ramp between, high frequencies as they are.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
    /// Each inverse frequency divided by its own factor (`rope_freqs` of a GGUF file), head_dim/2 of them.
    Factors(Vec<f32>),
}
