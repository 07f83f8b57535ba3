//! The KV cache as queries meet it: attention over exact and quantized tokens.

pub mod attention;
