//! Teacher-forced evaluation of quantized caches against full precision.
