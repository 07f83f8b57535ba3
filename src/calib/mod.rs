//! Layer-streamed collection of moments, and fitting of zoo entries from them.
