//! What `--data` accepts, and what it says about everything else.
//!
//! Fixtures: `smollm2_tokens.json` holds ids by Python's `tokenizers`, with the pre-tokenizer of SmolLM2's own
//! `tokenizer.json` spelt by hand, and a chat by `transformers`; the `.parquet` files are pyarrow's.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use oscar_kv::data::{ChatTemplate, PackOptions, Prompt, Tokenizer, pack, prompts};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/data")
        .join(name)
}

/// SmolLM2-135M-Instruct where the quickstart leaves it, or where `OSCAR_TEST_GGUF` says.
fn smollm2() -> Option<PathBuf> {
    let path = std::env::var_os("OSCAR_TEST_GGUF").map_or_else(
        || {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("target/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    if path.is_file() {
        return Some(path);
    }
    eprintln!(
        "skipped: no `{}`; set OSCAR_TEST_GGUF or run the quickstart",
        path.display()
    );
    None
}

fn write(folder: &TempDir, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path
}

fn read(path: &Path) -> oscar_kv::Result<Vec<Prompt>> {
    prompts::read(&[path.to_owned()], None)
}

fn texts(prompts: &[Prompt]) -> Vec<&str> {
    prompts.iter().map(|p| p.text.as_str()).collect()
}

/// The error of reading `bytes` as a file `name`, with the folder cut off.
fn refusal(name: &str, bytes: impl AsRef<[u8]>) -> String {
    let folder = TempDir::new().unwrap();
    let error = read(&write(&folder, name, bytes)).unwrap_err().to_string();
    error.replace(&format!("{}/", folder.path().display()), "")
}

/// Byte-level vocabulary: all 256 bytes, some merges, two control tokens.
fn gguf(folder: &TempDir, pre: Option<&str>, change: &[(&str, Value)]) -> PathBuf {
    let strings = |items: Vec<String>| Value::Array(items.into_iter().map(Value::String).collect());
    // GPT-2's stand-ins for bytes: printable ones for themselves, the others from U+0100 on.
    let printable = |b: &u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let bytes = (0..256u32).filter(printable);
    let others = (0..(256 - bytes.clone().count() as u32)).map(|i| 0x100 + i);
    let mut tokens: Vec<String> = bytes
        .chain(others)
        .map(|c| char::from_u32(c).unwrap().to_string())
        .collect();
    let merges = ["1 2", "12 3", "123 4", "a b", "Ġ a"];
    tokens.extend(merges.map(|m| m.replace(' ', "")));
    let normal = tokens.len();
    tokens.extend(["<s>".to_owned(), "</s>".to_owned(), "<tool>".to_owned()]);
    let types = (0..tokens.len()).map(|i| match i.checked_sub(normal) {
        None => Value::I32(1),
        Some(2) => Value::I32(4),
        Some(_) => Value::I32(3),
    });
    let mut metadata = vec![
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.token_type", Value::Array(types.collect())),
        ("tokenizer.ggml.tokens", strings(tokens)),
        (
            "tokenizer.ggml.merges",
            strings(merges.map(str::to_owned).to_vec()),
        ),
        ("tokenizer.ggml.bos_token_id", Value::U32(normal as u32)),
        ("tokenizer.ggml.eos_token_id", Value::U32(normal as u32 + 1)),
    ];
    if let Some(pre) = pre {
        metadata.push(("tokenizer.ggml.pre", Value::String(pre.into())));
    }
    for (key, value) in change {
        metadata.retain(|(other, _)| other != key);
        metadata.push((key, value.clone()));
    }
    gguf_of(folder, &metadata)
}

fn gguf_of(folder: &TempDir, metadata: &[(&str, Value)]) -> PathBuf {
    let path = folder.path().join("model.gguf");
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    gguf_file::write(&mut fs::File::create(&path).unwrap(), &metadata, &[]).unwrap();
    path
}

fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, false).unwrap();
    ids.iter()
        .map(|&id| tokenizer.decode(&[id]).unwrap())
        .collect()
}

// ---- readers -------------------------------------------------------------------------------------------------------

#[test]
fn a_text_file_is_one_prompt() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, "a.txt", "\u{feff}one\r\ntwo\n\nthree é");
    let prompts = read(&path).unwrap();
    assert_eq!(texts(&prompts), ["one\ntwo\n\nthree é"]);
    assert_eq!(prompts[0].place, path.display().to_string());
    assert!(!prompts[0].templated);
}

