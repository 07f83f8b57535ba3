//! Readers of files from elsewhere survive anything: no panic, no hang, no memory beyond twice the file.
//!
//! Seeds (made here, and kept in `tests/fixtures/hostile`) are mutated by a seeded generator, for a few seconds a reader,
//! or for OSCAR_FUZZ_SECONDS. An input that fails is written beside the temporary files and named.

mod checkpoint;
mod pt;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use checkpoint::Checkpoint as Toy;
use oscar_kv::cli::recipe::Recipe;
use oscar_kv::model::GgufLayout;
use oscar_kv::zoo::formats::sglang_pt::Checkpoint;
use oscar_kv::zoo::formats::{ImportOptions, import};
use oscar_kv::zoo::{self, Entry};
use pt::{Pickle, Rotations, Saved};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Counts live bytes, and their most.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    MOST.fetch_max(live, Relaxed);
}

// SAFETY: hands every call to the system's allocator unchanged.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tests of one process share the counters.
static ALONE: Mutex<()> = Mutex::new(());

/// What readers may take beyond twice the file: parsed headers of small files, error texts, threads.
const ALLOWANCE: usize = 4 << 20;
/// Longer than any input of this size should take, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Most bytes that `task` had at once, beyond what there was.
fn peak(task: impl FnOnce()) -> usize {
    let before = LIVE.load(Relaxed);
    MOST.store(before, Relaxed);
    task();
    MOST.load(Relaxed).saturating_sub(before)
}

struct Target {
    name: &'static str,
    /// File name of an input.
    file: &'static str,
    read: fn(&Path),
    /// Words that mutations put in.
    words: &'static [&'static [u8]],
}

const PT: Target = Target {
    name: "pt",
    file: "k_rotation.pt",
    read: |path| {
        let bytes = fs::read(path).unwrap();
        let _ = Checkpoint::read("k_rotation.pt", &bytes);
    },
    words: &[
        b"torch",
        b"ctorch\nHalfStorage\n",
        b"PK\x05\x06",
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"]q\x00h\x00a",
        b"}(",
        b"tR",
    ],
};

const ENTRY: Target = Target {
    name: "entry",
    file: zoo::FILE,
    read: |path| {
        let _ = Entry::open(path);
        let _ = zoo::verify(path);
    },
    words: &[
        b"\"shape\":[",
        b"\"data_offsets\":[0,",
        b"F64",
        b"layers.",
        b"\\\"",
        b"4294967296",
        b"[[[[",
        b"NaN",
    ],
};

const GGUF: Target = Target {
    name: "gguf",
    file: "model.gguf",
    read: |path| {
        let _ = GgufLayout::read(path);
    },
    words: &[
        b"\x09\0\0\0\x00\0\0\0",
        b"\x08\0\0\0",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"general.alignment",
        b"blk.0.",
    ],
};

const RECIPE: Target = Target {
    name: "recipe",
    file: zoo::RECIPE,
    read: |path| {
        let _ = Recipe::read(path);
    },
    words: &[
        b"[calibrate]",
        b"[bench.decode]",
        b"[[fit]]",
        b"a.b.c.d = 1",
        b"\"\"\"",
        b"[[[[[[[[",
        b"{a={a={",
        b"1e999",
        b"-9223372036854775808",
        b"1979-05-27T07:32:00Z",
        b"\\U0010FFFF",
        b"tokens = ",
        b"data = [",
    ],
};

fn seeds(target: &Target, folder: &Path) -> Vec<Vec<u8>> {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/hostile")
        .join(target.name);
    let mut paths: Vec<PathBuf> = fs::read_dir(&kept)
        .map(|files| files.map(|file| file.unwrap().path()).collect())
        .unwrap_or_default();
    paths.sort();
    let mut seeds: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    seeds.extend(match target.name {
        "pt" => vec![
            Rotations::of_layers("qqt_r_h_pbr", 8, &[0, 3])
                .saved()
                .bytes(),
            Rotations::of_heads("sst_r_h_pbr", 8, 2, &[0, 3])
                .saved()
                .bytes(),
            with_calibration().bytes(),
        ],
        "entry" => [imported(8, &[0, 1]), imported(16, &[2])]
            .map(|entry| {
                let place = folder.join("entry");
                entry.write(&place, true).unwrap();
                fs::read(place.join(zoo::FILE)).unwrap()
            })
            .to_vec(),
        "recipe" => vec![RECIPES.into(), b"[fit]\nmoments = 'm'\n".to_vec()],
        _ => {
            let path = folder.join("seed.gguf");
            Toy::llama().write_gguf(&path);
            let mut bytes = fs::read(&path).unwrap();
            // Headers are what is read; a short file is mutated where it matters.
            let whole = bytes.clone();
            bytes.truncate(6 << 10);
            vec![bytes, whole]
        }
    });
    seeds
}

const RECIPES: &[u8] = br#"# all kinds of values
[calibrate]
model = "toy"
data = ["prompts", 'more "prompts"']
tokens = 8_000
seq-len = 512
k-clip = 0.96
center = "on"
fresh = true
out = """
entry"""

