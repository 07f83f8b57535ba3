//! The `.pt` checkpoints that SGLang's OSCAR path loads: one file of keys' rotations, one of values'.
//!
//! `{format_version, objective, source_grouping, layers: {id: {layer_id, rotation, eigenvalues}}, calibration}`, saved
//! by `torch.save`. Version 1 has one matrix (d, d) a layer, version 2 one a KV head (H_kv, d, d); eigenvalues ascend.
//! The server multiplies keys and queries by `rotation` from the right, and folds that of values into the weights.

mod pickle;
mod read;
mod serve;
mod write;
mod zip;

pub use read::{Checkpoint, CheckpointLayer};
pub use serve::serve_script;
pub use write::{file_name, write};
