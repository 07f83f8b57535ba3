//! Attention over cached keys and values.