[validate]
entry = "entry"
against = ["naive", "kivi"]
max-kl-ratio = "naive=0.5"
device = "cpu"

[bench.collect]
config = "config.json"

[bench]
decode = { batch = 8, context = 1_000, format = "json" }

[import]
file = ["k.pt", "v.pt"]
heads = 9
k-clip = 9.6e-1
"#;

fn with_calibration() -> Saved {
    let mut all = Rotations::of_layers("qqt_r_h_pbr", 8, &[0]);
    all.more = Pickle::default()
        .text("calibration")
        .begin()
        .text("tokens")
        .int(7)
        .text("list")
        .raw(b"]q\x05(K\x01h\x05e")
        .text("loss")
        .float(0.5)
        .end();
    all.saved()
}

fn imported(d: usize, ids: &[usize]) -> Entry {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        Rotations::of_heads("qqt_r_h_pbr", d, 2, ids)
            .saved()
            .write(folder.path(), "k_rotation.pt"),
        Rotations::of_heads("sst_r_h_pbr", d, 2, ids)
            .saved()
            .write(folder.path(), "v_rotation.pt"),
    ];
    let options = ImportOptions {
        model_id: Some("org/model".into()),
        heads: Some(4),
        ..ImportOptions::default()
    };
    import(&files, &options).unwrap().entry
}

fn mutated(seed: &[u8], other: &[u8], target: &Target, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..rng.random_range(1..=4) {
        if bytes.is_empty() {
            return bytes;
        }
        // Most of a file is numbers; what is parsed stands at its ends.
        let near = |rng: &mut ChaCha8Rng, length: usize| match rng.random_range(0..3) {
            0 => rng.random_range(0..length),
            1 => rng.random_range(0..length.min(2048)),
            _ => length - 1 - rng.random_range(0..length.min(1024)),
        };
        let at = near(rng, bytes.len());
        match rng.random_range(0..9) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][rng.random_range(0..5)],
            3 => bytes.truncate(at),
            4 => {
                let end = (at + rng.random_range(1..64)).min(bytes.len());
                bytes.drain(at..end);
            }
            5 => {
                let end = (at + rng.random_range(1..256)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                let times = rng.random_range(1..20);
                let to = near(rng, bytes.len());
                bytes.splice(to..to, part.repeat(times));
            }
            6 => {
                let word = target.words[rng.random_range(0..target.words.len())];
                let end = (at + word.len()).min(bytes.len());
                bytes.splice(at..end, word.iter().copied());
            }
            7 => {
                let width = [2, 4, 8][rng.random_range(0..3)];
                let number: u64 = match rng.random_range(0..4) {
                    0 => bytes.len() as u64,
                    1 => rng.random(),
                    2 => u64::from(rng.random::<u16>()),
                    _ => u64::MAX - u64::from(rng.random::<u8>()),
                };
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            _ => {
                let from = rng.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            }
        }
    }
    if target.name == "pt" && rng.random_range(0..4) > 0 {
        mend_checksums(&mut bytes);
    }
    bytes
}

/// Checksums are the first thing a damaged zip fails by; most inputs should come further.
fn mend_checksums(bytes: &mut [u8]) {
    let u32_at = |bytes: &[u8], at: usize| -> Option<usize> {
        Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize)
    };
    let u16_at = |bytes: &[u8], at: usize| -> Option<usize> {
        Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?).into())
    };
    let mut at = 0;
    while let Some(found) = bytes
        .get(at..)
        .and_then(|rest| rest.windows(4).position(|part| part == b"PK\x01\x02"))
    {
        let entry = at + found;
        at = entry + 4;
        let crc = (|| {
            let (size, start) = (u32_at(bytes, entry + 24)?, u32_at(bytes, entry + 42)?);
            let header = 30
                + u16_at(bytes, start.checked_add(26)?)?
                + u16_at(bytes, start.checked_add(28)?)?;
            let data = bytes.get(start.checked_add(header)?..)?.get(..size)?;
            Some(crc32fast::hash(data))
        })();
        if let Some(crc) = crc
            && let Some(field) = bytes.get_mut(entry + 16..entry + 20)
        {
            field.copy_from_slice(&crc.to_le_bytes());
        }
    }
}

/// Reads one input under watch; `Err` says what went wrong.
fn survives(target: &Target, path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).unwrap();
    let start = Instant::now();
    let mut outcome = Ok(());
    let most = peak(|| {
        let read = catch_unwind(AssertUnwindSafe(|| (target.read)(path)));
        if read.is_err() {
            outcome = Err("panicked".to_owned());
        }
    });
    if start.elapsed() > PATIENCE {
        outcome = Err(format!("took {:?}", start.elapsed()));
    }
    let limit = 2 * bytes.len() + ALLOWANCE;
    if most > limit {
        outcome = Err(format!("took {most} bytes of memory for {}", bytes.len()));
    }
    outcome
}

