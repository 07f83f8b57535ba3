//! Ctrl-C and SIGTERM end long runs between two steps, so that nothing half-done is kept.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Notes that the run should stop, and says whether that was noted before; called by the signal handler.
pub fn request() -> bool {
    INTERRUPTED.swap(true, Ordering::SeqCst)
}

/// [`Error::Interrupted`] once [`request`] was called: long loops call this between steps.
pub fn check() -> Result<()> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        return Err(Error::Interrupted);
    }
    Ok(())
}
