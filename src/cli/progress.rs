//! What a long run tells the person who waits for it, on standard error: a bar on a terminal, a line every ten
//! seconds elsewhere.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::calib::Progress;
use crate::eval::Step;

const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Counts tokens times layers.
pub struct Meter {
    bar: ProgressBar,
    on_terminal: bool,
    layers: usize,
    started: Instant,
    last_line: Instant,
}

impl Meter {
    pub fn new() -> Self {
        let on_terminal = std::io::stderr().is_terminal();
        let target = if on_terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        if let Ok(style) =
            ProgressStyle::with_template("{msg} [{bar:30}] {rate} tokens/s a layer, {eta} left")
        {
            bar.set_style(style.progress_chars("=> ").with_key(
                "rate",
                |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                    let _ = write!(out, "{:.0}", state.per_sec());
                },
            ));
        }
        Self {
            bar,
            on_terminal,
            layers: 0,
            started: Instant::now(),
            last_line: Instant::now(),
        }
    }

    /// Receives the steps of [`crate::eval::validate`].
    pub fn step(&mut self, step: Step) {
        if let Some(warning) = step.warning {
            self.bar.suspend(|| eprintln!("warning: {warning}"));
        }
        if self.bar.length() != Some(step.total) {
            self.restart(step.total);
        }
        self.bar.set_message(step.what.to_owned());
        self.bar.set_position(step.done);
        self.tick();
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn restart(&mut self, total: u64) {
        self.bar.set_length(total);
        self.bar.reset();
        self.started = Instant::now();
        self.last_line = Instant::now();
    }

    /// Where there is no bar, a line now and then.
    fn tick(&mut self) {
        if self.on_terminal || self.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        self.last_line = Instant::now();
        let (done, total) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let rate = done as f64 / self.started.elapsed().as_secs_f64().max(1e-3);
        let left = total.saturating_sub(done) as f64 / rate.max(1e-3);
        eprintln!(
            "{}, {rate:.0} tokens/s a layer, {left:.0} s left",
            self.bar.message()
        );
    }
}

impl Progress for Meter {
    fn start(&mut self, layers: usize, done: usize, layer_tokens: usize) {
        self.layers = layers;
        self.restart(((layers - done) * layer_tokens) as u64);
        if done > 0 && done < layers {
            self.note(&format!("going on after layer {done} of {layers}"));
        }
        self.bar
            .set_message(format!("layer {} of {layers}", done + 1));
    }

    fn tokens(&mut self, n: usize) -> ControlFlow<()> {
        self.bar.inc(n as u64);
        self.tick();
        ControlFlow::Continue(())
    }

    fn layer_done(&mut self, layer: usize) {
        if layer + 1 == self.layers {
            self.finish();
        } else {
            self.bar
                .set_message(format!("layer {} of {}", layer + 2, self.layers));
        }
    }

    fn note(&mut self, text: &str) {
        if self.on_terminal {
            self.bar.suspend(|| eprintln!("{text}"));
        } else {
            eprintln!("{text}");
        }
    }
}

/// Counts bytes that come or go.
#[cfg(feature = "hub")]
pub struct Transfer {
    bar: ProgressBar,
}

#[cfg(feature = "hub")]
impl Transfer {
    pub fn new() -> Self {
        // Hidden by itself where standard error is no terminal.
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(
            "[{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// Clears the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(feature = "hub")]
impl crate::zoo::hub::Watch for Transfer {
    fn expect(&self, count: u64) {
        self.bar.inc_length(count);
    }

    fn bytes(&self, count: u64) {
        self.bar.inc(count);
    }

    fn note(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{text}"));
    }
}
