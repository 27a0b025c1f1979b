//! Logs: on standard error, one line each, every line of a copy with the copy's id. Nothing waits for them to be read
//! ([`console`]).
//!
//! `--log` or `TOWLINE_LOG` say what is logged, in the words of `tracing`: `debug`, or `warn,towline_vhost_user=debug`. A copy has
//! one process, so what is logged by any of its threads is of that copy; its id is in the first of its JSON events too.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};

use anyhow::{Context as _, Result};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::console;

/// What the environment calls it.
const VARIABLE: &str = "TOWLINE_LOG";

/// Names one request among all that a log may have: 64 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestId(u64);

impl RequestId {
    pub(crate) fn new() -> Self {
        Self(RandomState::new().hash_one(std::process::id()))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Begins to log. `wished` is what the command line says; each line has the `request`, if there is one.
pub(crate) fn begin(wished: Option<&str>, request: Option<RequestId>) -> Result<()> {
    let filter = match wished {
        Some(text) => EnvFilter::try_new(text).with_context(|| {
            format!("--log {text}: expected a level (error, warn, info, debug, trace) or targets with levels, as warn,towline_net=debug")
        })?,
        None => EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new("warn")),
    };
    let lines = Lines { request, format: tracing_subscriber::fmt::format().without_time() };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(console::Log).event_format(lines).init();
    Ok(())
}

struct Lines {
    request: Option<RequestId>,
    format: Format<Full, ()>,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if let Some(request) = self.request {
            write!(writer, "{request} ")?;
        }
        self.format.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_names_of_their_own() {
        let [first, second] = [RequestId::new(), RequestId::new()];
        assert_ne!(first, second);
        assert_eq!(first.to_string().len(), 16);
    }
}
