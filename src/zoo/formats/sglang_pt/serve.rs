//! The script that starts a server with exported rotations.

use std::fmt::Write;

use super::file_name;
use crate::zoo::SideName;
use crate::zoo::formats::Orthogonal;

/// A POSIX shell script that lies beside the two `.pt` files and starts SGLang with them; its arguments are handed on.
pub fn serve_script(entry: &Orthogonal) -> String {
    let metadata = entry.metadata();
    let model = &metadata.model;
    let mut text = String::from("#!/bin/sh\n");
    let _ = writeln!(
        text,
        "# Serves {} with a 2-bit KV cache on SGLang's OSCAR path; needs a build that has it.\n\
         # Written by `oscar export`. Arguments are handed to SGLang; MODEL names other weights of the same model.\n\
         set -eu\n\
         here=$(CDPATH='' cd -- \"$(dirname -- \"$0\")\" && pwd)",
        comment(&model.id)
    );
    for loss in &entry.losses {
        let _ = writeln!(text, "# NOTE: {}", comment(loss));
    }
    let _ = writeln!(
        text,
        "calibrated={}\nmodel=${{MODEL:-$calibrated}}",
        quoted(&model.id)
    );
    let file = |side| file_name(entry, side);
    for (name, value) in [
        (
            "SGLANG_OSCAR_K_ROTATION_PATH",
            format!("\"$here\"/{}", file(SideName::K)),
        ),
        (
            "SGLANG_OSCAR_V_ROTATION_PATH",
            format!("\"$here\"/{}", file(SideName::V)),
        ),
        ("SGLANG_OSCAR_K_CLIP_RATIO", entry.k_clip.to_string()),
        ("SGLANG_OSCAR_V_CLIP_RATIO", entry.v_clip.to_string()),
        ("SGLANG_OSCAR_ABSORB_V_ROTATION", "1".to_owned()),
        ("SGLANG_ENABLE_MIXED_KV_WINDOWS", "1".to_owned()),
        (
            "SGLANG_MIXED_KV_PREFIX_TOKENS",
            metadata.windows.sink_tokens.to_string(),
        ),
        (
            "SGLANG_MIXED_KV_RECENT_TOKENS",
            metadata.windows.recent_tokens.to_string(),
        ),
        (
            "SGLANG_MIXED_KV_SCALE_DTYPE",
            quoted(&metadata.quantizer.scale_dtype),
        ),
    ] {
        let _ = writeln!(text, "export {name}={value}");
    }
    if let Some(said) = model.revision.as_deref().filter(|said| !said.is_empty()) {
        // Other weights have other revisions.
        let _ = writeln!(
            text,
            "[ -n \"${{MODEL:-}}\" ] || set -- --revision {} \"$@\"",
            quoted(said)
        );
    }
    let _ = writeln!(
        text,
        "exec python3 -m sglang.launch_server --model-path \"$model\" --kv-cache-dtype int2 \\\n  \
         --kv-cache-quant-group-size {} \"$@\"",
        metadata.quantizer.group
    );
    text
}

/// One line, whatever a file calls its model.
fn comment(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// A word of the shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
