//! `oscar bench collect`: how long a calibration takes, and on what.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::BinaryBytes;
use serde::Serialize;

use crate::Error;
use crate::calib::collect::Timings;
use crate::calib::{CollectOptions, FitOptions, Moments, collect, fit, plan};
use crate::cli::Outcome;
use crate::cli::common::{CalibrationDataArgs, Format, print, print_json};
use crate::cli::progress::Meter;
use crate::data::Tokenizer;
use crate::device::DeviceChoice;
use crate::model::{Model, OpenOptions, synthetic};

/// Time a calibration, from checkpoint files to a zoo entry, of a model or of random weights of its shape.
///
/// The moments and the entry are thrown away at the end.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A config.json: random weights of its shape are made first, which does not count
    #[arg(short, long, value_name = "FILE", required_unless_present = "model")]
    config: Option<PathBuf>,

    /// Hugging Face folder, GGUF file, or hub id
    #[arg(short, long, conflicts_with = "config")]
    model: Option<String>,

    /// Where to compute: auto, cpu, or cuda:N (see `oscar devices`)
    #[arg(long, default_value_t)]
    device: DeviceChoice,

    #[command(flatten)]
    data: CalibrationDataArgs,

    /// Folder for everything that is written and thrown away; the system's temporary folder where not given
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Seconds, but for the last three.
#[derive(Serialize)]
struct Measured {
    device: String,
    /// Making random weights.
    synthesize: Option<f64>,
    /// Opening the model and tokenizing.
    open: f64,
    prepare: f64,
    load: f64,
    decoder: f64,
    attention: f64,
    accumulate: f64,
    write: f64,
    fit: f64,
    /// Of decoder, attention and accumulate.
    compute: f64,
    /// From files to the entry, without `synthesize` and `prepare`.
    total: f64,
    tokens_per_second: f64,
    moments_bytes: u64,
    peak_device_bytes: Option<u64>,
}

pub fn run(args: &Args) -> Result<Outcome> {
    let work = tempfile::tempdir_in(work_root(args))
        .map_err(Error::io("create a folder in", work_root(args)))?;
    let begin = Instant::now();
    let locator = match (&args.config, &args.model) {
        (Some(config), _) => {
            let folder = work.path().join("model");
            synthetic::write(config, &folder, 0)?;
            folder.display().to_string()
        }
        (None, model) => model.clone().unwrap_or_default(),
    };
    let synthesize = args.config.as_ref().map(|_| seconds(begin.elapsed()));

    let options = OpenOptions {
        device: args.device.open()?,
        dtype: None,
    };
    let begin = Instant::now();
    let model = Model::open(&locator, &options)?;
    let tokenizer = Tokenizer::load(&model)?;
    let corpus = args.data.read(&model, &tokenizer)?;
    let opened = begin.elapsed();

    let path = work.path().join("moments.safetensors");
    let options = CollectOptions::new(path, tokenizer.sha256());
    let planned = plan(&model, &corpus, &options)?;
    let collecting = Instant::now();
    let collected = collect(&model, &corpus, &options, &mut Meter::new())?;
    let collecting = collecting.elapsed();

    let fitting = Instant::now();
    let moments = Moments::open(&collected.path)?;
    let fitted = fit(&moments, &FitOptions::default())?;
    fitted.entry.write(&work.path().join("entry"), false)?;
    let fitting = fitting.elapsed();

    let Timings {
        prepare,
        load,
        decoder,
        attention,
        accumulate,
        write,
    } = collected.timings;
    let compute = decoder + attention + accumulate;
    let tokens = corpus.tokens + corpus.holdout_tokens;
    let measured = Measured {
        device: args.device.to_string(),
        synthesize,
        open: seconds(opened),
        prepare: seconds(prepare),
        load: seconds(load),
        decoder: seconds(decoder),
        attention: seconds(attention),
        accumulate: seconds(accumulate),
        write: seconds(write),
        fit: seconds(fitting),
        compute: seconds(compute),
        total: seconds((opened + collecting + fitting).saturating_sub(prepare)),
        tokens_per_second: tokens as f64 / seconds(compute),
        moments_bytes: std::fs::metadata(moments.path())
            .map_err(Error::io("read", moments.path()))?
            .len(),
        peak_device_bytes: collected.peak_device_bytes,
    };
    match args.format {
        Format::Json => print_json(&measured)?,
        Format::Text => print(&measured.table(planned.peak_device_bytes))?,
    }
    Ok(Outcome::Fine)
}

fn work_root(args: &Args) -> PathBuf {
    args.work.clone().unwrap_or_else(std::env::temp_dir)
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

impl Measured {
    fn table(&self, planned: Option<u64>) -> String {
        let second = |x: f64| format!("{x:.2} s");
        let size = |bytes: u64| BinaryBytes(bytes).to_string();
        let mut rows = vec![
            ("open, tokenize", second(self.open)),
            ("wait for weights", second(self.load)),
            ("decoder", second(self.decoder)),
            ("attention", second(self.attention)),
            ("accumulate", second(self.accumulate)),
            ("write", second(self.write)),
            ("fit", second(self.fit)),
            ("total", second(self.total)),
            ("compute", second(self.compute)),
            (
                "speed",
                format!("{:.0} tokens/s through all layers", self.tokens_per_second),
            ),
            ("moments file", size(self.moments_bytes)),
        ];
        if let Some(peak) = self.peak_device_bytes {
            let planned =
                planned.map_or_else(String::new, |bytes| format!(" (planned: {})", size(bytes)));
            rows.push(("peak GPU memory", format!("{}{planned}", size(peak))));
            rows.push((
                "not counted",
                format!("{:.2} s preparing the GPU", self.prepare),
            ));
        }
        if let Some(synthesize) = self.synthesize {
            rows.push(("not counted", format!("{synthesize:.2} s making weights")));
        }
        let line = |(name, value): &(&str, String)| format!("{name:<17} {value}");
        rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}
