//! Attempts at what a hub may refuse for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

use rand::RngExt;

use super::Watch;
use crate::{Error, Result, interrupt};

/// Attempts after the first.
const RETRIES: u32 = 5;

/// The wait before the first of them, in milliseconds; each next one is twice as long.
const DELAY_MS: u64 = 500;

/// Overrides [`DELAY_MS`].
const DELAY_VARIABLE: &str = "OSCAR_RETRY_DELAY_MS";

/// Nobody waits longer than this for an answer to one request, whatever `Retry-After` says.
const LONGEST: Duration = Duration::from_mins(5);

/// How an attempt failed.
pub(super) enum Failure {
    /// The next attempt will fail in the same way.
    Final(Error),
    /// The connection broke: the hub may have done what was asked, or not.
    Broken(Error),
    /// Another attempt may succeed, not before `after` where the hub named a time.
    Passing {
        error: Error,
        after: Option<Duration>,
    },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

/// Repeats attempts, with a pause between them that grows and is partly random.
#[derive(Clone)]
pub(super) struct Retry {
    delay: Duration,
    watch: Arc<dyn Watch>,
}

impl Retry {
    pub fn new(watch: Arc<dyn Watch>) -> Self {
        let delay_ms = env::var(DELAY_VARIABLE)
            .ok()
            .and_then(|value| value.parse().ok())
            .unwrap_or(DELAY_MS);
        Self {
            delay: Duration::from_millis(delay_ms),
            watch,
        }
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed too often; Ctrl-C ends the wait between two.
    pub fn run<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T> {
        let mut delay = self.delay;
        for left in (0..=RETRIES).rev() {
            interrupt::check()?;
            let (error, after) = match attempt() {
                Ok(done) => return Ok(done),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Broken(error)) => (error, None),
                Err(Failure::Passing { error, after }) => (error, after),
            };
            if let Some(after) = after.filter(|after| *after > LONGEST) {
                return Err(error.hint(format!(
                    "the hub asks for a pause of {} s: run the same command after it",
                    after.as_secs()
                )));
            }
            if left == 0 {
                return Err(error);
            }
            let pause = after.unwrap_or_default().max(jittered(delay));
            self.watch.note(&format!(
                "{}; trying again in {:.1} s",
                error.to_string().lines().next().unwrap_or_default(),
                pause.as_secs_f64()
            ));
            wait(pause)?;
            delay = (delay * 2).min(LONGEST);
        }
        Err(Error::Interrupted)
    }
}

/// Half of `delay`, and a random part of the other half: many clients that failed at once do not come back at once.
fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(rand::rng().random_range(0.5..1.0))
}

fn wait(pause: Duration) -> Result<()> {
    const STEP: Duration = Duration::from_millis(100);
    let end = Instant::now() + pause;
    loop {
        interrupt::check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(STEP));
    }
}

/// `Retry-After` in its usual form, whole seconds.
pub(super) fn retry_after(header: &str) -> Option<Duration> {
    header.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Watch for Notes {
        fn expect(&self, _: u64) {}

        fn bytes(&self, _: u64) {}

        fn note(&self, text: &str) {
            self.0.lock().unwrap().push(text.to_owned());
        }
    }

    fn passing(after: Option<Duration>) -> Failure {
        Failure::Passing {
            error: Error::invalid("hub", "busy"),
            after,
        }
    }

    fn fast() -> (Retry, Arc<Notes>) {
        let notes = Arc::new(Notes::default());
        let retry = Retry {
            delay: Duration::from_millis(1),
            watch: notes.clone(),
        };
        (retry, notes)
    }

    #[test]
    fn failures_that_pass_are_repeated_and_said() {
        let (retry, notes) = fast();
        let mut left = 2;
        let done = retry.run(|| {
            if left == 0 {
                return Ok("done");
            }
            left -= 1;
            Err(passing(None))
        });
        assert_eq!(done.unwrap(), "done");
        let notes = notes.0.lock().unwrap();
        assert_eq!(notes.len(), 2);
        assert!(notes[0].starts_with("hub: busy; trying again in "));
    }

    #[test]
    fn the_hub_names_the_pause() {
        let (retry, _) = fast();
        let (start, mut first) = (Instant::now(), true);
        let done = retry.run(|| {
            if std::mem::take(&mut first) {
                return Err(passing(Some(Duration::from_millis(150))));
            }
            Ok(())
        });
        done.unwrap();
        assert!(start.elapsed() >= Duration::from_millis(150));
    }

    #[test]
    fn attempts_end() {
        let (retry, _) = fast();
        let mut attempts = 0;
        let error = retry.run::<()>(|| {
            attempts += 1;
            Err(passing(None))
        });
        assert_eq!(error.unwrap_err().to_string(), "hub: busy");
        assert_eq!(attempts, RETRIES + 1);

        let mut attempts = 0;
        let error = retry.run::<()>(|| {
            attempts += 1;
            Err(passing(Some(Duration::from_hours(1))))
        });
        assert!(error.unwrap_err().to_string().contains("pause of 3600 s"));
        assert_eq!(attempts, 1);

        let mut attempts = 0;
        let error = retry.run::<()>(|| {
            attempts += 1;
            Err(Error::invalid("hub", "no").into())
        });
        assert!(error.is_err());
        assert_eq!(attempts, 1);
    }
}
