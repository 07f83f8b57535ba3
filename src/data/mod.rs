//! Prompts in, packed token ids out.
