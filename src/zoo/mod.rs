//! Zoo entries: schema, safetensors I/O, verification.
