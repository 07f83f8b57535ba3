//! What a long run tells the person who waits for it.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Receives the steps of [`collect`](super::collect::collect).
pub trait Progress {
    /// `layers` in all, of which the first `done` need no more work; each runs over `layer_tokens` tokens.
    fn start(&mut self, layers: usize, done: usize, layer_tokens: usize);

    /// `n` more tokens ran through the present layer. `Break` ends the run as Ctrl-C does.
    fn tokens(&mut self, n: usize) -> ControlFlow<()>;

    /// Layer `layer` is on disk.
    fn layer_done(&mut self, layer: usize);

    /// Something a person should know, such as a checkpoint that was damaged and is computed again.
    fn note(&mut self, text: &str);
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&mut self, _layers: usize, _done: usize, _layer_tokens: usize) {}

    fn tokens(&mut self, _n: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn layer_done(&mut self, _layer: usize) {}

    fn note(&mut self, _text: &str) {}
}

/// Standard error: a bar on a terminal, a line every ten seconds elsewhere.
pub struct Stderr {
    bar: ProgressBar,
    plain: bool,
    layer: usize,
    layers: usize,
    started: Instant,
    last_line: Instant,
}

impl Stderr {
    const LINE_INTERVAL: Duration = Duration::from_secs(10);

    /// # Panics
    /// Never: the template is fixed.
    pub fn new() -> Self {
        let plain = !std::io::stderr().is_terminal();
        let target = if plain {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let style = "{msg} [{bar:30}] {per_sec} tokens, {eta} left";
        let style = ProgressStyle::with_template(style).expect("a valid template");
        let style = style.progress_chars("=> ").with_key(
            "per_sec",
            |state: &indicatif::ProgressState, out: &mut dyn std::fmt::Write| {
                let _ = write!(out, "{:.0}/s", state.per_sec());
            },
        );
        Self {
            bar: ProgressBar::with_draw_target(Some(0), target).with_style(style),
            plain,
            layer: 0,
            layers: 0,
            started: Instant::now(),
            last_line: Instant::now(),
        }
    }

    fn line(&mut self) {
        if !self.plain {
            return;
        }
        self.last_line = Instant::now();
        let elapsed = self.started.elapsed().as_secs_f64();
        let (at, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let rate = at as f64 / elapsed.max(1e-3);
        let left = all.saturating_sub(at) as f64 / rate.max(1e-3);
        eprintln!(
            "layer {} of {}, {rate:.0} tokens/s a layer, {left:.0} s left",
            (self.layer + 1).min(self.layers),
            self.layers
        );
    }
}

impl Default for Stderr {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress for Stderr {
    fn start(&mut self, layers: usize, done: usize, layer_tokens: usize) {
        self.layer = done;
        self.layers = layers;
        self.started = Instant::now();
        self.last_line = Instant::now();
        self.bar.set_length(((layers - done) * layer_tokens) as u64);
        self.bar.reset();
        self.bar.set_message(format!("layer {}/{layers}", done + 1));
    }

    fn tokens(&mut self, n: usize) -> ControlFlow<()> {
        self.bar.inc(n as u64);
        if self.last_line.elapsed() >= Self::LINE_INTERVAL {
            self.line();
        }
        ControlFlow::Continue(())
    }

    fn layer_done(&mut self, layer: usize) {
        self.layer = layer + 1;
        if self.layer == self.layers {
            self.line();
            self.bar.finish_and_clear();
        } else {
            let layers = self.layers;
            self.bar
                .set_message(format!("layer {}/{layers}", layer + 2));
        }
    }

    fn note(&mut self, text: &str) {
        if self.plain {
            eprintln!("{text}");
        } else {
            self.bar.suspend(|| eprintln!("{text}"));
        }
    }
}
