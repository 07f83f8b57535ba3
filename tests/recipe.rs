//! Promise: a recipe stands for flags, says what is wrong with it, and an entry alone is enough to repeat its calibration.

mod checkpoint;
mod repository;
mod toy;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use oscar_kv::cli::{Cli, recipe};
use repository::oscar;
use tempfile::TempDir;
use toml::Table;
use toy::{Toy, str};

/// Runs a command that must end with `code`; what it says on standard output and standard error.
fn run(code: i32, arguments: &[&str]) -> String {
    let output = oscar(arguments);
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    said
}

/// All values of a command line, with its recipe; or what is said of it.
fn values(words: &[&str]) -> Result<Table, String> {
    let words: Vec<OsString> = [&["oscar"], words]
        .concat()
        .iter()
        .map(Into::into)
        .collect();
    match recipe::parse(&words) {
        Ok((_, given)) => Ok(given.values),
        Err(error) => Err(error.to_string()),
    }
}

fn file(folder: &TempDir, text: &str) -> PathBuf {
    let path = folder.path().join("r.toml");
    fs::write(&path, text).unwrap();
    path
}

/// A calibrated toy, with a little of everything that is not a default.
fn calibrated(toy: &Toy) -> PathBuf {
    let entry = toy.at("entry");
    let mut arguments = toy.collect(&entry);
    arguments[0] = "calibrate";
    arguments.extend(["--seed", "7", "--k-clip", "0.97", "--overlong", "truncate"]);
    run(0, &arguments);
    entry
}

fn tensors(entry: &Path) -> Vec<u8> {
    fs::read(entry.join("rotations.safetensors")).unwrap()
}

#[test]
fn an_entry_alone_repeats_its_calibration() {
    let toy = Toy::new();
    let entry = calibrated(&toy);
    assert!(run(0, &["verify", str(&entry)]).contains("ok      recipe"));

    let inside = entry.join("rotations.safetensors");
    for (name, recipe) in [("again", &entry), ("and again", &inside)] {
        let again = toy.at(name);
        let said = run(
            0,
            &["calibrate", "--recipe", str(recipe), "--out", str(&again)],
        );
        assert!(said.contains("byte for byte"), "{said}");
        assert!(tensors(&again) == tensors(&entry));
        let recipe = |entry: &Path| fs::read_to_string(entry.join("recipe.toml")).unwrap();
        assert_eq!(recipe(&again), recipe(&entry));
    }
    let text = fs::read_to_string(entry.join("recipe.toml")).unwrap();
    for line in ["seed = 7", "k-clip = 0.97", "sink = 64", "device = \"cpu\""] {
        assert!(text.contains(line), "{line}: {text}");
    }
    for key in ["out", "format", "zoo", "moments", "sample-rows"] {
        assert!(!text.contains(&format!("\n{key} =")), "{key}: {text}");
    }

    let said = run(
        2,
        &["calibrate", "--recipe", str(&entry), "--out", str(&entry)],
    );
    assert!(said.contains("replaced by its repeat"), "{said}");
    let other = ["--out", str(&toy.at("other")), "--k-clip", "0.5"].map(str::to_owned);
    let other: Vec<&str> = other.iter().map(String::as_str).collect();
    let said = run(
        0,
        &[&["calibrate", "--recipe", str(&entry)], &other[..]].concat(),
    );
    assert!(said.contains("the tensors are not those of"), "{said}");
}

