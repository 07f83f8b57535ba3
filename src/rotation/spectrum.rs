//! What a spectrum and a channel importance say in one number.

/// Largest over smallest eigenvalue; infinite where the smallest is not positive. `spectrum` in any order.
pub fn condition(spectrum: &[f64]) -> f64 {
    let largest = spectrum.iter().copied().fold(0.0, f64::max);
    let smallest = spectrum.iter().copied().fold(f64::INFINITY, f64::min);
    if smallest > 0.0 {
        largest / smallest
    } else {
        f64::INFINITY
    }
}

/// exp of the entropy of the eigenvalues' shares (Roy and Vetterli 2007): d for a flat spectrum, 1 for a single
/// direction, 0 for an empty one. Negative eigenvalues count as zero.
pub fn effective_rank(spectrum: &[f64]) -> f64 {
    let total: f64 = spectrum.iter().map(|x| x.max(0.0)).sum();
    if total <= 0.0 {
        return 0.0;
    }
    let entropy: f64 = spectrum
        .iter()
        .map(|x| x.max(0.0) / total)
        .filter(|share| *share > 0.0)
        .map(|share| -share * share.ln())
        .sum();
    entropy.exp()
}

/// Mean over largest channel importance (a moment's diagonal): 1 where every channel matters alike, 1/d where one
/// channel is all; 1 where nothing matters.
pub fn flatness(importance: &[f64]) -> f64 {
    let largest = importance.iter().copied().fold(0.0, f64::max);
    if largest <= 0.0 {
        return 1.0;
    }
    importance.iter().sum::<f64>() / importance.len() as f64 / largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_and_single_spectra_are_the_extremes() {
        assert!((effective_rank(&[2.0; 8]) - 8.0).abs() < 1e-12);
        assert!((effective_rank(&[3.0, 0.0, 0.0]) - 1.0).abs() < 1e-12);
        assert!(effective_rank(&[0.0; 4]).abs() < 1e-12);
        assert!((condition(&[1.0, 4.0, 2.0]) - 4.0).abs() < 1e-12);
        assert!(condition(&[1.0, 0.0]).is_infinite());
        assert!((flatness(&[5.0; 4]) - 1.0).abs() < 1e-12);
        assert!((flatness(&[4.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((flatness(&[0.0; 4]) - 1.0).abs() < 1e-12);
    }
}