#[test]
fn a_line_of_jsonl_is_one_prompt() {
    let folder = TempDir::new().unwrap();
    let path = write(
        &folder,
        "a.jsonl",
        "\u{feff}{\"text\": \"one\\ntwo\"}\r\n\n{\"prompt\": \"three\", \"id\": 7}\n{\"text\": \"\"}\n{\"text\": null, \"prompt\": \"four\"}",
    );
    let prompts = read(&path).unwrap();
    assert_eq!(texts(&prompts), ["one\ntwo", "three", "four"]);
    assert!(prompts[1].place.ends_with("a.jsonl:3"));
    assert!(prompts[2].place.ends_with("a.jsonl:5"));
}

#[test]
fn a_row_of_parquet_is_one_prompt() {
    let prompts = read(&fixture("texts.parquet")).unwrap();
    assert_eq!(
        texts(&prompts),
        [
            "first row",
            "zweite Zeile: größer",
            "third row\nof two lines"
        ]
    );
    assert!(prompts[1].place.ends_with("texts.parquet, row 2"));
}

#[test]
fn chats_of_jsonl_and_parquet_render_alike() {
    let folder = TempDir::new().unwrap();
    let template = "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% endif %}\
                    {% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}\n{% endfor %}";
    let tokenizer = Tokenizer::from_gguf(&gguf(
        &folder,
        Some("smollm"),
        &[("tokenizer.chat_template", Value::String(template.into()))],
    ))
    .unwrap();
    let template = ChatTemplate::of(&tokenizer).unwrap();
    let jsonl = write(
        &folder,
        "chats.jsonl",
        r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
           {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": null, "tool_calls": [{"name": "count", "count": 3}]}]}"#,
    );
    let from_jsonl = prompts::read(&[jsonl], Some(&template)).unwrap();
    let from_parquet = prompts::read(&[fixture("chats.parquet")], Some(&template)).unwrap();
    assert_eq!(
        texts(&from_jsonl),
        [
            "[user] hi</s>\n[assistant] hello</s>\n",
            "[user] count</s>\n[assistant] [{\"name\": \"count\", \"count\": 3}]</s>\n"
        ]
    );
    assert_eq!(texts(&from_jsonl), texts(&from_parquet));
    assert!(from_jsonl.iter().all(|p| p.templated));
    let ids = tokenizer.encode_prompts(&from_jsonl, 1000).unwrap();
    let eos = tokenizer.separator().unwrap();
    assert_eq!(ids[0].token_ids.iter().filter(|&&id| id == eos).count(), 2);
}

#[test]
fn a_folder_is_read_in_order_of_path() {
    let folder = TempDir::new().unwrap();
    write(&folder, "b.txt", "2");
    write(&folder, "a/z.jsonl", r#"{"text": "1"}"#);
    write(&folder, "c/deep/x.TXT", "3");
    for other in [
        "README.md",
        "README.txt",
        "LICENCE",
        "LICENSE-MIT.txt",
        "notes.md",
        "table.csv",
        ".hidden.txt",
        ".git/x.txt",
    ] {
        write(&folder, other, "no");
    }
    let prompts = read(folder.path()).unwrap();
    assert_eq!(texts(&prompts), ["1", "2", "3"]);
    let twice = prompts::read(
        &[folder.path().join("c"), folder.path().join("b.txt")],
        None,
    );
    assert_eq!(texts(&twice.unwrap()), ["3", "2"], "in the order given");
}

#[test]
fn bad_files_are_refused_by_name_and_line() {
    assert_eq!(refusal("a.txt", ""), "a.txt: holds no text");
    assert_eq!(refusal("a.txt", " \n\t\n"), "a.txt: holds no text");
    assert_eq!(refusal("a.jsonl", "\n\n"), "a.jsonl: holds no text");
    assert_eq!(
        refusal("a.txt", b"ab\xff\xfe"),
        "a.txt: not UTF-8 text (byte 2)"
    );
    assert_eq!(
        refusal("a.txt", b"ab\0cd"),
        "a.txt: binary data, not text (a zero at byte 2)"
    );
    assert_eq!(
        refusal("a.jsonl", "{\"text\": \"x\"}\n{\"text\": \"y\"\n"),
        "a.jsonl:2: malformed JSON: EOF while parsing an object (column 12)"
    );
    let garbage = refusal("a.jsonl", "{\"text\": \"x\"}\n\nhello");
    assert!(
        garbage.starts_with("a.jsonl:3: malformed JSON: expected value"),
        "{garbage}"
    );
    assert_eq!(
        refusal("a.jsonl", r#"{"content": "x", "id": 1}"#),
        "a.jsonl:1: holds no prompt, only `content`, `id`\n  hint: one of `text`, `messages` or `prompt` is needed"
    );
    assert_eq!(
        refusal("a.jsonl", "[1]").lines().next(),
        Some("a.jsonl:1: a sequence is not an object")
    );
    assert_eq!(
        refusal("a.jsonl", r#"{"text": ["x"]}"#),
        "a.jsonl:1: `text` is a sequence, not a string"
    );
    assert_eq!(
        refusal("a.jsonl", r#"{"prompt": 3}"#),
        "a.jsonl:1: `prompt` is a number, not a string"
    );
    for (messages, problem) in [
        (r#""hi""#, "` is not a list of at least one message"),
        ("[]", "` is not a list of at least one message"),
        (
            r#"[{"role": "user", "content": "x"}, {"content": "y"}]"#,
            "[1]` is not an object with a `role`",
        ),
    ] {
        let said = refusal("a.jsonl", format!(r#"{{"messages": {messages}}}"#));
        assert_eq!(
            said.lines().next(),
            Some(&*format!("a.jsonl:1: `messages{problem}"))
        );
        assert!(said.contains("hint: a message is such as"), "{said}");
    }
    assert!(refusal("a.csv", "x").starts_with("a.csv: format is not known\n  hint: "));
    assert!(refusal("a", "x").starts_with("a: format is not known"));
    let deep = format!(
        "{{\"text\": {}1{}}}",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert!(refusal("a.jsonl", deep).contains("recursion limit"));
}

#[test]
fn chats_without_a_template_are_refused_with_a_hint() {
    let message = refusal(
        "a.jsonl",
        r#"{"messages": [{"role": "user", "content": "x"}]}"#,
    );
    assert_eq!(
        message,
        "a.jsonl:1: has chat `messages`, but the model has no chat template\n  \
         hint: give a template with `--chat-template`, or prompts as `text`"
    );
}

#[test]
fn missing_files_and_empty_folders_are_refused() {
    let folder = TempDir::new().unwrap();
    let message = read(folder.path()).unwrap_err().to_string();
    assert!(
        message.contains("holds no `.txt`, `.jsonl` or `.parquet` file"),
        "{message}"
    );
    let message = read(&folder.path().join("gone.txt"))
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("cannot open") && message.contains("gone.txt"),
        "{message}"
    );
}

#[test]
fn broken_parquet_is_refused() {
    assert!(refusal("a.parquet", "PAR1 no").starts_with("a.parquet: not a sound Parquet file"));
    let folder = TempDir::new().unwrap();
    for name in ["texts.parquet", "chats.parquet"] {
        let sound = fs::read(fixture(name)).unwrap();
        let path = folder.path().join(name);
        for len in (0..sound.len()).step_by(37) {
            fs::write(&path, &sound[..len]).unwrap();
            assert!(read(&path).is_err(), "{name} cut at {len}");
        }
        // Some flips are harmless; none may panic.
        for at in (0..sound.len()).step_by(5) {
            let mut flipped = sound.clone();
            flipped[at] ^= if at % 2 == 0 { 1 } else { 0x80 };
            fs::write(&path, &flipped).unwrap();
            let _ = read(&path);
        }
    }
}

// ---- tokenizers ----------------------------------------------------------------------------------------------------

#[test]
fn smollm2_tokens_equal_those_of_its_authors() {
    let Some(path) = smollm2() else { return };
    let tokenizer = Tokenizer::from_gguf(&path).unwrap();
    let golden: serde_json::Value =
        serde_json::from_slice(&fs::read(fixture("smollm2_tokens.json")).unwrap()).unwrap();
    let ids_in = |value: &serde_json::Value| -> Vec<u32> {
        serde_json::from_value(value["ids"].clone()).unwrap()
    };
    for case in golden["texts"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(ids, ids_in(case), "{text}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }

    let folder = TempDir::new().unwrap();
    let chat = &golden["chat"];
    let line = format!("{{\"messages\": {}}}", chat["messages"]);
    let template = ChatTemplate::of(&tokenizer).unwrap();
    let prompts = prompts::read(&[write(&folder, "chat.jsonl", line)], Some(&template)).unwrap();
    assert_eq!(texts(&prompts), [chat["text"].as_str().unwrap()]);
    let ids = tokenizer.encode_prompts(&prompts, 49_152).unwrap();
    assert_eq!(ids[0].token_ids, ids_in(chat));
    assert_eq!(
        (tokenizer.vocab_size(), tokenizer.separator()),
        (49_152, Some(2))
    );
}

#[test]
fn each_pre_tokenizer_splits_its_own_way() {
    let folder = TempDir::new().unwrap();
    let of = |pre| Tokenizer::from_gguf(&gguf(&folder, Some(pre), &[])).unwrap();
    assert_eq!(
        pieces(&of("smollm"), "ab 1234"),
        ["ab", " ", "1", "2", "3", "4"]
    );
    assert_eq!(
        pieces(&of("qwen2"), "ab 1234"),
        ["ab", " ", "1", "2", "3", "4"]
    );
    assert_eq!(pieces(&of("gpt-2"), "ab1234"), ["ab", "1234"]);
    assert_eq!(pieces(&of("llama-bpe"), "ab1234"), ["ab", "123", "4"]);
    // No space is put before a text.
    assert_eq!(pieces(&of("gpt-2"), "a"), ["a"]);
    // NFC, of Qwen alone.
    assert_eq!(of("qwen2").encode("e\u{301}", false).unwrap().len(), 2);
    assert_eq!(of("smollm").encode("e\u{301}", false).unwrap().len(), 3);
}

#[test]
fn special_tokens_are_recognised_in_text() {
    let folder = TempDir::new().unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf(&folder, Some("smollm"), &[])).unwrap();
    assert_eq!(
        pieces(&tokenizer, "<s>ab<tool></s> a"),
        ["<s>", "ab", "<tool>", "</s>", " a"]
    );
    let bos = tokenizer.encode("<s>", false).unwrap();
    assert_eq!(tokenizer.encode("ab", true).unwrap().len(), 1);
    let adds = Tokenizer::from_gguf(&gguf(&folder, Some("llama-bpe"), &[])).unwrap();
    assert_eq!(adds.encode("ab", true).unwrap()[..1], bos);
    assert_eq!(adds.encode("ab", false).unwrap().len(), 1);
}

#[test]
fn sentence_piece_vocabularies_merge_by_score() {
    let folder = TempDir::new().unwrap();
    let vocabulary: [(&str, f32, i32); 14] = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("<0xC3>", 0.0, 6),
        ("<0xA9>", 0.0, 6),
        ("▁t", -1.0, 1),
        ("er", -2.0, 1),
        ("ter", -3.0, 1),
        ("▁ter", -4.0, 1),
        ("▁", -10.0, 1),
        ("t", -11.0, 1),
        ("e", -12.0, 1),
        ("r", -13.0, 1),
        ("s", -14.0, 1),
    ];
    let array = |values: Vec<Value>| Value::Array(values);
    let path = gguf_of(
        &folder,
        &[
            ("tokenizer.ggml.model", Value::String("llama".into())),
            (
                "tokenizer.ggml.tokens",
                array(vocabulary.map(|v| Value::String(v.0.into())).to_vec()),
            ),
            (
                "tokenizer.ggml.scores",
                array(vocabulary.map(|v| Value::F32(v.1)).to_vec()),
            ),
            (
                "tokenizer.ggml.token_type",
                array(vocabulary.map(|v| Value::I32(v.2)).to_vec()),
            ),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(2)),
            ("tokenizer.ggml.unknown_token_id", Value::U32(0)),
        ],
    );
    let tokenizer = Tokenizer::from_gguf(&path).unwrap();
    // BOS and a leading space; "▁t" merges before "ter", then "▁t"+"er"; é falls back to its bytes.
    assert_eq!(tokenizer.encode("ter s", true).unwrap(), [1, 8, 9, 13]);
    assert_eq!(
        tokenizer.encode("tésé", false).unwrap(),
        [5, 3, 4, 13, 3, 4]
    );
    assert_eq!(tokenizer.decode(&[8, 9, 13]).unwrap(), "ter s");
    assert_eq!(tokenizer.encode("</s>", false).unwrap(), [2]);
}

#[test]
fn unknown_tokenizers_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let refuse = |pre: Option<&str>, change: &[(&str, Value)]| {
        Tokenizer::from_gguf(&gguf(&folder, pre, change))
            .unwrap_err()
            .to_string()
    };
    let message = refuse(Some("chameleon"), &[]);
    assert!(
        message.contains("`tokenizer.ggml.pre`: pre-tokenizer `chameleon` is not known"),
        "{message}"
    );
    assert!(message.contains("hint: "), "{message}");
    let message = refuse(None, &[]);
    assert!(
        message.contains("`tokenizer.ggml.pre`: is missing"),
        "{message}"
    );
    let message = refuse(
        Some("smollm"),
        &[("tokenizer.ggml.model", Value::String("bert".into()))],
    );
    assert!(
        message.contains("tokenizer `bert` is not known"),
        "{message}"
    );
}

#[test]
fn wrong_gguf_metadata_is_refused_by_key() {
    let folder = TempDir::new().unwrap();
    let text = |s: &str| Value::String(s.into());
    for (key, value, problem) in [
        (
            "tokenizer.ggml.tokens",
            Value::U32(3),
            "is not an array of strings",
        ),
        (
            "tokenizer.ggml.tokens",
            Value::Array(vec![Value::U8(1)]),
            "is not an array of strings",
        ),
        (
            "tokenizer.ggml.merges",
            Value::Array(vec![text("ab")]),
            "`ab` is not a pair",
        ),
        (
            "tokenizer.ggml.merges",
            Value::Array(vec![text("zz yy")]),
            "",
        ),
        (
            "tokenizer.ggml.token_type",
            Value::Array(vec![Value::I32(1)]),
            "1 types for",
        ),
        (
            "tokenizer.ggml.bos_token_id",
            Value::U32(9999),
            "9999 is beyond the",
        ),
        (
            "tokenizer.ggml.bos_token_id",
            text("x"),
            "is not an integer",
        ),
        (
            "tokenizer.ggml.add_bos_token",
            text("x"),
            "is not a boolean",
        ),
        ("tokenizer.ggml.pre", Value::Bool(true), "is not a string"),
        (
            "tokenizer.chat_template",
            Value::Bool(true),
            "is not a string",
        ),
    ] {
        let path = gguf(&folder, Some("smollm"), &[(key, value)]);
        let message = Tokenizer::from_gguf(&path).unwrap_err().to_string();
        assert!(message.contains(problem), "{key}: {message}");
        assert!(
            problem.is_empty() || message.contains(key),
            "{key}: {message}"
        );
        assert!(message.contains("model.gguf"), "{message}");
    }
}

#[test]
fn hostile_ggufs_are_refused() {
    let folder = TempDir::new().unwrap();
    let sound = fs::read(gguf(&folder, Some("smollm"), &[])).unwrap();
    let path = folder.path().join("bad.gguf");
    let refuse = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        Tokenizer::from_gguf(&path).unwrap_err().to_string()
    };
    assert!(refuse(b"").contains("not a sound GGUF file"));
    assert!(refuse(b"not a gguf at all").contains("not a sound GGUF file"));
    for len in (0..sound.len() - 64).step_by(101) {
        refuse(&sound[..len]);
    }
    // Numbers of tensors and of keys, each beyond any memory.
    for at in [8, 16] {
        let mut huge = sound.clone();
        huge[at..at + 8].fill(0xff);
        assert!(refuse(&huge).contains("bad.gguf"));
    }
    // Any byte of the first keys turned over: refused or harmless, never a panic.
    for at in 0..400 {
        let mut flipped = sound.clone();
        flipped[at] ^= 0xff;
        fs::write(&path, &flipped).unwrap();
        let _ = Tokenizer::from_gguf(&path);
    }
}

#[test]
fn folders_give_tokenizer_specials_and_template() {
    let folder = TempDir::new().unwrap();
    // Truncation and padding, as some models ship them, must not apply.
    let json = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
        "added_tokens": [{"id": 4, "content": "<e>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<pad>": 0, "a": 1, "b": 2, "c": 3, "<e>": 4}, "unk_token": "<pad>"}}"#;
    write(&folder, "tokenizer.json", json);
    let plain = Tokenizer::from_folder(folder.path()).unwrap();
    assert_eq!(plain.encode("a b c <e>", true).unwrap(), [1, 2, 3, 4]);
    assert_eq!(plain.separator(), None);
    assert!(ChatTemplate::of(&plain).is_none());
    assert_eq!(
        plain.sha256(),
        oscar_kv::files::sha256_bytes(json.as_bytes())
    );

    let chat = write(
        &folder,
        "chat.jsonl",
        r#"{"messages": [{"role": "user", "content": "a"}]}"#,
    );
    let rendered = || {
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let template = ChatTemplate::of(&tokenizer).unwrap();
        prompts::read(std::slice::from_ref(&chat), Some(&template)).map(|p| p[0].text.clone())
    };
    write(
        &folder,
        "tokenizer_config.json",
        r#"{"eos_token": {"content": "<e>"}, "bos_token": null, "chat_template": "one {{ eos_token }}"}"#,
    );
    assert_eq!(rendered().unwrap(), "one <e>");
    assert_eq!(
        Tokenizer::from_folder(folder.path()).unwrap().separator(),
        Some(4)
    );
    write(
        &folder,
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]}"#,
    );
    write(
        &folder,
        "special_tokens_map.json",
        r#"{"eos_token": "<e>"}"#,
    );
    assert_eq!(rendered().unwrap(), "two");
    assert_eq!(
        Tokenizer::from_folder(folder.path()).unwrap().separator(),
        Some(4)
    );
    write(&folder, "chat_template.jinja", "three {{ eos_token }}");
    assert_eq!(rendered().unwrap(), "three <e>");

    write(&folder, "chat_template.jinja", "{% for %}");
    let message = rendered().unwrap_err().to_string();
    assert!(
        message.contains("chat_template.jinja: not a sound template"),
        "{message}"
    );
    let file = folder.path().join("chat_template.jinja");
    assert!(ChatTemplate::from_file(&file, &plain).is_err());
    write(&folder, "tokenizer_config.json", "{");
    let message = Tokenizer::from_folder(folder.path())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("tokenizer_config.json: malformed JSON"),
        "{message}"
    );
    write(&folder, "tokenizer.json", "{}");
    fs::remove_file(folder.path().join("tokenizer_config.json")).unwrap();
    let message = Tokenizer::from_folder(folder.path())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("tokenizer.json: not a usable tokenizer"),
        "{message}"
    );
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let message = Tokenizer::from_folder(folder.path())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("has no `tokenizer.json`\n  hint: "),
        "{message}"
    );
}