#[test]
fn what_is_no_repeat_is_refused() {
    let toy = Toy::new();
    let entry = calibrated(&toy);
    let out = toy.at("out");
    let repeat = |code, more: &[&str]| {
        let base = ["calibrate", "--recipe", str(&entry), "--out", str(&out)];
        run(code, &[&base, more].concat())
    };

    let data = toy.at("data");
    fs::create_dir(&data).unwrap();
    for i in 1..8 {
        let name = format!("{i}.txt");
        fs::copy(toy.prompts.join(&name), data.join(&name)).unwrap();
    }
    let said = repeat(2, &["--data", str(&data)]);
    assert!(
        said.contains("other calibration tokens") && said.contains("--data"),
        "{said}"
    );
    assert!(said.contains("recipe.toml"), "{said}");
    let said = repeat(2, &["--seed", "8", "--tokens", "7000"]);
    assert!(said.contains("leave out --tokens and --seed"), "{said}");

    let model = toy.at("model");
    fs::create_dir(&model).unwrap();
    for name in fs::read_dir(&toy.model).unwrap() {
        let from = name.unwrap().path();
        let to = model.join(from.file_name().unwrap());
        if from.extension().is_some_and(|e| e == "safetensors") {
            let mut bytes = fs::read(&from).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(to, bytes).unwrap();
        } else {
            fs::copy(&from, to).unwrap();
        }
    }
    let said = repeat(2, &["--model", str(&model)]);
    assert!(
        said.contains("other weights") && said.contains("--model"),
        "{said}"
    );
    assert!(!out.exists());

    // The file instead of the entry: its settings, without a promise.
    let settings = entry.join("recipe.toml");
    run(
        0,
        &[
            "calibrate",
            "--recipe",
            str(&settings),
            "--model",
            str(&model),
            "--out",
            str(&out),
        ],
    );
}

#[test]
fn a_place_for_no_entry_is_refused_before_the_run() {
    let toy = Toy::new();
    let (taken, folder) = (toy.at("taken"), toy.at("folder"));
    fs::write(&taken, "mine").unwrap();
    fs::create_dir_all(folder.join("README.md")).unwrap();
    for (out, named) in [
        (&taken, "is a file"),
        (&taken.join("below"), "is a file"),
        (&folder, "README.md: is a folder"),
    ] {
        for more in [&[][..], &["--force"]] {
            let mut arguments = toy.collect(out);
            arguments[0] = "calibrate";
            let moments = toy.at("m.safetensors");
            arguments.extend(["--moments", str(&moments)]);
            arguments.extend(more);
            let said = run(2, &arguments);
            assert!(said.contains(named), "{said}");
            assert!(!moments.exists(), "{said}");
        }
    }
    assert_eq!(fs::read_to_string(&taken).unwrap(), "mine");
}

/// Entries of older versions have no recipe, and those that `fit` made do not know where model and prompts were.
#[test]
fn what_an_entry_does_not_say_is_asked_for() {
    let toy = Toy::new();
    let moments = toy.at("m.safetensors");
    run(0, &toy.collect(&moments));
    let entry = toy.at("entry");
    let fit = [
        "--method",
        "oscar",
        "--rounding",
        "nearest",
        "--scope",
        "layer",
    ];
    let fit = [&["fit", str(&moments), "--out", str(&entry)], &fit[..]].concat();
    run(
        0,
        &[
            &fit[..],
            &["--v-moment", "vwv", "--k-clip", "0.96", "--v-clip", "0.92"],
        ]
        .concat(),
    );
    assert!(run(0, &["verify", str(&entry)]).contains("recipe"));

    let again = toy.at("again");
    let base = ["calibrate", "--recipe", str(&entry), "--out", str(&again)];
    let said = run(2, &base);
    assert!(
        said.contains("neither it nor the command line gives `--model"),
        "{said}"
    );
    let more = ["--model", str(&toy.model), "--data", str(&toy.prompts)];
    let said = run(0, &[&base[..], &more].concat());
    assert!(said.contains("byte for byte"), "{said}");
    assert!(tensors(&again) == tensors(&entry));

    // What the metadata does not say is as by default, but for what can be seen from the tensors.
    fs::remove_file(entry.join("recipe.toml")).unwrap();
    assert!(!run(0, &["verify", str(&entry)]).contains("recipe"));
    let third = toy.at("third");
    let base = ["calibrate", "--recipe", str(&entry), "--out", str(&third)];
    let said = run(2, &[&base[..], &more].concat());
    assert!(said.contains("other calibration tokens"), "{said}");
    assert!(!said.contains("recipe.toml"), "{said}");
    let said = run(0, &[&base[..], &more, &["--holdout", "1024"]].concat());
    assert!(said.contains("byte for byte"), "{said}");
}

