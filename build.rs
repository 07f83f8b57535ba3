//! With feature `cuda`: compiles `kernels/*.cu` to one fat binary each, which the library embeds.
//!
//! `CUDA_COMPUTE_CAP` (such as `90`) says for which GPU, as for candle's own kernels; `OSCAR_COMPUTE_CAPS` (such as
//! `80,90,100`) for which others besides. Every binary also holds PTX, which the driver compiles for newer GPUs.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// `kernels/*.cu`, by name. Cargo would watch a folder with all that lies in it, its README too: sources are watched one
/// by one, and a new one is noticed because it is added here.
const KERNELS: [&str; 8] = [
    "append",
    "bench",
    "decode_rows",
    "demote",
    "demote_hopper",
    "int2_decode",
    "prefill",
    "transform",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for name in [
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_COMPUTE_CAP",
        "OSCAR_COMPUTE_CAPS",
    ] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_some()
        && let Err(problem) = compile_kernels()
    {
        println!("cargo::error={problem}");
    }
}

fn compile_kernels() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let nvcc = nvcc();
    let caps = compute_caps()?;
    watch()?;
    // nvcc takes a minute for some of them, on one core.
    let (nvcc, caps, out) = (&nvcc, &caps, &out);
    std::thread::scope(|scope| {
        let running = KERNELS.map(|name| scope.spawn(move || compile(nvcc, name, caps, out)));
        running
            .into_iter()
            .try_for_each(|compiled| compiled.join().map_err(|_| "nvcc's thread failed")?)
    })?;
    let mut text = format!(
        "pub const TOOLKIT: i32 = {};\npub const KERNELS: &[(&str, &[u8])] = &[\n",
        toolkit_version(nvcc)?
    );
    for name in KERNELS {
        let fatbin = fatbin(name, out);
        let path = fatbin.to_str().ok_or("OUT_DIR is not UTF-8")?;
        let _ = writeln!(text, "    ({name:?}, include_bytes!({path:?})),");
    }
    text += "];\n";
    fs::write(out.join("kernels.rs"), text).map_err(|e| format!("kernels.rs: {e}"))
}

/// The kernels and what they include.
fn watch() -> Result<(), String> {
    for item in Path::new("kernels")
        .read_dir()
        .map_err(|e| format!("kernels: {e}"))?
    {
        let path = item.map_err(|e| format!("kernels: {e}"))?.path();
        if path.extension().is_some_and(|x| x == "cu" || x == "cuh") {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    Ok(())
}

fn fatbin(name: &str, out: &Path) -> PathBuf {
    out.join(name).with_extension("fatbin")
}

/// As the driver counts: 13000 for 13.0.
fn toolkit_version(nvcc: &Path) -> Result<u32, String> {
    let text = run(Command::new(nvcc).arg("--version"))?;
    let version = text.split("release ").nth(1).and_then(|rest| {
        let (major, rest) = rest.split_once('.')?;
        let (minor, _) = rest.split_once(',')?;
        Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
    });
    version.ok_or_else(|| format!("`{}` names no version: {text}", nvcc.display()))
}

/// What it prints.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = command.output().map_err(|e| {
        format!(
            "`{program}` does not run ({e}): install a CUDA toolkit, or run `scripts/cuda-toolchain.sh` and source the \
             `env.sh` that it names"
        )
    })?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    for line in String::from_utf8_lossy(&done.stderr).lines() {
        println!("cargo::warning={line}");
    }
    Err(format!("`{program}` failed: {command:?}"))
}

fn nvcc() -> PathBuf {
    let home = |name| Some(PathBuf::from(env::var_os(name)?).join("bin/nvcc"));
    env::var_os("NVCC")
        .map(PathBuf::from)
        .or_else(|| home("CUDA_HOME"))
        .or_else(|| home("CUDA_PATH"))
        .unwrap_or_else(|| "nvcc".into())
}

/// Such as 80, 90.
fn compute_caps() -> Result<Vec<u32>, String> {
    let list = |name: &str| env::var(name).unwrap_or_default();
    let both = format!(
        "{},{}",
        list("CUDA_COMPUTE_CAP"),
        list("OSCAR_COMPUTE_CAPS")
    );
    let mut caps = Vec::new();
    for cap in both.split([',', ';', ' ']).filter(|cap| !cap.is_empty()) {
        match cap.trim_end_matches('a').replace('.', "").parse() {
            Ok(number @ 80..=129) => caps.push(number),
            _ => {
                return Err(format!(
                    "compute capability `{cap}` is not one of 80 to 129: set `CUDA_COMPUTE_CAP`, such as 90"
                ));
            }
        }
    }
    caps.sort_unstable();
    caps.dedup();
    if caps.is_empty() {
        return Err("set `CUDA_COMPUTE_CAP`, such as 90 for an H100 or H200".into());
    }
    Ok(caps)
}

/// A source whose first line reads `// sm_90a` uses what only Hopper has: it is compiled for that alone.
fn compile(nvcc: &Path, name: &str, caps: &[u32], out: &Path) -> Result<(), String> {
    let source = format!("kernels/{name}.cu");
    let text = fs::read_to_string(&source).map_err(|e| format!("{source}: {e}"))?;
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-lineinfo"]);
    if text.starts_with("// sm_90a") {
        command.arg("-gencode=arch=compute_90a,code=sm_90a");
    } else {
        for cap in caps {
            command.arg(format!("-gencode=arch=compute_{cap},code=sm_{cap}"));
        }
        let lowest = caps[0];
        command.arg(format!(
            "-gencode=arch=compute_{lowest},code=compute_{lowest}"
        ));
    }
    run(command.arg("-o").arg(fatbin(name, out)).arg(source)).map(drop)
}
