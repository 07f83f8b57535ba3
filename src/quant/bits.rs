/// Bits per cached element of a sequence of `context_tokens`, of which `sink` + `recent` stay bf16 and the others
/// cost `stored_bits` (codes and all that decoding them needs).
pub fn with_windows(stored_bits: f64, context_tokens: usize, sink: usize, recent: usize) -> f64 {
    if context_tokens == 0 {
        return stored_bits;
    }
    let exact = (sink + recent).min(context_tokens) as f64 / context_tokens as f64;
    stored_bits + (16.0 - stored_bits) * exact
}

/// Bits per cached element of [`Codec`](super::Codec): `bits` a code, a bf16 scale and a bf16 zero per `group`
/// channels, and the exact windows. `bits` may be fractional: three levels are log2(3).
pub fn bits_per_element(
    bits: f64,
    group: usize,
    context_tokens: usize,
    sink: usize,
    recent: usize,
) -> f64 {
    with_windows(bits + 32.0 / group as f64, context_tokens, sink, recent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_published_budget() {
        let at = |context| bits_per_element(2.0, 128, context, 64, 256);
        assert!((at(131_072) - 2.284).abs() < 5e-4);
        assert!((at(32_768) - 2.384).abs() < 5e-4);
        assert!(
            (at(200) - 16.0).abs() < 1e-12,
            "all of it lies in the windows"
        );
    }
}