#[test]
fn a_recipe_that_contradicts_its_entry_is_damage() {
    let toy = Toy::new();
    let entry = calibrated(&toy);
    let path = entry.join("recipe.toml");
    let text = fs::read_to_string(&path).unwrap();
    for (line, other, named) in [
        (
            "seq-len = 512",
            "seq-len = 256",
            "`seq-len` is 256, the entry has 512",
        ),
        (
            "k-clip = 0.97",
            "k-clip = 0.96",
            "`k-clip` is 0.96, the entry has 0.97",
        ),
        ("seq-len = 512", "seqlen = 512", "did you mean `seq-len`?"),
        ("[calibrate]", "[collect]", "recipe"),
        // An entry may come from anywhere, and must not choose what is written here.
        (
            "[calibrate]",
            "[calibrate]\nmoments = '/etc/passwd'",
            "`moments` is no setting of an entry",
        ),
    ] {
        assert!(text.contains(line), "{text}");
        fs::write(&path, text.replace(line, other)).unwrap();
        let said = run(1, &["verify", str(&entry)]);
        assert!(
            said.contains("FAILED  recipe") && said.contains(named),
            "{said}"
        );
    }
}

#[test]
fn flags_win_over_a_recipe_and_a_recipe_over_defaults() {
    let folder = TempDir::new().unwrap();
    let path = file(
        &folder,
        "[fit]\nmoments = 'm'\nmethod = 'oscar'\nsink = 128\nforce = true\n\n[diff]\na = 'one'\nb = '-two'\n\n\
         [validate]\nentry = 'e'\nmodel = 'm'\nagainst = ['naive', 'kivi']\n\n[bench.decode]\nbatch = 4\n",
    );
    let recipe = ["--recipe", str(&path)];
    let got = values(&[&["fit"], &recipe[..], &["--method", "hadamard"]].concat()).unwrap();
    assert_eq!(got["moments"].as_str(), Some("m"));
    assert_eq!(got["method"].as_str(), Some("hadamard"));
    assert_eq!(got["sink"].as_integer(), Some(128));
    assert_eq!(got["recent"].as_integer(), Some(256));
    assert_eq!(got["force"].as_bool(), Some(true));
    let got = values(&[&["fit", "other"], &recipe[..]].concat()).unwrap();
    assert_eq!(got["moments"].as_str(), Some("other"));

    // Positional arguments fill up from the left; before the command and behind `--` it is the same.
    let got = values(&[&recipe[..], &["diff", "--", "-three"]].concat()).unwrap();
    let ends = (got["a"].as_str(), got["b"].as_str());
    assert_eq!(ends, (Some("-three"), Some("-two")));
    // A list is replaced, not added to.
    let got = values(&[&["validate"], &recipe[..], &["--against", "oscar"]].concat()).unwrap();
    assert_eq!(got["against"].as_array().unwrap().len(), 1);
    let got = values(&[&["bench", "decode"], &recipe[..]].concat()).unwrap();
    assert_eq!(got["batch"].as_integer(), Some(4));
    let said = values(&[&["bench", "step"], &recipe[..]].concat()).unwrap_err();
    assert!(
        said.contains("no table `[bench.step]`") && said.contains("`[bench.decode]`"),
        "{said}"
    );
}

