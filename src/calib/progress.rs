//! What a long run tells the person who waits for it.

use std::ops::ControlFlow;

/// Receives the steps of [`collect`](super::collect::collect).
pub trait Progress {
    /// `layers` in all, of which the first `done` need no more work; each runs over `layer_tokens` tokens.
    fn start(&mut self, layers: usize, done: usize, layer_tokens: usize);

    /// `n` more tokens ran through the present layer. `Break` ends the run as Ctrl-C does.
    fn tokens(&mut self, n: usize) -> ControlFlow<()>;

    /// Layer `layer` is computed; it is on disk before the next one is told.
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