fn fuzz(target: &Target) {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let seconds = std::env::var("OSCAR_FUZZ_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(2));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(target.file);
    let seeds = seeds(target, folder.path());
    let mut rng = ChaCha8Rng::seed_from_u64(seconds.unwrap_or(0));
    let check = |bytes: &[u8]| {
        if let Err(problem) = survives(target, &path, bytes) {
            let kept = std::env::temp_dir().join(format!(
                "oscar-fuzz-{}-{:08x}",
                target.name,
                crc32fast::hash(bytes)
            ));
            fs::write(&kept, bytes).unwrap();
            panic!(
                "{}: {problem}; the input is `{}`",
                target.name,
                kept.display()
            );
        }
    };
    for seed in &seeds {
        check(seed);
    }
    let start = Instant::now();
    let mut inputs = 0;
    while start.elapsed() < time {
        let seed = &seeds[rng.random_range(0..seeds.len())];
        let other = &seeds[rng.random_range(0..seeds.len())];
        check(&mutated(seed, other, target, &mut rng));
        inputs += 1;
    }
    println!("{}: {inputs} inputs in {:?}", target.name, start.elapsed());
    assert!(inputs > 0);
}

#[test]
fn pt_files() {
    fuzz(&PT);
}

#[test]
fn entries() {
    fuzz(&ENTRY);
}

#[test]
fn gguf_headers() {
    fuzz(&GGUF);
}

#[test]
fn recipes() {
    assert!(Recipe::parse(std::str::from_utf8(RECIPES).unwrap(), "seed").is_ok());
    fuzz(&RECIPE);
}

/// Bytes that each ask for far more than their size.
#[test]
fn headers_that_expand() {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let size = 8 << 20;

    let nothing = Pickle::new().raw(&vec![b'N'; size]).raw(b".");
    let nothing = Saved {
        pickle: nothing,
        storages: Vec::new(),
        ..with_calibration()
    }
    .bytes();

    let mut bools = b"GGUF\x03\0\0\0".to_vec();
    bools.extend([0u64.to_le_bytes(), 1u64.to_le_bytes()].concat());
    bools.extend(
        [
            &1u64.to_le_bytes()[..],
            b"a",
            &9u32.to_le_bytes(),
            &7u32.to_le_bytes(),
        ]
        .concat(),
    );
    bools.extend((size as u64).to_le_bytes());
    bools.resize(bools.len() + size, 1);

    let mut ones = br#"{"__metadata__":{"oscar":"{}"},"a":{"dtype":"F32","shape":[1"#.to_vec();
    ones.extend(b",1".repeat(size / 2));
    ones.extend(br#"],"data_offsets":[0,4]}}"#);
    let ones = [&(ones.len() as u64).to_le_bytes()[..], &ones, &[0; 4]].concat();

    let mut tables = "[a]\n".repeat(size / 4).into_bytes();
    let nested = b"[".repeat(30 << 10);
    let dotted = [&b"a.".repeat(15 << 10)[..], b"a = 1"].concat();
    let words = [&b"[fit]\nmethod = '"[..], &b"x".repeat(30 << 10), b"'"].concat();
    let list = [&b"[fit]\nmoments = ["[..], &b"1,".repeat(15 << 10), b"]"].concat();
    let name = [&b"[fit]\n"[..], &b"x".repeat(30 << 10), b" = 1"].concat();
    tables.truncate(size);

    for (target, bytes) in [
        (&PT, nothing),
        (&GGUF, bools),
        (&ENTRY, ones),
        (&RECIPE, tables),
        (&RECIPE, nested),
        (&RECIPE, dotted),
        (&RECIPE, words),
        (&RECIPE, list),
        (&RECIPE, name),
    ] {
        let path = folder.path().join(target.file);
        survives(target, &path, &bytes)
            .unwrap_or_else(|problem| panic!("{}: {problem}", target.name));
    }
}

/// An import holds its files, the entry and the bytes it writes: less than three times the files.
#[test]
fn imports_stay_small() {
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<usize> = (0..36).collect();
    let files = [
        ("qqt_r_h_pbr", "k_rotation.pt"),
        ("sst_r_h_pbr", "v_rotation.pt"),
    ]
    .map(|(objective, name)| {
        Rotations::of_layers(objective, 128, &ids)
            .saved()
            .write(folder.path(), name)
    });
    let bytes: usize = files
        .iter()
        .map(|file| fs::metadata(file).unwrap().len() as usize)
        .sum();
    let options = ImportOptions {
        model_id: Some("org/model".into()),
        heads: Some(32),
        kv_heads: Some(8),
        ..ImportOptions::default()
    };
    let start = Instant::now();
    let most = peak(|| {
        let made = import(&files, &options).unwrap();
        made.entry
            .write(&folder.path().join("entry"), false)
            .unwrap();
    });
    println!(
        "36 layers, head_dim 128: {:?}, {most} bytes of memory for {bytes} of files",
        start.elapsed()
    );
    assert!(
        most < 3 * bytes,
        "{most} bytes of memory for {bytes} of files"
    );
}