#[test]
fn a_flag_beats_what_it_excludes() {
    let folder = TempDir::new().unwrap();
    let both = "file = ['a.safetensors']\nout = 'o'\n";
    let path = file(
        &folder,
        &format!("[import]\n{both}architecture = 'llama'\nheads = 4\n"),
    );
    let base = ["import", "--recipe", str(&path)];
    let got = values(&[&base[..], &["--model", "m"]].concat()).unwrap();
    assert!(got.contains_key("model") && !got.contains_key("heads"));
    assert!(values(&base).unwrap().contains_key("heads"));

    let path = file(&folder, &format!("[import]\n{both}model = 'm'\n"));
    let got = values(&["import", "--recipe", str(&path), "--heads", "4"]).unwrap();
    assert!(got.contains_key("heads") && !got.contains_key("model"));

    let path = file(&folder, "[fit]\nmoments = 'm'\nout = 'a'\n");
    let base = ["fit", "--recipe", str(&path)];
    let got = values(&[&base[..], &["--zoo", "b"]].concat()).unwrap();
    assert!(got["zoo"].as_str() == Some("b") && !got.contains_key("out"));
    assert_eq!(values(&base).unwrap()["out"].as_str(), Some("a"));

    let path = file(
        &folder,
        &format!("[import]\n{both}model = 'm'\nheads = 4\n"),
    );
    let said = values(&["import", "--recipe", str(&path)]).unwrap_err();
    assert!(
        said.contains("r.toml") && said.contains("--model") && said.contains("--heads"),
        "{said}"
    );
}

#[test]
fn what_is_wrong_is_named_with_file_table_and_key() {
    let folder = TempDir::new().unwrap();
    for (text, expected) in [
        ("[calibrat]", &["calibrat", "did you mean `calibrate`?"][..]),
        (
            "[bench.decoed]",
            &["bench", "decoed", "did you mean `decode`?"],
        ),
        (
            "[bench]\nbatch = 1",
            &["`bench.batch` stands in no command's table"],
        ),
        (
            "tokens = 1",
            &["`tokens` stands in no command's table", "[calibrate]"],
        ),
        ("fit = 1", &["`fit` is a command", "[fit]"]),
        ("[fit]\ntokn = 1", &["key of `[fit]`", "tokn", "known are"]),
        (
            "[fit]\nseq_len = 1\n[collect]\nseq_len = 1",
            &["`[collect]`", "seq_len", "did you mean `seq-len`?"],
        ),
        (
            "[verify]\npaths = ['x']",
            &["`[verify]`", "`paths`", "did you mean `path`?"],
        ),
        ("[fit]\nrecipe = 'x'", &["`[fit]`", "recipe of its own"]),
        ("[fit]\nhelp = true", &["`[fit]`", "`help`"]),
        ("[fit]\nm = 'x'", &["`[fit]`", "`m`"]),
        (
            "[fit]\nmethod = 'oskar'",
            &["`method` of `[fit]`", "`oskar`", "did you mean `oscar`?"],
        ),
        (
            "[fit]\nmethod = 3",
            &["`method` of `[fit]`", "text, in quotes"],
        ),
        (
            "[fit]\nmethod = ['oscar']",
            &["`method` of `[fit]`", "one value"],
        ),
        (
            "[fit]\nforce = 'yes'",
            &["`force` of `[fit]`", "true or false"],
        ),
        (
            "[fit]\ncenter = true",
            &["`center` of `[fit]`", "text, in quotes"],
        ),
        ("[fit]\nsink = true", &["`sink` of `[fit]`", "a number"]),
        ("[fit]\nsink = -1", &["`sink` of `[fit]`", "`-1`"]),
        ("[fit]\nsink = 1.5", &["`sink` of `[fit]`", "`1.5`"]),
        (
            "[fit]\nsink = 1979-05-27",
            &["`sink` of `[fit]`", "a number"],
        ),
        ("[fit.sink]\na = 1", &["`sink` of `[fit]`", "a number"]),
        ("[fit]\nout = ''", &["`out` of `[fit]`"]),
        (
            "[collect]\ndata = [['a']]",
            &["`data` of `[collect]`", "text"],
        ),
        (
            "[collect]\ndevice = 'gpu'",
            &["`device` of `[collect]`", "`gpu`", "cuda:N"],
        ),
        ("[fit]\nsink = 1\nsink = 2", &["sink", "line 3"]),
        ("[fit", &["line 1"]),
    ] {
        let path = file(&folder, text);
        // Whatever command runs, all of the file is looked at.
        let said = values(&["devices", "--recipe", str(&path)]).unwrap_err();
        for part in [&["r.toml"], expected].concat() {
            assert!(said.contains(part), "{text}: {said} lacks {part}");
        }
    }
    let path = file(&folder, "[devices]\nformat = 'jsn'");
    let said = run(2, &["devices", "--recipe", str(&path)]);
    assert!(
        said.starts_with("error: ") && said.contains("did you mean `json`?"),
        "{said}"
    );
    assert!(run(2, &["devices", "--recipe", "no/such.toml"]).contains("no/such.toml"));
    let said = run(2, &["devices", "--recipe", str(folder.path())]);
    assert!(
        said.contains("not a regular file") && said.contains("only `calibrate` takes an entry"),
        "{said}"
    );
    // What is wrong on the command line is said first, as without a recipe.
    let path = file(&folder, "[devices]\nformat = 'json'");
    let said = run(2, &["devices", "--formt", "text", "--recipe", str(&path)]);
    assert!(said.contains("--formt") && said.contains("Usage"), "{said}");
}