#[test]
fn tokens_beyond_the_vocabulary_are_refused_by_prompt() {
    let folder = TempDir::new().unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf(&folder, Some("smollm"), &[])).unwrap();
    let path = write(
        &folder,
        "a.jsonl",
        "{\"text\": \"x\"}\n{\"text\": \"x</s>\"}\n",
    );
    let prompts = read(&path).unwrap();
    assert!(tokenizer.encode_prompts(&prompts, 264).is_ok());
    let message = tokenizer
        .encode_prompts(&prompts, 256)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("a.jsonl:2: token id 262 is beyond the model's vocabulary of 256"),
        "{message}"
    );
}

#[test]
fn the_same_prompts_give_the_same_corpus_on_any_number_of_threads() {
    let folder = TempDir::new().unwrap();
    let tokenizer = Tokenizer::from_gguf(&gguf(&folder, Some("smollm"), &[])).unwrap();
    let lines: Vec<String> = (0..300)
        .map(|i| format!("{{\"text\": \"prompt {i} {}\"}}", "ab 1234 ".repeat(i % 7)))
        .collect();
    let prompts = read(&write(&folder, "a.jsonl", lines.join("\n"))).unwrap();
    let corpus = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let ids = pool.install(|| tokenizer.encode_prompts(&prompts, 1000).unwrap());
        pack(
            &ids,
            &PackOptions {
                seq_len: 256,
                budget_tokens: Some(4000),
                holdout_tokens: 500,
                ..PackOptions::default()
            },
        )
        .unwrap()
    };
    let one = corpus(1);
    assert_eq!(one, corpus(4));
    assert_eq!(one.tokens, 4000);
    assert!(
        (438..=500).contains(&one.holdout_tokens),
        "{}",
        one.holdout_tokens
    );
}
