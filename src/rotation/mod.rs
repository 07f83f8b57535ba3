//! Transforms of keys and values toward what attention reads.