/// What a command line says, a recipe can say.
#[test]
fn command_lines_and_recipes_say_the_same() {
    let folder = TempDir::new().unwrap();
    for words in [
        &["verify", "a", "b"][..],
        &["card", "a"],
        #[cfg(feature = "hub")]
        &["pull", "hf:a/b"],
        #[cfg(feature = "hub")]
        &["publish", "e", "--to", "hf:a/b"],
        &[
            "collect",
            "-m",
            "x",
            "-o",
            "y",
            "--seed",
            "18446744073709551615",
            "--fresh",
        ],
        &[
            "fit", "m", "--k-clip", "1e-3", "-p", "0.4", "--center", "off",
        ],
        &[
            "validate",
            "e",
            "-m",
            "x",
            "-a",
            "naive,kivi",
            "--max-kl-ratio",
            "naive=0.4",
            "--no-write",
        ],
        &[
            "generate",
            "-m",
            "x",
            "--kv",
            "bf16",
            "--prompt=-- \"a\"\nb",
            "--kv-memory",
            "1MiB",
        ],
        &[
            "check",
            "e",
            "-b",
            "o",
            "-m",
            "x",
            "--recalibrate",
            "--calibration-data",
            "c",
        ],
        &["bench", "decode", "-b", "3"],
        &[
            "bench",
            "collect",
            "-c",
            "config.json",
            "--device",
            "cuda:1",
        ],
    ] {
        let expected = values(words).unwrap();
        let command = if words[0] == "bench" { 2 } else { 1 };
        let name = words[..command].join(".");
        let text = format!("[{name}]\n{}", toml::to_string(&expected).unwrap());
        let path = file(&folder, &text);
        let again = [&words[..command], &["--recipe", str(&path)]].concat();
        assert_eq!(values(&again).unwrap(), expected, "{text}");
    }
}

/// A key means one argument.
#[test]
fn keys_are_unambiguous() {
    let root = Cli::command();
    let mut commands: Vec<_> = root.get_subcommands().collect();
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands());
        let mut keys = BTreeSet::new();
        for arg in command.get_arguments() {
            let shown = arg.get_value_names().and_then(|names| names.first());
            let key = match (arg.get_long(), shown) {
                (Some(long), _) => long.to_owned(),
                (None, shown) => shown.unwrap().to_lowercase(),
            };
            assert!(arg.is_positional() || arg.get_long().is_some(), "{key}");
            assert!(keys.insert(key), "{}: {arg}", command.get_name());
        }
    }
}
